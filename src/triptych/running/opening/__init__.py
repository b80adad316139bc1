"""Readers: they run the model of a source on texts.

`open_reader` makes a `Reader` of a source: the module with its tokenizers. A `Reader` encodes texts, runs the
model, and records the inputs of its layers (`Recording`). Attention pages, rewrites with a calibration text,
and the activations of `Model.run` all use this record.
"""

from typing import TYPE_CHECKING

from triptych.listed_names import finder

if TYPE_CHECKING:
    from triptych.running.opening.generation_config import Asked as Asked
    from triptych.running.opening.generation_config import (
        GenerationConfig as GenerationConfig,
    )
    from triptych.running.opening.labels import listed as listed
    from triptych.running.opening.layer_calls import AttentionKind as AttentionKind
    from triptych.running.opening.layer_calls import LayerCall as LayerCall
    from triptych.running.opening.layer_calls import Recording as Recording
    from triptych.running.opening.layer_calls import TextIds as TextIds
    from triptych.running.opening.layer_calls import record_calls as record_calls
    from triptych.running.opening.marian_tokenizers import (
        TARGET_FOLDER as TARGET_FOLDER,
    )
    from triptych.running.opening.marian_tokenizers import (
        write_tokenizers as write_tokenizers,
    )
    from triptych.running.opening.reader import Reader as Reader
    from triptych.running.opening.readers_of_sources import (
        NotFiniteError as NotFiniteError,
    )
    from triptych.running.opening.readers_of_sources import (
        open_language_model as open_language_model,
    )
    from triptych.running.opening.readers_of_sources import open_reader as open_reader
    from triptych.running.opening.readers_of_sources import (
        open_translator as open_translator,
    )
    from triptych.running.opening.readers_of_sources import (
        require_finite_tensors as require_finite_tensors,
    )
    from triptych.running.opening.run_folder import DECODING as DECODING
    from triptych.running.opening.run_folder import RECIPE as RECIPE
    from triptych.running.opening.run_folder import TOKENIZER as TOKENIZER
    from triptych.running.opening.run_folder import DecodingConfig as DecodingConfig
    from triptych.running.opening.run_folder import Section as Section
    from triptych.running.opening.run_folder import check_tokenizers as check_tokenizers
    from triptych.running.opening.text_reader import Output as Output
    from triptych.running.opening.text_reader import Seen as Seen
    from triptych.running.opening.text_reader import TextReader as TextReader
    from triptych.running.opening.text_reader import Window as Window
    from triptych.running.opening.text_reader import read_tab_pairs as read_tab_pairs
    from triptych.running.opening.text_reader import read_whole_text as read_whole_text
    from triptych.running.opening.text_settings import TextSettings as TextSettings
    from triptych.running.opening.text_settings import (
        read_text_settings as read_text_settings,
    )
    from triptych.running.opening.transformers_reader import (
        TransformersReader as TransformersReader,
    )
    from triptych.running.opening.transformers_reader import (
        open_text_reader as open_text_reader,
    )
    from triptych.running.opening.transformers_reader import why_not_run as why_not_run
    from triptych.running.opening.translators import read_marian as read_marian

__getattr__ = finder(__name__, __file__)
