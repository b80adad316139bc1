"""Heads that mix one set of query and key channels."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.algebra.weights import AttentionWeights, Link, standard_scale
from triptych.attention.projections.abstract import (
    Parameterisation,
    Projections,
    at_least_one,
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

    d_shared: int | None = None
    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "CollaborativeProjections":
        """Make the maps; the m_i differ from the start, so that the heads do."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        r = d_model if self.d_shared is None else at_least_one(self.d_shared, "d_shared")
        variance = projection_variance(d_model, num_heads, d_k) / d_model
        mixing = torch.empty(num_heads, r)
        return CollaborativeProjections(
            d_k=d_k,
            q_proj=initialise(nn.Linear(d_model, r, bias=self.q_bias), variance),
            k_proj=initialise(nn.Linear(d_model, r, bias=self.k_bias), variance),
            mixing=nn.init.normal_(mixing, std=(d_k / r) ** 0.5),
            v_proj=initialise_input(nn.Linear(d_model, num_heads * d_v, bias=self.v_bias)),
            o_proj=initialise(nn.Linear(num_heads * d_v, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Collaborative | None":
        """A shared map and a diagonal one for the queries."""
        if len(weights.q) != 2 or not len(weights.k) == len(weights.v) == 1:
            return None
        return cls(
            d_shared=weights.k[0].d_out,
            d_k=max(1, round(weights.scale**-2)),
            d_v=weights.v[0].d_out,
            q_bias=weights.q[0].bias is not None,
            k_bias=weights.k[0].bias is not None,
            v_bias=weights.v[0].bias is not None,
            o_bias=weights.o_bias is not None,
        )


@final
class CollaborativeProjections(Projections):
    """The matrices of `Collaborative`; `mixing` `[num_heads, d_shared]` holds the m_i."""

    def __init__(
        self,
        *,
        d_k: int,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        mixing: Float[Tensor, "num_heads d_shared"],
        v_proj: nn.Linear,
        o_proj: nn.Linear,
    ) -> None:
        super().__init__()
        self.d_model = q_proj.in_features
        self.num_heads = mixing.shape[0]
        self.d_k = d_k
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.mixing = nn.Parameter(mixing)
        self.v_proj = v_proj
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`(x W^Q) diag(m_i)`."""
        return self.q_proj(x)[:, None] * self.mixing[:, None, :]  # type: ignore[no-any-return]

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """The shared keys, once for all heads, and the values: r + h d_v numbers a token."""
        return self.k_proj(key_input)[:, None], split_heads(self.v_proj(value_input), self.num_heads)

    def weights(self) -> AttentionWeights:
        """Queries are two links, the second diagonal."""
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=(link_from_input(self.q_proj, 1), Link(self.mixing)),
            k=(link_from_input(self.k_proj, 1),),
            v=(link_from_input(self.v_proj, self.num_heads),),
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
