"""The paper's own projections."""

from dataclasses import dataclass
from typing import ClassVar, final

from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    head_width,
)
from triptych.attention.projections.maps import FromHeads, ToHeads


@final
@dataclass(frozen=True)
class Factored(Parameterisation):
    """The paper's own: `W_QK = W_i^Q W_i^Kᵀ`, `W_OV = W_i^V W_i^O`.

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `v_bias`, `o_bias`. The paper
            has none.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2.
    """

    name: ClassVar[str] = "factored"
    parameters_formula: ClassVar[str] = "2*h*d*d_k + 2*h*d*d_v"
    cache_formula: ClassVar[str] = "h*(d_k + d_v)"

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        return ParameterisationSizes(
            d_k,
            {
                "q_proj": ToHeads(d_model, d_k, num_heads, self.q_bias),
                "k_proj": ToHeads(d_model, d_k, num_heads, self.k_bias),
                "v_proj": ToHeads(d_model, d_v, num_heads, self.v_bias),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )
