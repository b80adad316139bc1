"""No projections: each head reads its slice of the input."""

from dataclasses import dataclass
from typing import ClassVar, final

from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    slice_width,
)
from triptych.attention.projections.maps import FromHeads, Slices


@final
@dataclass(frozen=True)
class Direct(Parameterisation):
    """`head_i = Attention(Q_i, K_i, V_i)`, the i-th slices of the input itself: `W_QK = I_i I_iᵀ`.

    Where a learned embedding is all that stands before the layer, maps that read it could be
    absorbed into it; deeper down the slices of one stream have to serve as queries, keys and values
    at once. d_k = d_v = d_model / num_heads.

    Attributes:
        o_bias: whether the output map has a bias; there are no others.
    """

    name: ClassVar[str] = "direct"
    parameters_formula: ClassVar[str] = "h*d*d_v"
    cache_formula: ClassVar[str] = "d"
    q: ClassVar[tuple[str, ...]] = ("slices",)
    k: ClassVar[tuple[str, ...]] = ("slices",)
    v: ClassVar[tuple[str, ...]] = ("slices",)

    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        width = slice_width(self.name, d_model, num_heads)
        return ParameterisationSizes(
            width,
            {
                "slices": Slices(num_heads, width),
                # Values come as they are: the output map begins as small as the others' values are.
                "o_proj": FromHeads(width, d_model, num_heads, self.o_bias, 1 / (2 * d_model)),
            },
        )
