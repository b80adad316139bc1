"""One map for queries and keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    head_width,
    projection_variance,
)
from triptych.attention.projections.maps import FromHeads, ToHeads


def tied_variance(d_model: int, num_heads: int, d_k: int) -> float:
    """Variance of W for `x W Wᵀ yᵀ` to vary as the scores of `Factored` do.

    W and Wᵀ are not independent, which adds d_k / d_model to the variance; a smaller W takes it off.
    """
    channel = projection_variance(d_model, num_heads, d_k)
    return channel / d_model / math.sqrt(1 + d_k / d_model)


@final
@dataclass(frozen=True)
class Symmetric(Parameterisation):
    """Q and K by one map: `W_QK = W_i W_iᵀ`, `W_OV = W_i^V W_i^O`.

    The form is symmetric and positive semi-definite: a token looks at another as much as it is
    looked at (before the softmax), and at itself with a score that is never negative. With rotary
    positions the two are turned, and only the form at distance 0 is symmetric.

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        qk_bias: whether the map of queries and keys has a bias; likewise `v_bias`, `o_bias`.
    """

    name: ClassVar[str] = "symmetric"
    parameters_formula: ClassVar[str] = "h*d*d_k + 2*h*d*d_v"
    cache_formula: ClassVar[str] = "h*(d_k + d_v)"
    q: ClassVar[tuple[str, ...]] = ("qk_proj",)
    k: ClassVar[tuple[str, ...]] = ("qk_proj",)
    read_off: ClassVar[Mapping[str, str]] = {"d_k": "qk_proj"}

    d_k: int | None = None
    d_v: int | None = None
    qk_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        variance = tied_variance(d_model, num_heads, d_k)
        return ParameterisationSizes(
            d_k,
            {
                "qk_proj": ToHeads(d_model, d_k, num_heads, self.qk_bias, variance),
                "v_proj": ToHeads(d_model, d_v, num_heads, self.v_bias),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )
