"""One matrix for queries and keys together."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from triptych.algebra.weights import AttentionWeights, standard_scale
from triptych.attention.projections.abstract import (
    Parameterisation,
    Projections,
    head_width,
    initialise,
    initialise_input,
    link_from_input,
    link_to_output,
    projection_variance,
    split_heads,
)


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

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "BilinearProjections":
        """Make the maps. W_i varies so that the scores vary as those of `Factored`."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        form_variance = projection_variance(d_model, num_heads, d_k) ** 2 * d_k / d_model**2
        return BilinearProjections(
            num_heads=num_heads,
            d_k=d_k,
            q_proj=initialise(nn.Linear(d_model, num_heads * d_model, bias=self.q_bias), form_variance),
            v_proj=initialise_input(nn.Linear(d_model, num_heads * d_v, bias=self.v_bias)),
            o_proj=initialise(nn.Linear(num_heads * d_v, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Bilinear | None":
        """No map for the keys, one for queries and values."""
        if weights.k or len(weights.q) != 1 or len(weights.v) != 1:
            return None
        return cls(
            d_k=max(1, round(weights.scale**-2)),
            d_v=weights.v[0].d_out,
            q_bias=weights.q[0].bias is not None,
            v_bias=weights.v[0].bias is not None,
            o_bias=weights.o_bias is not None,
        )


@final
class BilinearProjections(Projections):
    """The matrices of `Bilinear`. `q_proj` holds the W_i: what it makes is compared with the input."""

    def __init__(
        self, *, num_heads: int, d_k: int, q_proj: nn.Linear, v_proj: nn.Linear, o_proj: nn.Linear
    ) -> None:
        super().__init__()
        self.d_model = q_proj.in_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.q_proj = q_proj
        self.v_proj = v_proj
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i`, as wide as the input."""
        return split_heads(self.q_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """The input, once for all heads, and the values: d + h d_v numbers a token."""
        return key_input[:, None], split_heads(self.v_proj(value_input), self.num_heads)

    def weights(self) -> AttentionWeights:
        """Keys are an empty chain."""
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=(link_from_input(self.q_proj, self.num_heads),),
            k=(),
            v=(link_from_input(self.v_proj, self.num_heads),),
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
