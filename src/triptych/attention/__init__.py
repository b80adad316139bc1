"""The operation, its masks and positions, the cache, and the ways to write a head."""

from triptych.attention.cache import DecoderCache, LayerCache
from triptych.attention.layer import LayerOutput, MultiHeadAttention
from triptych.attention.masks import causal_mask, padding_mask
from triptych.attention.operation import Attended, attention
from triptych.attention.positions import SinusoidalPositions, sinusoidal
from triptych.attention.projections import Factored, Parameterisation, Projections

__all__ = [
    "Attended",
    "DecoderCache",
    "Factored",
    "LayerCache",
    "LayerOutput",
    "MultiHeadAttention",
    "Parameterisation",
    "Projections",
    "SinusoidalPositions",
    "attention",
    "causal_mask",
    "padding_mask",
    "sinusoidal",
]
