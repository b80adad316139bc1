"""Heads that mix one set of query and key channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    at_least_one,
    head_width,
    projection_variance,
)
from triptych.attention.projections.maps import FromHeads, Mixing, ToHeads


@final
@dataclass(frozen=True)
class Collaborative(Parameterisation):
    """One pair of maps for all heads, weighted by each: `W_QK = W^Q diag(m_i) W^Kᵀ`, `W_OV = W_i^V W_i^O`.

    Attributes:
        d_shared: number r of query and key channels that all heads share; d_model if None.
        d_k: the scores are divided by its root, nothing else; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether the shared query map has a bias; likewise `k_bias`, `v_bias`, `o_bias`.

    Source: Cordonnier et al. 2020, arXiv 2006.16362.
    """

    name: ClassVar[str] = "collaborative"
    parameters_formula: ClassVar[str] = "2*d*d_shared + h*d_shared + 2*h*d*d_v"
    cache_formula: ClassVar[str] = "d_shared + h*d_v"
    no_qk_norm: ClassVar[str] = (
        "heads differ by how much they make of each shared channel, and a norm would take that off again"
    )
    q: ClassVar[tuple[str, ...]] = ("q_proj", "mixing")
    read_off: ClassVar[Mapping[str, str]] = {"d_shared": "k_proj", "d_k": "scale"}

    d_shared: int | None = None
    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        r = d_model if self.d_shared is None else at_least_one(self.d_shared, "d_shared")
        variance = projection_variance(d_model, num_heads, d_k) / d_model
        return ParameterisationSizes(
            d_k,
            {
                "q_proj": ToHeads(d_model, r, 1, self.q_bias, variance),
                "k_proj": ToHeads(d_model, r, 1, self.k_bias, variance),
                "mixing": Mixing(num_heads, r, d_k / r),
                "v_proj": ToHeads(d_model, d_v, num_heads, self.v_bias),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )
