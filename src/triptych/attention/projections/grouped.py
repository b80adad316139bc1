"""Fewer key-value heads than query heads."""

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
from triptych.attention.projections.maps import FromHeads, ToHeads


@final
@dataclass(frozen=True)
class Grouped(Parameterisation):
    """Several query heads read one key-value head: `W_QK = W_i^Q W_g(i)^Kᵀ`, `W_OV = W_g(i)^V W_i^O`.

    One group is multi-query attention, as many as heads is `Factored`.

    Attributes:
        num_kv_heads: number of groups g; consecutive query heads share one.
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `v_bias`, `o_bias`.

    Source: Shazeer 2019, arXiv 1911.02150; Ainslie et al. 2023, arXiv 2305.13245.
    """

    name: ClassVar[str] = "grouped"
    parameters_formula: ClassVar[str] = "h*d*d_k + num_kv_heads*d*(d_k + d_v) + h*d*d_v"
    cache_formula: ClassVar[str] = "num_kv_heads*(d_k + d_v)"
    read_off: ClassVar[Mapping[str, str]] = {"num_kv_heads": "k_proj"}

    num_kv_heads: int = 1
    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        groups = at_least_one(self.num_kv_heads, "num_kv_heads")
        if num_heads % groups:
            raise ValueError(f"num_kv_heads {groups} does not divide num_heads {num_heads}")
        # Keys and values vary as those of `Factored`.
        k_variance = projection_variance(d_model, num_heads, d_k) / d_model
        v_variance = projection_variance(d_model, num_heads, d_v) / d_model
        return ParameterisationSizes(
            d_k,
            {
                "q_proj": ToHeads(d_model, d_k, num_heads, self.q_bias),
                "k_proj": ToHeads(d_model, d_k, groups, self.k_bias, k_variance),
                "v_proj": ToHeads(d_model, d_v, groups, self.v_bias, v_variance),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )
