"""The attention weights of one head, for pages and files: all weights, or the largest of each row."""

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

# Allowance for rounding of weights in half precision.
_SLACK = 1e-2


@final
@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The attention weights of one head over one text: all weights, or the largest of every row.

    Attributes:
        num_keys: number of columns of the whole map.
        weights: weights from 0 to 1, `[queries, keys]`, or the k largest of each row in descending order,
            `[queries, k]`. Rows may sum to less than 1 (attention sinks).
        keys: column of every weight, `[queries, k]`; None for all columns in order.
        left_out: sum of the omitted weights of each row, `[queries]`.
        small: overview; None if it is computed from all weights.
    """

    num_keys: int
    weights: NDArray[np.float32]
    keys: NDArray[np.integer] | None = None
    left_out: NDArray[np.float32] | None = None
    small: NDArray[np.float32] | None = None

    @classmethod
    def whole(cls, weights: NDArray[np.float32]) -> "HeadWeights":
        """Build a map with all weights, `[queries, keys]`."""
        if weights.ndim != 2:
            raise ValueError(
                f"weights have shape {list(weights.shape)}: give [queries, keys]"
            )
        return cls(int(weights.shape[1]), weights)

    def __post_init__(self) -> None:
        # Comparisons with NaN are false, so NaN is refused too.
        if not np.all((self.weights >= 0) & (self.weights <= 1 + _SLACK)):
            raise ValueError("attention weights must be finite and in 0–1")

    @property
    def num_queries(self) -> int:
        return int(self.weights.shape[0])

    @cached_property
    def overview(self) -> NDArray[np.float32]:
        """The map in reduced size, `[rows, columns]`, with at most `OVERVIEW_SIZE` rows and columns.

        A cell is the weight of its keys for its queries: a sum over the keys, averaged over the queries.
        """
        return self._kept(1).overview if self.small is None else self.small

    def largest(self, k: int) -> "HeadWeights":
        """Return a map with the k largest weights of every row."""
        if self.keys is None or self.left_out is None:
            return self._kept(k)
        if k >= self.keys.shape[1]:
            return self
        dropped = self.weights[:, k:].sum(axis=1, dtype=np.float32)
        return HeadWeights(
            self.num_keys,
            self.weights[:, :k],
            self.keys[:, :k],
            self.left_out + dropped,
            self.small,
        )

    def _kept(self, k: int) -> "HeadWeights":
        keeper = RowKeeper(1, self.num_queries, self.num_keys, k)
        keeper.add(torch.from_numpy(np.ascontiguousarray(self.weights))[None])
        return keeper.maps()[0]


@final
class RowKeeper:
    """The largest weights of rows added in blocks, without storing a matrix `[queries, keys]`."""

    def __init__(self, num_heads: int, num_queries: int, num_keys: int, k: int) -> None:
        """Allocate the results for the rows of one layer."""
        self._num_keys = num_keys
        k = min(k, num_keys)
        self._keys = np.zeros((num_heads, num_queries, k), np.int32)
        self._weights = np.zeros((num_heads, num_queries, k), np.float32)
        self._left_out = np.zeros((num_heads, num_queries), np.float32)
        self._row_width, self._column_width = (
            bin_width(num_queries),
            bin_width(num_keys),
        )
        num_bins = (
            -(-num_queries // self._row_width),
            -(-num_keys // self._column_width),
        )
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
        self._left_out[:, rows] = (
            (weights.sum(-1) - values.sum(-1)).clamp(min=0).cpu().numpy()
        )
        padded = F.pad(weights, (0, -self._num_keys % self._column_width))
        pooled = padded.view(*padded.shape[:2], -1, self._column_width).sum(-1).cpu()
        bins = torch.arange(rows.start, rows.stop) // self._row_width
        self._small.index_add_(1, bins, pooled)
        self._counts.index_add_(0, bins, torch.ones(len(bins)))
        self._at = rows.stop

    def maps(self) -> tuple[HeadWeights, ...]:
        """Return the map of every head."""
        if self._at != self._keys.shape[1]:
            raise ValueError(f"{self._at} of {self._keys.shape[1]} rows were added")
        small = (self._small / self._counts[:, None].clamp(min=1)).numpy()
        parts = zip(self._weights, self._keys, self._left_out, small, strict=True)
        return tuple(HeadWeights(self._num_keys, *part) for part in parts)


def bin_width(length: int) -> int:
    """Return the number of tokens per row or column of an overview."""
    return max(1, -(-length // OVERVIEW_SIZE))
