"""How a layer writes its two forms, W_QK and W_OV.

A `Parameterisation` is the choice (a small frozen record, fit for a recipe); `Projections` is the
module it builds, which holds the matrices. The layer asks its projections for queries, for what to
remember of each token, for keys and values made of it, and for the output: it never knows which
parameterisation it holds.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor, nn


class Projections(nn.Module, ABC):
    """The matrices of one attention layer.

    Attributes:
        num_heads: number of query heads.
        d_k: width of a query and a key; the scores are divided by its root.
    """

    num_heads: int
    d_k: int

    @abstractmethod
    def queries(
        self, x: Float[Tensor, "batch query_len d_model"]
    ) -> Float[Tensor, "batch num_heads query_len width"]:
        """The queries of every head."""

    @abstractmethod
    def remember(
        self,
        key_input: Float[Tensor, "batch key_len d_model"],
        value_input: Float[Tensor, "batch key_len d_model"],
    ) -> tuple[Tensor, ...]:
        """What is kept of each token attended to: tensors `[batch, heads, key_len, width]`.

        This is what a cache stores while decoding, so it should be as small as the
        parameterisation allows.
        """

    @abstractmethod
    def keys_values(self, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values, `[batch, num_kv_heads, key_len, width]` each, from what was kept."""

    @abstractmethod
    def output(
        self, heads: Float[Tensor, "batch num_heads query_len width"]
    ) -> Float[Tensor, "batch query_len d_model"]:
        """The heads' outputs brought together in the model's width."""


class Parameterisation(ABC):
    """A way to write the two forms, without sizes of a particular model."""

    @abstractmethod
    def build(self, d_model: int, num_heads: int) -> Projections:
        """Make the matrices for a layer of this size, freshly initialised.

        Raises:
            ValueError: sizes that do not fit, with the numbers.
        """


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
        self.num_heads = num_heads
        self.d_k = d_k
        self.q_proj = q_proj
        self.k_proj = k_proj
        self.v_proj = v_proj
        self.o_proj = o_proj
        for linear in (q_proj, k_proj, v_proj, o_proj):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i^Q` for every head."""
        return split_heads(self.q_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of every head: h (d_k + d_v) numbers a token."""
        return (
            split_heads(self.k_proj(key_input), self.num_heads),
            split_heads(self.v_proj(value_input), self.num_heads),
        )

    def keys_values(self, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """They are what was kept."""
        k, v = remembered
        return k, v

    def output(self, heads: Tensor) -> Tensor:
        """`Σ_i head_i W_i^O`, as one product over the concatenated heads."""
        return self.o_proj(join_heads(heads))  # type: ignore[no-any-return]


def head_width(width: int | None, name: str, d_model: int, num_heads: int) -> int:
    """A width given, or d_model shared out among the heads.

    Raises:
        ValueError: num_heads does not divide d_model and no width is given, or one is not positive.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}: at least one head is needed")
    if width is not None:
        if width < 1:
            raise ValueError(f"{name} is {width}: it must be at least 1")
        return width
    if d_model % num_heads:
        raise ValueError(f"num_heads {num_heads} does not divide d_model {d_model}: give {name} explicitly")
    return d_model // num_heads


def split_heads(
    x: Float[Tensor, "batch length joined"], num_heads: int
) -> Float[Tensor, "batch num_heads length width"]:
    """Head i takes the i-th slice of the last dimension."""
    batch, length, _ = x.shape
    return x.view(batch, length, num_heads, -1).transpose(1, 2)


def join_heads(
    heads: Float[Tensor, "batch num_heads length width"],
) -> Float[Tensor, "batch length joined"]:
    """The inverse of `split_heads`."""
    batch, _, length, _ = heads.shape
    return heads.transpose(1, 2).reshape(batch, length, -1)
