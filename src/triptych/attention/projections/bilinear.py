"""One matrix for queries and keys together."""

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


@final
@dataclass(frozen=True)
class Bilinear(Parameterisation):
    """One matrix a head in place of two: `W_QK = W_i` (d_model × d_model), `W_OV = W_i^V W_i^O`.

    The input itself is the one key head, `x W_i` are the queries. W_i may have full rank; its
    product form `W_i^Q W_i^Kᵀ` cannot, and is smaller exactly when d_k < d_model / 2.

    Attributes:
        d_k: the scores are divided by its root, nothing else; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether `x W_i` has a bias; likewise `v_bias`, `o_bias`. Keys have no map.
    """

    name: ClassVar[str] = "bilinear"
    parameters_formula: ClassVar[str] = "h*d**2 + 2*h*d*d_v"
    cache_formula: ClassVar[str] = "d + h*d_v"
    no_rotary: ClassVar[str] = (
        "one matrix W_i stands for W^Q and W^K together, so there are no queries and keys to turn: "
        "under rotary positions the form would have to change with the distance"
    )
    no_qk_norm: ClassVar[str] = (
        "one matrix W_i stands for W^Q and W^K together, so there are no queries and keys to normalise"
    )
    k: ClassVar[tuple[str, ...]] = ()
    read_off: ClassVar[Mapping[str, str]] = {"d_k": "scale"}

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        # The scores vary as those of `Factored`.
        variance = projection_variance(d_model, num_heads, d_k) ** 2 * d_k / d_model**2
        return ParameterisationSizes(
            d_k,
            {
                "q_proj": ToHeads(d_model, d_model, num_heads, self.q_bias, variance),
                "v_proj": ToHeads(d_model, d_v, num_heads, self.v_bias),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )
