"""One map for keys and values."""

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
class KeyValue(Parameterisation):
    """K = V: `W_QK = W_i^Q W_i^Kᵀ`, `W_OV = W_i^K W_i^O`, half the cache.

    Attributes:
        d_k: width of queries, keys and values alike; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `kv_bias` (keys and values), `o_bias`.
    """

    name: ClassVar[str] = "key_value"
    parameters_formula: ClassVar[str] = "3*h*d*d_k"
    cache_formula: ClassVar[str] = "h*d_k"

    d_k: int | None = None
    q_bias: bool = False
    kv_bias: bool = False
    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "KeyValueProjections":
        """Make the three maps."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        return KeyValueProjections(
            num_heads=num_heads,
            d_k=d_k,
            q_proj=initialise_input(nn.Linear(d_model, num_heads * d_k, bias=self.q_bias)),
            kv_proj=initialise_input(nn.Linear(d_model, num_heads * d_k, bias=self.kv_bias)),
            o_proj=initialise(nn.Linear(num_heads * d_k, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "KeyValue | None":
        """Keys and values by the very same map, queries by another."""
        if not weights.tied("k", "v") or not len(weights.q) == len(weights.k) == 1:
            return None
        return cls(
            d_k=weights.q[0].d_out,
            q_bias=weights.q[0].bias is not None,
            kv_bias=weights.k[0].bias is not None,
            o_bias=weights.o_bias is not None,
        )


@final
class KeyValueProjections(Projections):
    """The matrices of `KeyValue`."""

    caches_keys: ClassVar[bool] = False
    no_two_memories: ClassVar[str] = "key_value makes keys and values by one map, of one sequence"

    def __init__(
        self, *, num_heads: int, d_k: int, q_proj: nn.Linear, kv_proj: nn.Linear, o_proj: nn.Linear
    ) -> None:
        super().__init__()
        self.d_model = q_proj.in_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.q_proj = q_proj
        self.kv_proj = kv_proj
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i^Q`."""
        return split_heads(self.q_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """`y W_i^K`, once: h d_k numbers a token."""
        return (split_heads(self.kv_proj(key_input), self.num_heads),)

    def keys_values(self, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """One tensor, read as both."""
        (projected,) = remembered
        return projected, projected

    def weights(self) -> AttentionWeights:
        """One chain for keys and values."""
        kv = (link_from_input(self.kv_proj, self.num_heads),)
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=(link_from_input(self.q_proj, self.num_heads),),
            k=kv,
            v=kv,
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
