"""The attention weights of one head, as a page shows them: all of them, or the largest of each row."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

OVERVIEW_SIZE = 96
"""An overview has at most this many rows and columns."""

# Rounding of sums in half precision.
_SLACK = 1e-2


class HeadMap(ABC):
    """The attention weights of one head over one text.

    Attributes:
        num_queries: rows.
        num_keys: columns.
    """

    num_queries: int
    num_keys: int

    @property
    @abstractmethod
    def overview(self) -> NDArray[np.float32]:
        """The map made small, `[rows, columns]`, both at most `OVERVIEW_SIZE`.

        A cell is the weight that its queries give to its keys: a sum over the keys, a mean over the queries.
        """

    @abstractmethod
    def largest(self, k: int) -> "TopMap":
        """The k largest weights of every row."""


@final
@dataclass(frozen=True, eq=False)
class DenseMap(HeadMap):
    """Every weight.

    Attributes:
        weights: `[queries, keys]`, each in 0–1. Rows may sum to less than 1 (attention sinks).
    """

    weights: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.weights.ndim != 2:
            raise ValueError(f"weights have shape {list(self.weights.shape)}: give [queries, keys]")
        _check(self.weights)

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return int(self.weights.shape[0])

    @property
    def num_keys(self) -> int:  # type: ignore[override]
        return int(self.weights.shape[1])

    @cached_property
    def overview(self) -> NDArray[np.float32]:
        keeper = RowKeeper(1, self.num_queries, self.num_keys, 1)
        keeper.add(torch.from_numpy(np.ascontiguousarray(self.weights))[None])
        return keeper.maps()[0].overview

    def largest(self, k: int) -> "TopMap":
        keeper = RowKeeper(1, self.num_queries, self.num_keys, k)
        keeper.add(torch.from_numpy(np.ascontiguousarray(self.weights))[None])
        return keeper.maps()[0]


@final
@dataclass(frozen=True, eq=False)
class TopMap(HeadMap):
    """The largest weights of every row, and how much is left out.

    Attributes:
        num_keys: columns.
        keys: `[queries, k]`, the columns of the k largest weights, the largest first.
        weights: `[queries, k]`, their weights.
        left_out: `[queries]`, the sum of the other weights of the row.
        small: the overview, of all weights.
    """

    num_keys: int
    keys: NDArray[np.integer]
    weights: NDArray[np.float32]
    left_out: NDArray[np.float32]
    small: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.keys.shape != self.weights.shape or self.left_out.shape != self.keys.shape[:1]:
            shapes = [list(of.shape) for of in (self.keys, self.weights, self.left_out)]
            raise ValueError(
                f"keys, weights, left_out: shapes {shapes}, not [queries, k], the same, [queries]"
            )
        _check(self.weights)

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return int(self.keys.shape[0])

    @property
    def overview(self) -> NDArray[np.float32]:
        return self.small

    def largest(self, k: int) -> "TopMap":
        if k >= self.keys.shape[1]:
            return self
        dropped = self.weights[:, k:].sum(axis=1, dtype=np.float32)
        return TopMap(
            self.num_keys, self.keys[:, :k], self.weights[:, :k], self.left_out + dropped, self.small
        )


@final
class RowKeeper:
    """Keeps the largest weights of rows that arrive in blocks: nothing of size `[queries, keys]`."""

    def __init__(self, num_heads: int, num_queries: int, num_keys: int, k: int) -> None:
        """Prepare for the rows of one layer."""
        self._num_keys = num_keys
        k = min(k, num_keys)
        self._keys = np.zeros((num_heads, num_queries, k), np.int32)
        self._weights = np.zeros((num_heads, num_queries, k), np.float32)
        self._left_out = np.zeros((num_heads, num_queries), np.float32)
        self._row_width, self._column_width = bin_width(num_queries), bin_width(num_keys)
        num_bins = -(-num_queries // self._row_width), -(-num_keys // self._column_width)
        self._small = torch.zeros(num_heads, *num_bins)
        self._counts = torch.zeros(num_bins[0])
        self._at = 0

    def add(self, weights: Float[Tensor, "num_heads rows num_keys"]) -> None:
        """Add the next rows of every head."""
        weights = weights.detach().float()
        rows = slice(self._at, self._at + weights.shape[1])
        values, indices = weights.topk(self._keys.shape[2])
        self._keys[:, rows] = indices.cpu().numpy()
        self._weights[:, rows] = values.cpu().numpy()
        self._left_out[:, rows] = (weights.sum(-1) - values.sum(-1)).clamp(min=0).cpu().numpy()
        padded = F.pad(weights, (0, -self._num_keys % self._column_width))
        pooled = padded.view(*padded.shape[:2], -1, self._column_width).sum(-1).cpu()
        bins = torch.arange(rows.start, rows.stop) // self._row_width
        self._small.index_add_(1, bins, pooled)
        self._counts.index_add_(0, bins, torch.ones(len(bins)))
        self._at = rows.stop

    def maps(self) -> tuple[TopMap, ...]:
        """The map of every head."""
        if self._at != self._keys.shape[1]:
            raise ValueError(f"{self._at} of {self._keys.shape[1]} rows were added")
        small = (self._small / self._counts[:, None].clamp(min=1)).numpy()
        parts = zip(self._keys, self._weights, self._left_out, small, strict=True)
        return tuple(TopMap(self._num_keys, *part) for part in parts)


def bin_width(length: int) -> int:
    """How many tokens a row or column of an overview stands for."""
    return max(1, -(-length // OVERVIEW_SIZE))


def _check(weights: NDArray[np.float32]) -> None:
    # NaN fails the comparison too.
    if not np.all((weights >= 0) & (weights <= 1 + _SLACK)):
        raise ValueError("attention weights must be finite and in 0–1")
