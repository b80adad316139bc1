"""Two linear maps one after the other, as some courses draw attention."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from triptych.algebra.weights import AttentionWeights, Chain, standard_scale
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

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    first_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "StackedProjections":
        """Make the seven maps. The first keep the variance of their input."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)

        def first() -> nn.Linear:
            return initialise(nn.Linear(d_model, d_model, bias=self.first_bias), 1 / d_model)

        return StackedProjections(
            num_heads=num_heads,
            d_k=d_k,
            firsts=(first(), first(), first()),
            q_proj=initialise_input(nn.Linear(d_model, num_heads * d_k, bias=self.q_bias)),
            k_proj=initialise_input(nn.Linear(d_model, num_heads * d_k, bias=self.k_bias)),
            v_proj=initialise_input(nn.Linear(d_model, num_heads * d_v, bias=self.v_bias)),
            o_proj=initialise(nn.Linear(num_heads * d_v, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Stacked | None":
        """Two maps each for queries, keys and values."""
        if not len(weights.q) == len(weights.k) == len(weights.v) == 2:
            return None
        return cls(
            d_k=weights.q[1].d_out,
            d_v=weights.v[1].d_out,
            q_bias=weights.q[1].bias is not None,
            k_bias=weights.k[1].bias is not None,
            v_bias=weights.v[1].bias is not None,
            o_bias=weights.o_bias is not None,
            first_bias=any(chain[0].bias is not None for chain in (weights.q, weights.k, weights.v)),
        )


@final
class StackedProjections(Projections):
    """The matrices of `Stacked`, stored apart."""

    def __init__(
        self,
        *,
        num_heads: int,
        d_k: int,
        firsts: tuple[nn.Linear, nn.Linear, nn.Linear],
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        o_proj: nn.Linear,
    ) -> None:
        super().__init__()
        self.d_model = q_proj.in_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.q_first, self.k_first, self.v_first = firsts
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`x W^Q W_i^Q` for every head."""
        return split_heads(self.q_proj(self.q_first(x)), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of every head: h (d_k + d_v) numbers a token."""
        return (
            split_heads(self.k_proj(self.k_first(key_input)), self.num_heads),
            split_heads(self.v_proj(self.v_first(value_input)), self.num_heads),
        )

    def weights(self) -> AttentionWeights:
        """Two links for queries, keys and values."""

        def chain(first: nn.Linear, second: nn.Linear) -> Chain:
            return link_from_input(first, 1), link_from_input(second, self.num_heads)

        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=chain(self.q_first, self.q_proj),
            k=chain(self.k_first, self.k_proj),
            v=chain(self.v_first, self.v_proj),
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
