"""Opening a model: what a source is, its model with tokenizers, and one reader that runs it on texts.

`open_model` makes an `OpenedModel` of a source. A `Reader` turns texts into token ids, runs the model, and
records what its layers were given (`Recording`): attention pages, rewrites that look at a text, and the
activations of `Model.run` all read that one record. `Places` says how layers and heads are spelled.
"""

from triptych.opening.opened import (
    NotFiniteError,
    OpenedModel,
    open_language_model,
    open_model,
    open_translator,
    require_finite_tensors,
)
from triptych.opening.places import Places
from triptych.opening.reader import (
    AttentionKind,
    LayerCall,
    Reader,
    Recording,
    TextIds,
    record_calls,
    require_text,
)
from triptych.opening.text_model import Seen, TextModel, Window, first_line, read_pairs, read_whole_text
from triptych.opening.transformers_models import TransformersModel, open_text_model, why_not_run

__all__ = [
    "AttentionKind",
    "LayerCall",
    "NotFiniteError",
    "OpenedModel",
    "Places",
    "Reader",
    "Recording",
    "Seen",
    "TextIds",
    "TextModel",
    "TransformersModel",
    "Window",
    "first_line",
    "open_language_model",
    "open_model",
    "open_text_model",
    "open_translator",
    "read_pairs",
    "read_whole_text",
    "record_calls",
    "require_finite_tensors",
    "require_text",
    "why_not_run",
]
