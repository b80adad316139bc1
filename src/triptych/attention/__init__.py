"""The operation, its masks and positions, the cache, and the ways to write a head."""

from triptych.attention.cache import DecoderCache, LayerCache
from triptych.attention.four_way import four_way_attention
from triptych.attention.layer import LayerOutput, MultiHeadAttention, check_sizes
from triptych.attention.masks import causal_mask, padding_mask
from triptych.attention.operation import Attended, Explanation, attention, explain_attention
from triptych.attention.positions import (
    Alibi,
    AttentionPositions,
    LearnedPositions,
    NoPositions,
    Rotary,
    SinusoidalPositions,
    sinusoidal,
)
from triptych.attention.projections import (
    PARAMETERISATIONS,
    Bilinear,
    Collaborative,
    Direct,
    Factored,
    FourMatrix,
    Grouped,
    KeyValue,
    Latent,
    Parameterisation,
    Projections,
    Shared,
    Stacked,
    Symmetric,
    parameterisation,
    parameterisation_of,
)

__all__ = [
    "PARAMETERISATIONS",
    "Alibi",
    "Attended",
    "AttentionPositions",
    "Bilinear",
    "Collaborative",
    "DecoderCache",
    "Direct",
    "Explanation",
    "Factored",
    "FourMatrix",
    "Grouped",
    "KeyValue",
    "Latent",
    "LayerCache",
    "LayerOutput",
    "LearnedPositions",
    "MultiHeadAttention",
    "NoPositions",
    "Parameterisation",
    "Projections",
    "Rotary",
    "Shared",
    "SinusoidalPositions",
    "Stacked",
    "Symmetric",
    "attention",
    "causal_mask",
    "check_sizes",
    "explain_attention",
    "four_way_attention",
    "padding_mask",
    "parameterisation",
    "parameterisation_of",
    "sinusoidal",
]
