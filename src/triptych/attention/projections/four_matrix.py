"""A fourth matrix, between values and output."""

from dataclasses import dataclass
from typing import ClassVar, final

from triptych.algebra.weights import standard_scale
from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    head_width,
)
from triptych.attention.projections.maps import ConstantFactor, FromHeads, PerHead, ToHeads


@final
@dataclass(frozen=True)
class FourMatrix(Parameterisation):
    """The "more symmetric" head: `W_QK = W_i^Q W_i^Kᵀ`, `W_OV = (1/√d_k) W_i^V M_iᵀ W_i^O`.

    The 4th matrix as weights, M_i (d_v × d_v): `softmax(QKᵀ/√d_k) V M_iᵀ / √d_k`. It stands beside
    W_i^O with nothing between them, so it folds into it. The 4th matrix as data (n × d_v, one row a
    token) is `four_way_attention`, which cannot be a layer.

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `v_bias`, `o_bias`.
    """

    name: ClassVar[str] = "four_matrix"
    parameters_formula: ClassVar[str] = "2*h*d*d_k + 2*h*d*d_v + h*d_v**2"
    cache_formula: ClassVar[str] = "h*(d_k + d_v)"
    o: ClassVar[tuple[str, ...]] = ("m_weight", "m_factor", "o_proj")

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
                "m_weight": PerHead(num_heads, d_v, d_k / d_v),  # makes up for the factor
                "m_factor": ConstantFactor(standard_scale(d_k), d_v),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )
