"""Opened models and readers: a source becomes a model with tokenizers, and a reader runs it on texts.

`open_model` makes an `OpenedModel` of a source. A `Reader` encodes texts, runs the model, and records the
inputs of its layers (`Recording`). Attention pages, rewrites with a calibration text, and the activations of
`Model.run` all use this record.
"""

from triptych.running.opening.opened import NotFiniteError as NotFiniteError
from triptych.running.opening.opened import OpenedModel as OpenedModel
from triptych.running.opening.opened import open_language_model as open_language_model
from triptych.running.opening.opened import open_model as open_model
from triptych.running.opening.opened import open_translator as open_translator
from triptych.running.opening.opened import require_finite_tensors as require_finite_tensors
from triptych.running.opening.reader import AttentionKind as AttentionKind
from triptych.running.opening.reader import LayerCall as LayerCall
from triptych.running.opening.reader import Reader as Reader
from triptych.running.opening.reader import Recording as Recording
from triptych.running.opening.reader import TextIds as TextIds
from triptych.running.opening.reader import record_calls as record_calls
from triptych.running.opening.text_model import Seen as Seen
from triptych.running.opening.text_model import TextModel as TextModel
from triptych.running.opening.text_model import Window as Window
from triptych.running.opening.text_model import read_tab_pairs as read_tab_pairs
from triptych.running.opening.text_model import read_whole_text as read_whole_text
from triptych.running.opening.transformers_models import TransformersModel as TransformersModel
from triptych.running.opening.transformers_models import open_text_model as open_text_model
from triptych.running.opening.transformers_models import why_not_run as why_not_run
