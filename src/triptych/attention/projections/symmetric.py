"""One map for queries and keys."""

import math
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

    d_k: int | None = None
    d_v: int | None = None
    qk_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "SymmetricProjections":
        """Make the three maps."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        qk_proj = nn.Linear(d_model, num_heads * d_k, bias=self.qk_bias)
        return SymmetricProjections(
            num_heads=num_heads,
            d_k=d_k,
            qk_proj=initialise(qk_proj, tied_variance(d_model, num_heads, d_k)),
            v_proj=initialise_input(nn.Linear(d_model, num_heads * d_v, bias=self.v_bias)),
            o_proj=initialise(nn.Linear(num_heads * d_v, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Symmetric | None":
        """Queries and keys by the very same map."""
        if not weights.tied("q", "k") or len(weights.q) != 1 or len(weights.v) != 1:
            return None
        return cls(
            d_k=weights.q[0].d_out,
            d_v=weights.v[0].d_out,
            qk_bias=weights.q[0].bias is not None,
            v_bias=weights.v[0].bias is not None,
            o_bias=weights.o_bias is not None,
        )


@final
class SymmetricProjections(Projections):
    """The matrices of `Symmetric`."""

    def __init__(
        self, *, num_heads: int, d_k: int, qk_proj: nn.Linear, v_proj: nn.Linear, o_proj: nn.Linear
    ) -> None:
        super().__init__()
        self.d_model = qk_proj.in_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.qk_proj = qk_proj
        self.v_proj = v_proj
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i`."""
        return split_heads(self.qk_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """Keys `y W_i` and values: h (d_k + d_v) numbers a token."""
        return self.queries(key_input), split_heads(self.v_proj(value_input), self.num_heads)

    def of_one_sequence(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The queries are the keys: one product less."""
        remembered = self.remember(x, x)
        return remembered[0], remembered

    def weights(self) -> AttentionWeights:
        """One chain for queries and keys."""
        qk = (link_from_input(self.qk_proj, self.num_heads),)
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=qk,
            k=qk,
            v=(link_from_input(self.v_proj, self.num_heads),),
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
