"""Opening a model: what a source is, its model with tokenizers, and one reader that runs it on texts.

`find_source` decides what a path or a name is. `open_model` makes an `OpenedModel` of it. A `Reader` turns
texts into token ids, runs the model, and records what its layers were given (`Recording`): attention pages,
rewrites that look at a text, and the activations of `Model.run` all read that one record.
"""

from triptych.opening.opened import (
    NotFiniteError,
    OpenedModel,
    open_language_model,
    open_model,
    open_translator,
    require_finite_tensors,
)
from triptych.opening.reader import (
    AttentionKind,
    LayerCall,
    Reader,
    Recording,
    TextIds,
    record_calls,
    require_text,
)
from triptych.opening.source import Source, find_source, is_on_hub

__all__ = [
    "AttentionKind",
    "LayerCall",
    "NotFiniteError",
    "OpenedModel",
    "Reader",
    "Recording",
    "Source",
    "TextIds",
    "find_source",
    "is_on_hub",
    "open_language_model",
    "open_model",
    "open_translator",
    "record_calls",
    "require_finite_tensors",
    "require_text",
]
