"""The Transformer of *Attention Is All You Need*, with the matrices of every head in your hands."""

from triptych.attention import Factored, MultiHeadAttention
from triptych.errors import DataError, TriptychError, UsageError
from triptych.models import PRESETS, EncoderDecoder, ModelConfig
from triptych.runs import Run, load, resume, train
from triptych.training import Recipe, read_recipe

__all__ = [
    "PRESETS",
    "DataError",
    "EncoderDecoder",
    "Factored",
    "ModelConfig",
    "MultiHeadAttention",
    "Recipe",
    "Run",
    "TriptychError",
    "UsageError",
    "load",
    "read_recipe",
    "resume",
    "train",
]
