"""One map for queries, keys and values."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from triptych.algebra.weights import AttentionWeights, standard_scale
from triptych.attention.projections.abstract import (
    Parameterisation,
    Projections,
    head_width,
    initialise,
    link_from_input,
    link_to_output,
    split_heads,
)
from triptych.attention.projections.symmetric import tied_variance


@final
@dataclass(frozen=True)
class Shared(Parameterisation):
    """W^Q = W^K = W^V: `W_QK = W_i W_iᵀ`, `W_OV = W_i W_i^O`.

    Attributes:
        d_k: width of queries, keys and values alike; d_model / num_heads if None.
        qkv_bias: whether that one map has a bias; likewise `o_bias`.
    """

    name: ClassVar[str] = "shared"
    parameters_formula: ClassVar[str] = "2*h*d*d_k"
    cache_formula: ClassVar[str] = "h*d_k"

    d_k: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "SharedProjections":
        """Make the two maps; W_O makes up for a W_i that is smaller than Glorot's."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        variance, glorot = tied_variance(d_model, num_heads, d_k), 2 / (d_model + num_heads * d_k)
        return SharedProjections(
            num_heads=num_heads,
            d_k=d_k,
            qkv_proj=initialise(nn.Linear(d_model, num_heads * d_k, bias=self.qkv_bias), variance),
            o_proj=initialise(
                nn.Linear(num_heads * d_k, d_model, bias=self.o_bias), glorot * glorot / 2 / variance
            ),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Shared | None":
        """Queries, keys and values by the very same map."""
        if not (weights.tied("q", "k") and weights.tied("k", "v")):
            return None
        return cls(
            d_k=weights.q[0].d_out,
            qkv_bias=weights.q[0].bias is not None,
            o_bias=weights.o_bias is not None,
        )


@final
class SharedProjections(Projections):
    """The matrices of `Shared`."""

    caches_keys: ClassVar[bool] = False
    no_two_memories: ClassVar[str] = "shared makes keys and values by one map, of one sequence"

    def __init__(self, *, num_heads: int, d_k: int, qkv_proj: nn.Linear, o_proj: nn.Linear) -> None:
        super().__init__()
        self.d_model = qkv_proj.in_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i`."""
        return split_heads(self.qkv_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """`y W_i`, once: h d_k numbers a token."""
        return (self.queries(key_input),)

    def of_one_sequence(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One product gives all three."""
        projected = self.queries(x)
        return projected, (projected,)

    def keys_values(self, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """One tensor, read as both."""
        (projected,) = remembered
        return projected, projected

    def weights(self) -> AttentionWeights:
        """One chain for all three."""
        qkv = (link_from_input(self.qkv_proj, self.num_heads),)
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=qkv,
            k=qkv,
            v=qkv,
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
