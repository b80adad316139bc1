"""The operation, its masks and positions, the cache, and the ways to write a head."""

from triptych.attention.cache import AttentionCache, DecoderCache, LayerCache
from triptych.attention.checks import check_qk_norm, check_sizes
from triptych.attention.four_way import four_way_attention
from triptych.attention.layer import LayerOutput, MultiHeadAttention
from triptych.attention.masks import causal_mask, padding_mask
from triptych.attention.operation import Attended, Explanation, attention, explain_attention
from triptych.attention.positions import (
    AlibiPositions,
    AttentionPositions,
    LearnedPositions,
    NoPositions,
    Places,
    PositionIds,
    RotaryPositions,
    SinusoidalPositions,
    sinusoidal,
)
from triptych.attention.projections import (
    PARAMETERISATIONS,
    AsWritten,
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
from triptych.attention.queries_keys import QueriesAndKeys, WeightBlock

__all__ = [
    "PARAMETERISATIONS",
    "AlibiPositions",
    "AsWritten",
    "Attended",
    "AttentionCache",
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
    "Places",
    "PositionIds",
    "Projections",
    "QueriesAndKeys",
    "RotaryPositions",
    "Shared",
    "SinusoidalPositions",
    "Stacked",
    "Symmetric",
    "WeightBlock",
    "attention",
    "causal_mask",
    "check_qk_norm",
    "check_sizes",
    "explain_attention",
    "four_way_attention",
    "padding_mask",
    "parameterisation",
    "parameterisation_of",
    "sinusoidal",
]
