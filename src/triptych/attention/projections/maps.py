"""The maps that chains are made of: how each is stored, initialised and applied.

A map is a description without numbers; `make` gives what a layer stores of it, under the map's name. Streams
are `[batch, copies, length, width]`, with one copy for the input of a layer.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.algebra.weights import Link

Held = nn.Module | nn.Parameter | None


class HeadMap(ABC):
    """One map of a chain."""

    @abstractmethod
    def make(self) -> Held:
        """What a layer stores; None if the map has no numbers of its own."""

    @abstractmethod
    def initialise(self, held: Held) -> None:
        """Draw the numbers."""

    @abstractmethod
    def apply(self, held: Held, x: Float[Tensor, "batch copies length d_in"]) -> Tensor:
        """The stream after the map, `[batch, copies, length, d_out]`."""

    @abstractmethod
    def link(self, held: Held, like: Tensor) -> Link:
        """The map as a link of a chain, a view of what is stored; a fixed map has the dtype of `like`."""


class _Linear(HeadMap):
    """A map that is stored as `torch.nn.Linear`."""

    bias: bool

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Numbers read and written, all copies together."""

    def make(self) -> nn.Linear:
        return nn.Linear(*self.widths, bias=self.bias)


@final
@dataclass(frozen=True)
class ToHeads(_Linear):
    """A map from one stream to a stream a copy.

    Attributes:
        d_in: width of the stream.
        d_out: width of each copy.
        copies: how many there are.
        bias: whether the map has one.
        variance: of the numbers drawn. Half of Glorot's if None, as one map to queries, keys and values
            would be drawn: post-norm models learn faster so, in 200 steps of a small one to 4.30 instead of
            4.59 nats (docs/log.md).
    """

    d_in: int
    d_out: int
    copies: int
    bias: bool
    variance: float | None = None

    @property
    def widths(self) -> tuple[int, int]:
        return self.d_in, self.copies * self.d_out

    def initialise(self, held: Held) -> None:
        _draw(_linear(held), self.variance or 1 / sum(self.widths))

    def apply(self, held: Held, x: Tensor) -> Tensor:
        return split_heads(_linear(held)(x[:, 0]), self.copies)

    def link(self, held: Held, like: Tensor) -> Link:
        linear = _linear(held)
        weight = linear.weight.view(self.copies, self.d_out, self.d_in).mT
        return Link(weight, None if linear.bias is None else linear.bias.view(self.copies, -1))


@final
@dataclass(frozen=True)
class FromHeads(_Linear):
    """The output map, from the heads next to each other to the width of the model.

    Attributes:
        d_in: width of each head.
        d_out: width of the model.
        num_heads: how many there are.
        bias: whether the map has one. It belongs to all heads together and is not part of the link.
        variance: of the numbers drawn; Glorot's if None.
    """

    d_in: int
    d_out: int
    num_heads: int
    bias: bool
    variance: float | None = None

    @property
    def widths(self) -> tuple[int, int]:
        return self.num_heads * self.d_in, self.d_out

    def initialise(self, held: Held) -> None:
        _draw(_linear(held), self.variance)

    def apply(self, held: Held, x: Tensor) -> Tensor:
        return _linear(held)(join_heads(x))[:, None]  # type: ignore[no-any-return]

    def link(self, held: Held, like: Tensor) -> Link:
        return Link(_linear(held).weight.view(self.d_out, self.num_heads, self.d_in).permute(1, 2, 0))


@final
@dataclass(frozen=True)
class PerHead(HeadMap):
    """A square map of each head, M_iᵀ, stored as M_i `[num_heads, width, width]`.

    Attributes:
        num_heads: how many there are.
        width: read and written.
        variance: of the numbers drawn.
    """

    num_heads: int
    width: int
    variance: float

    def make(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.num_heads, self.width, self.width))

    def initialise(self, held: Held) -> None:
        draw_evenly(_parameter(held), self.variance)

    def apply(self, held: Held, x: Tensor) -> Tensor:
        return through_own_map(x, _parameter(held).mT)

    def link(self, held: Held, like: Tensor) -> Link:
        return Link(_parameter(held).mT)


