"""Two linear maps one after the other, as some courses draw attention."""

from collections.abc import Mapping
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
class Stacked(Parameterisation):
    """A map of all heads, then one of each: `W_QK = (W^Q W_i^Q)(W^K W_i^K)ᵀ`, `W_OV = W^V W_i^V W_i^O`.

    Nothing stands between the two, so the forms are those of `Factored`: only the writing, and with
    it the training, differs.

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether the second query map has a bias; likewise `k_bias`, `v_bias`, `o_bias`.
        first_bias: whether the first maps (`W^Q`, `W^K`, `W^V`) have one.
    """

    name: ClassVar[str] = "stacked"
    parameters_formula: ClassVar[str] = "3*d**2 + 2*h*d*d_k + 2*h*d*d_v"
    cache_formula: ClassVar[str] = "h*(d_k + d_v)"
    q: ClassVar[tuple[str, ...]] = ("q_first", "q_proj")
    k: ClassVar[tuple[str, ...]] = ("k_first", "k_proj")
    v: ClassVar[tuple[str, ...]] = ("v_first", "v_proj")
    read_off: ClassVar[Mapping[str, str]] = {"first_bias": "q_first k_first v_first"}

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    first_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        first = ToHeads(d_model, d_model, 1, self.first_bias, 1 / d_model)  # keeps the variance of its input
        return ParameterisationSizes(
            d_k,
            {
                "q_first": first,
                "k_first": first,
                "v_first": first,
                "q_proj": ToHeads(d_model, d_k, num_heads, self.q_bias),
                "k_proj": ToHeads(d_model, d_k, num_heads, self.k_bias),
                "v_proj": ToHeads(d_model, d_v, num_heads, self.v_bias),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )
