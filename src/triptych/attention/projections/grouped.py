"""Fewer key-value heads than query heads."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from triptych.algebra.weights import AttentionWeights, standard_scale
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
class Grouped(Parameterisation):
    """Several query heads read one key-value head: `W_QK = W_i^Q W_g(i)^Kᵀ`, `W_OV = W_g(i)^V W_i^O`.

    One group is multi-query attention, as many as heads is `Factored`.

    Attributes:
        num_kv_heads: number of groups g; consecutive query heads share one.
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `v_bias`, `o_bias`.

    Source: Shazeer 2019, arXiv 1911.02150; Ainslie et al. 2023, arXiv 2305.13245.
    """

    name: ClassVar[str] = "grouped"
    parameters_formula: ClassVar[str] = "h*d*d_k + num_kv_heads*d*(d_k + d_v) + h*d*d_v"
    cache_formula: ClassVar[str] = "num_kv_heads*(d_k + d_v)"

    num_kv_heads: int = 1
    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "GroupedProjections":
        """Make the four maps; keys and values vary as those of `Factored` do."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        groups = at_least_one(self.num_kv_heads, "num_kv_heads")
        if num_heads % groups:
            raise ValueError(f"num_kv_heads {groups} does not divide num_heads {num_heads}")
        k_variance = projection_variance(d_model, num_heads, d_k) / d_model
        v_variance = projection_variance(d_model, num_heads, d_v) / d_model
        return GroupedProjections(
            num_heads=num_heads,
            num_kv_heads=groups,
            d_k=d_k,
            q_proj=initialise_input(nn.Linear(d_model, num_heads * d_k, bias=self.q_bias)),
            k_proj=initialise(nn.Linear(d_model, groups * d_k, bias=self.k_bias), k_variance),
            v_proj=initialise(nn.Linear(d_model, groups * d_v, bias=self.v_bias), v_variance),
            o_proj=initialise(nn.Linear(num_heads * d_v, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Grouped | None":
        """One map a side, the same number of copies for keys and values."""
        if not len(weights.q) == len(weights.k) == len(weights.v) == 1:
            return None
        return cls(
            num_kv_heads=weights.k[0].copies,
            d_k=weights.q[0].d_out,
            d_v=weights.v[0].d_out,
            q_bias=weights.q[0].bias is not None,
            k_bias=weights.k[0].bias is not None,
            v_bias=weights.v[0].bias is not None,
            o_bias=weights.o_bias is not None,
        )


@final
class GroupedProjections(Projections):
    """The matrices of `Grouped`."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        d_k: int,
        q_proj: nn.Linear,
        k_proj: nn.Linear,
        v_proj: nn.Linear,
        o_proj: nn.Linear,
    ) -> None:
        super().__init__()
        self.d_model = q_proj.in_features
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.d_k = d_k
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i^Q`."""
        return split_heads(self.q_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of every group: g (d_k + d_v) numbers a token."""
        return (
            split_heads(self.k_proj(key_input), self.num_kv_heads),
            split_heads(self.v_proj(value_input), self.num_kv_heads),
        )

    def weights(self) -> AttentionWeights:
        """One link a side; keys and values have a copy a group."""
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=(link_from_input(self.q_proj, self.num_heads),),
            k=(link_from_input(self.k_proj, self.num_kv_heads),),
            v=(link_from_input(self.v_proj, self.num_kv_heads),),
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