@final
@dataclass(frozen=True)
class Mixing(HeadMap):
    """Weights of each head for the channels of one stream, diag(m_i), stored as `[num_heads, width]`.

    Attributes:
        num_heads: how many there are.
        width: of the stream.
        variance: of the numbers drawn. They differ from the start, so that the heads do.
    """

    num_heads: int
    width: int
    variance: float

    def make(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.num_heads, self.width))

    def initialise(self, held: Held) -> None:
        nn.init.normal_(_parameter(held), std=self.variance**0.5)

    def apply(self, held: Held, x: Tensor) -> Tensor:
        return x * _parameter(held)[:, None, :]

    def link(self, held: Held, like: Tensor) -> Link:
        return Link(_parameter(held))


class _Fixed(HeadMap):
    """A map without numbers of its own."""

    def make(self) -> None:
        return None

    def initialise(self, held: Held) -> None:
        return None


@final
@dataclass(frozen=True)
class ConstantFactor(_Fixed):
    """One factor for all channels of all heads.

    Attributes:
        factor: the factor.
        width: of each head.
    """

    factor: float
    width: int

    def apply(self, held: Held, x: Tensor) -> Tensor:
        return x * self.factor

    def link(self, held: Held, like: Tensor) -> Link:
        return Link(like.new_full((1, self.width), self.factor), learned=False)


@final
@dataclass(frozen=True)
class Slices(_Fixed):
    """Head i takes the i-th slice of the stream.

    Attributes:
        num_heads: how many there are.
        width: of each slice.
    """

    num_heads: int
    width: int

    def apply(self, held: Held, x: Tensor) -> Tensor:
        return split_heads(x[:, 0], self.num_heads)

    def link(self, held: Held, like: Tensor) -> Link:
        joined = self.num_heads * self.width
        eye = torch.eye(joined, dtype=like.dtype, device=like.device)
        return Link(eye.view(self.num_heads, self.width, joined).mT, learned=False)


@final
class Beside(nn.Module):
    """The heads next to each other, as an output map would read them, and a bias where there is one.

    Attributes:
        bias: `[width]`, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.register_parameter("bias", nn.Parameter(torch.empty(width)) if bias else None)

    def forward(self, joined: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        return joined if self.bias is None else joined + self.bias


@final
@dataclass(frozen=True)
class Joined(HeadMap):
    """W^O = I: head i writes the i-th slice of the output.

    Attributes:
        num_heads: how many there are.
        width: of each slice.
        bias: whether the output has one. It belongs to all heads together and is not part of the link.
    """

    num_heads: int
    width: int
    bias: bool

    def make(self) -> Beside:
        return Beside(self.num_heads * self.width, self.bias)

    def initialise(self, held: Held) -> None:
        assert isinstance(held, Beside)
        if held.bias is not None:
            nn.init.zeros_(held.bias)

    def apply(self, held: Held, x: Tensor) -> Tensor:
        assert isinstance(held, Beside)
        joined: Tensor = held(join_heads(x))
        return joined[:, None]

    def link(self, held: Held, like: Tensor) -> Link:
        joined = self.num_heads * self.width
        eye = torch.eye(joined, dtype=like.dtype, device=like.device)
        return Link(eye.view(self.num_heads, self.width, joined), learned=False)


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


def through_own_map(
    heads: Float[Tensor, "batch num_heads length d_in"], maps: Float[Tensor, "num_heads d_in d_out"]
) -> Float[Tensor, "batch num_heads length d_out"]:
    """`head_i W_i`; not `heads @ maps`, for which torch copies the maps once a sentence of the batch."""
    return torch.einsum("bhnk,hkr->bhnr", heads, maps)


def _draw(linear: nn.Linear, variance: float | None) -> None:
    """Weights of this variance (Glorot's if None), and a bias of 0."""
    if variance is None:
        nn.init.xavier_uniform_(linear.weight)
    else:
        draw_evenly(linear.weight, variance)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def draw_evenly(numbers: Tensor, variance: float) -> None:
    """From ± √(3 · variance)."""
    bound = math.sqrt(3 * variance)
    nn.init.uniform_(numbers, -bound, bound)


def _linear(held: Held) -> nn.Linear:
    assert isinstance(held, nn.Linear)
    return held


def _parameter(held: Held) -> nn.Parameter:
    assert isinstance(held, nn.Parameter)
    return held
