"""One map for queries, keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    head_width,
)
from triptych.attention.projections.maps import FromHeads, ToHeads
from triptych.attention.projections.symmetric import tied_variance


@final
@dataclass(frozen=True)
class Shared(Parameterisation):
    """W^Q = W^K = W^V: `W_QK = W_i W_iᵀ`, `W_OV = W_i W_i^O`.

    Attributes:
        d_k: width of queries, keys and values alike; d_model / num_heads if None.
        qkv_bias: whether that one map has a bias; likewise `o_bias`.
    """

    name: ClassVar[str] = "shared"
    parameters_formula: ClassVar[str] = "2*h*d*d_k"
    cache_formula: ClassVar[str] = "h*d_k"
    q: ClassVar[tuple[str, ...]] = ("qkv_proj",)
    k: ClassVar[tuple[str, ...]] = ("qkv_proj",)
    v: ClassVar[tuple[str, ...]] = ("qkv_proj",)
    read_off: ClassVar[Mapping[str, str]] = {"d_k": "qkv_proj"}

    d_k: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        # W_O makes up for a W_i that is smaller than Glorot's.
        variance, glorot = tied_variance(d_model, num_heads, d_k), 2 / (d_model + num_heads * d_k)
        return ParameterisationSizes(
            d_k,
            {
                "qkv_proj": ToHeads(d_model, d_k, num_heads, self.qkv_bias, variance),
                "o_proj": FromHeads(d_k, d_model, num_heads, self.o_bias, glorot * glorot / 2 / variance),
            },
        )
