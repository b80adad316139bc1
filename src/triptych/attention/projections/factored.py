"""The paper's own projections."""

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
    split_heads,
)


@final
@dataclass(frozen=True)
class Factored(Parameterisation):
    """The paper's own: `W_QK = W_i^Q W_i^Kᵀ`, `W_OV = W_i^V W_i^O`.

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `v_bias`, `o_bias`. The paper
            has none.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2.
    """

    name: ClassVar[str] = "factored"
    parameters_formula: ClassVar[str] = "2*h*d*d_k + 2*h*d*d_v"
    cache_formula: ClassVar[str] = "h*(d_k + d_v)"

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "FactoredProjections":
        """Make the four maps."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        return FactoredProjections(
            num_heads=num_heads,
            d_k=d_k,
            q_proj=nn.Linear(d_model, num_heads * d_k, bias=self.q_bias),
            k_proj=nn.Linear(d_model, num_heads * d_k, bias=self.k_bias),
            v_proj=nn.Linear(d_model, num_heads * d_v, bias=self.v_bias),
            o_proj=nn.Linear(num_heads * d_v, d_model, bias=self.o_bias),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Factored | None":
        """One map each for queries, keys and values of every head."""
        if not len(weights.q) == len(weights.k) == len(weights.v) == 1:
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
class FactoredProjections(Projections):
    """The matrices of `Factored`, stored apart."""

    def __init__(
        self,
        *,
        num_heads: int,
        d_k: int,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        o_proj: nn.Linear,
    ) -> None:
        super().__init__()
        self.d_model = q_proj.in_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.o_proj = o_proj
        for linear in (q_proj, k_proj, v_proj):
            initialise_input(linear)
        initialise(o_proj)

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i^Q` for every head."""
        return split_heads(self.q_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of every head: h (d_k + d_v) numbers a token."""
        return (
            split_heads(self.k_proj(key_input), self.num_heads),
            split_heads(self.v_proj(value_input), self.num_heads),
        )

    def weights(self) -> AttentionWeights:
        """One link a side."""
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=(link_from_input(self.q_proj, self.num_heads),),
            k=(link_from_input(self.k_proj, self.num_heads),),
            v=(link_from_input(self.v_proj, self.num_heads),),
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
