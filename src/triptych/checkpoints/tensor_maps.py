"""Invertible maps between the tensors of a format and ours: names, transposes, splits, stacks.

Nothing is computed: `write` of what `read` gave is what was stored, to the bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from triptych.checkpoints.attention_spec import FusedLayout
from triptych.checkpoints.place import MapSizes
from triptych.errors import DataError

Shape = tuple[int | None, ...]
Parts = Sequence[Tensor]
# Gives the stored tensor of a name; the shape it must have, None for a size that is free.
Take = Callable[[str, Shape | None], Tensor]
_QUARTERS = 4  # CodeGen's rows are as four processors held them


class TensorMap(ABC):
    """One step from stored tensors to ours (`read`), and back (`write`)."""

    @abstractmethod
    def read(self, parts: Parts) -> Parts: ...

    @abstractmethod
    def write(self, parts: Parts) -> Parts: ...


@final
@dataclass(frozen=True)
class Named:
    """Some of our tensors by the names of the stored ones that they come from."""

    names: tuple[str, ...]  # of the stored ones
    shape: Shape | None = None  # that each of them must have
    steps: tuple[TensorMap, ...] = ()  # from them to ours

    def then(self, *steps: TensorMap) -> "Named":
        """The same with more steps."""
        return Named(self.names, self.shape, (*self.steps, *steps))

    def read(self, take: Take) -> Parts:
        """Ours."""
        parts: Parts = [take(name, self.shape) for name in self.names]
        for step in self.steps:
            parts = step.read(parts)
        return parts

    def write(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """The stored ones."""
        for step in reversed(self.steps):
            parts = step.write(parts)
        return zip(self.names, parts, strict=True)


@final
class StackRows(TensorMap):
    """Tensors of one shape as the rows of one."""

    def read(self, parts: Parts) -> Parts:
        return [torch.stack([*parts])]

    def write(self, parts: Parts) -> Parts:
        return parts[0].unbind()


@final
class Transposed(TensorMap):
    """`[in, out]` as `[out, in]`."""

    def read(self, parts: Parts) -> Parts:
        return [part.mT.contiguous() for part in parts]

    def write(self, parts: Parts) -> Parts:
        return [part.mT for part in parts]


@final
class OnlyRow(TensorMap):
    """The one row of a matrix as a vector."""

    def read(self, parts: Parts) -> Parts:
        return [part[0] for part in parts]

    def write(self, parts: Parts) -> Parts:
        return [part[None] for part in parts]


@final
@dataclass(frozen=True)
class Halves(TensorMap):
    """One tensor as two of the same size, one after the other along a dimension."""

    dim: int = 0

    def along(self, dim: int) -> "Halves":
        """The same along another dimension."""
        return Halves(dim)

    def read(self, parts: Parts) -> Parts:
        return parts[0].chunk(2, self.dim)

    def write(self, parts: Parts) -> Parts:
        return [torch.cat([*parts], self.dim)]


@final
@dataclass(frozen=True)
class Alternating(TensorMap):
    """One tensor as two of the same size, in turns along a dimension."""

    dim: int = 0

    def along(self, dim: int) -> "Alternating":
        """The same along another dimension."""
        return Alternating(dim)

    def read(self, parts: Parts) -> Parts:
        return [part.contiguous() for part in parts[0].unflatten(self.dim, (-1, 2)).unbind(self.dim + 1)]  # type: ignore[no-untyped-call]

    def write(self, parts: Parts) -> Parts:
        return [torch.stack([*parts], self.dim + 1).flatten(self.dim, self.dim + 1)]


@final
@dataclass(frozen=True)
class Split(TensorMap):
    """The rows of one tensor as those of queries, of keys and of values, which lie there in some order."""

    layout: FusedLayout
    sizes: MapSizes

    def read(self, parts: Parts) -> Parts:
        heads, groups, width, value_width = self.sizes
        rows = (heads * width, groups * width, groups * value_width)
        match self.layout:
            case "q k v":
                return parts[0].split([*rows])  # type: ignore[no-untyped-call, no-any-return]
            case "by group":
                return _from_blocks(parts[0], groups, *rows)
            case "q v k in four parts":
                if heads % _QUARTERS or groups % _QUARTERS:
                    raise DataError(f"{heads} heads cannot lie in {_QUARTERS} parts")
                q, v, k = _from_blocks(parts[0], _QUARTERS, rows[0], rows[2], rows[1])
                return q, k, v

    def write(self, parts: Parts) -> Parts:
        q, k, v = parts
        match self.layout:
            case "q k v":
                return [torch.cat([q, k, v])]
            case "by group":
                return [_in_blocks(self.sizes.groups, q, k, v)]
            case "q v k in four parts":
                return [_in_blocks(_QUARTERS, q, v, k)]


def _from_blocks(rows: Tensor, blocks: int, *counts: int) -> Parts:
    of_blocks = rows.reshape(blocks, sum(counts) // blocks, *rows.shape[1:])
    split = torch.split(of_blocks, [count // blocks for count in counts], dim=1)
    return [part.flatten(0, 1) for part in split]


def _in_blocks(blocks: int, *parts: Tensor) -> Tensor:
    return torch.cat([part.reshape(blocks, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


@final
class SplitHeads(TensorMap):
    """`[copies · width, d_in]` as `[copies, d_in, width]`, `[copies · width]` as `[copies, width]`."""

    def __init__(self, *copies: int) -> None:
        self.copies = copies

    def read(self, parts: Parts) -> Parts:
        split = (part.unflatten(0, (n, -1)) for n, part in zip(self.copies, parts, strict=True))  # type: ignore[no-untyped-call]
        return [part.transpose(1, -1) for part in split]

    def write(self, parts: Parts) -> Parts:
        return [part.transpose(1, -1).flatten(0, 1) for part in parts]


@final
@dataclass(frozen=True)
class HeadColumns(TensorMap):
    """`[d_out, heads · width]` as `[heads, width, d_out]`."""

    heads: int

    def read(self, parts: Parts) -> Parts:
        return [part.mT.reshape(self.heads, -1, part.shape[0]) for part in parts]

    def write(self, parts: Parts) -> Parts:
        return [part.flatten(0, 1).mT for part in parts]
