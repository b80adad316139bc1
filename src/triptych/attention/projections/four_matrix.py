"""A fourth matrix, between values and output."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.algebra.cost import Route
from triptych.algebra.weights import AttentionWeights, Link, standard_scale
from triptych.attention.projections.abstract import (
    Parameterisation,
    Projections,
    head_width,
    initialise,
    initialise_input,
    join_heads,
    link_from_input,
    link_to_output,
    split_heads,
    through_own_map,
)


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

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "FourMatrixProjections":
        """Make the five maps; M_i makes up for its 1/√d_k."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        fourth = torch.empty(num_heads, d_v, d_v)
        bound = math.sqrt(3 * d_k / d_v)
        return FourMatrixProjections(
            num_heads=num_heads,
            d_k=d_k,
            q_proj=initialise_input(nn.Linear(d_model, num_heads * d_k, bias=self.q_bias)),
            k_proj=initialise_input(nn.Linear(d_model, num_heads * d_k, bias=self.k_bias)),
            v_proj=initialise_input(nn.Linear(d_model, num_heads * d_v, bias=self.v_bias)),
            fourth=nn.init.uniform_(fourth, -bound, bound),
            o_proj=initialise(nn.Linear(num_heads * d_v, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "FourMatrix | None":
        """Three maps from values to output: M_i, its factor, W_i^O."""
        if not len(weights.q) == len(weights.k) == len(weights.v) == 1 or len(weights.o) != 3:
            return None
        return cls(
            d_k=weights.q[0].d_out,
            d_v=weights.v[0].d_out,
            q_bias=weights.q[0].bias is not None,
            k_bias=weights.k[0].bias is not None,
            v_bias=weights.v[0].bias is not None,
            o_bias=weights.o_bias is not None,
        )


@final
class FourMatrixProjections(Projections):
    """The matrices of `FourMatrix`; `m_weight` `[num_heads, d_v, d_v]` holds the M_i."""

    def __init__(
        self,
        *,
        num_heads: int,
        d_k: int,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        fourth: Float[Tensor, "num_heads d_v d_v"],
        o_proj: nn.Linear,
    ) -> None:
        super().__init__()
        self.d_model = q_proj.in_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.m_weight = nn.Parameter(fourth)
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i^Q`."""
        return split_heads(self.q_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of every head: h (d_k + d_v) numbers a token."""
        return (
            split_heads(self.k_proj(key_input), self.num_heads),
            split_heads(self.v_proj(value_input), self.num_heads),
        )

    def output(self, heads: Tensor, route: Route = "expanded") -> Tensor:
        """`Σ_i head_i M_iᵀ W_i^O / √d_k`."""
        moved = through_own_map(heads, self.m_weight.mT) * standard_scale(self.d_k)
        return self.o_proj(join_heads(moved))  # type: ignore[no-any-return]

    def weights(self) -> AttentionWeights:
        """Three links on the output side: M_iᵀ, the fixed 1/√d_k, W_i^O."""
        factor = self.m_weight.new_full((1, self.m_weight.shape[-1]), standard_scale(self.d_k))
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=(link_from_input(self.q_proj, self.num_heads),),
            k=(link_from_input(self.k_proj, self.num_heads),),
            v=(link_from_input(self.v_proj, self.num_heads),),
            o=(
                Link(self.m_weight.mT),
                Link(factor, learned=False),
                *link_to_output(self.o_proj, self.num_heads),
            ),
            o_bias=self.o_proj.bias,
        )
