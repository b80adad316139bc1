"""Queries, keys and values as the rows of one map, in the orders that formats have them in."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from triptych.errors import DataError

Layout = Literal["q k v", "by group", "q v k in four parts"]
_PARTS = 4  # CodeGen's rows are as four processors held them


def parted(
    layout: Layout, joined: Tensor, heads: int, groups: int, width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of queries, of keys and of values.

    Args:
        layout: of the rows.
        joined: `[(heads + groups) · width + groups · value_width, …]`.
        heads: number of query heads.
        groups: number of key heads and value heads.
        width: of a head of queries and keys.
        value_width: of a head of values.

    Raises:
        DataError: so many heads cannot lie in that order.
    """
    match layout:
        case "q k v":
            first, second = heads * width, (heads + groups) * width
            return joined[:first], joined[first:second], joined[second:]
        case "by group":
            q, k, v = _from_blocks(joined, groups, (heads // groups * width, width, value_width))
            return q, k, v
        case "q v k in four parts":
            if heads % _PARTS or groups % _PARTS:
                raise DataError(f"{heads} heads cannot lie in {_PARTS} parts")
            rows = (heads * width, groups * value_width, groups * width)
            q, v, k = _from_blocks(joined, _PARTS, tuple(count // _PARTS for count in rows))
            return q, k, v


def joined(layout: Layout, parts: Sequence[Tensor], groups: int) -> Tensor:
    """The inverse of `parted`: the rows of queries, keys and values as those of one map."""
    q, k, v = parts
    match layout:
        case "q k v":
            return torch.cat([q, k, v])
        case "by group":
            return _in_blocks(groups, q, k, v)
        case "q v k in four parts":
            return _in_blocks(_PARTS, q, v, k)


def _from_blocks(rows: Tensor, blocks: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    of_blocks = rows.reshape(blocks, sum(sizes), *rows.shape[1:])
    return tuple(part.flatten(0, 1) for part in torch.split(of_blocks, list(sizes), dim=1))


def _in_blocks(blocks: int, *parts: Tensor) -> Tensor:
    return torch.cat([part.reshape(blocks, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
