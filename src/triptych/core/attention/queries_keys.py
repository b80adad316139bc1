"""Queries and keys after norms and rotation, and the weights of chosen heads and queries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, final

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from triptych.core.algebra.semantics import Semantics
from triptych.core.attention.routes import Inputs
from triptych.core.attention.steps import (
    LOCATE,
    QUICK_SCORE_STEPS,
    QUICK_WEIGHT_STEPS,
    WEIGHT_STEPS,
    ScoreStep,
    Step,
    Watcher,
    both,
    slice_broadcast,
    visible_keys,
    walk,
)
from triptych.printable import shown_fields

# Bytes of weights computed at a time.
BLOCK_BYTES = 1 << 24


class WeightBlock(NamedTuple):
    """The weights of a range of consecutive queries."""

    rows: slice
    weights: Float[Tensor, "batch heads rows key_len"]


@final
@dataclass(frozen=True, eq=False)
class QueriesAndKeys:
    """Queries and keys of one call of a layer, after norms and rotation, in float32 at least."""

    q: Float[Tensor, "batch num_heads query_len d_k"]
    k: Float[
        Tensor, "batch num_key_heads key_len d_k"
    ]  # consecutive query heads share a key head
    semantics: Semantics  # semantics of the layer: scale, bias, soft cap, sinks, window
    query_positions: Int[Tensor, "*rows query_len"]  # position of every query
    key_positions: Int[Tensor, "*columns key_len"]  # position of every key
    # True = may attend, broadcasts to `[batch, num_heads, query_len, key_len]`; None for all
    mask: Bool[Tensor, "..."] | None
    causal: bool  # mask keys after the position of a query; the queries are the last positions of the keys
    # the layer's tap on scores and weights; it may read and change any head and query
    watch: Watcher | None = None

    def __repr__(self) -> str:
        return shown_fields(
            type(self).__name__,
            {one.name: getattr(self, one.name) for one in fields(self)},
        )

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[1]

    @property
    def query_len(self) -> int:
        """Number of queries."""
        return self.q.shape[2]

    @property
    def key_len(self) -> int:
        """Number of keys."""
        return self.k.shape[2]

    def scores(
        self, rows: slice = slice(None), heads: Sequence[int] | None = None
    ) -> Float[Tensor, "batch heads rows key_len"]:
        """Compute the input of the softmax before any mask: scaled, with bias and soft cap."""
        if self.watch is not None:
            return self._watched("cap", rows, heads)
        part = self if heads is None else self._select_heads(heads)
        return part._walk(
            QUICK_SCORE_STEPS, slice(*rows.indices(self.query_len)), self.key_len
        )

    def weights(
        self, rows: slice = slice(None), heads: Sequence[int] | None = None
    ) -> Float[Tensor, "batch heads rows key_len"]:
        """Compute the attention weights, 0 in fully masked rows; arguments as in `scores`."""
        if self.watch is not None:
            return self._watched("softmax", rows, heads)
        part = self if heads is None else self._select_heads(heads)
        return part._weights(slice(*rows.indices(self.query_len)))

    def visible(self) -> Bool[Tensor, "rows heads query_len key_len"]:
        """Return the combined mask; the first dimensions are batch and heads, 1 where all are the same."""
        near = self.semantics.visible(self.query_positions, self.key_positions)
        mask = both(near, self.mask)
        return visible_keys(
            mask, self.causal, self.query_len, self.key_len, self.q.device
        )

    def blocks(
        self, heads: Sequence[int] | None = None, most_bytes: int = BLOCK_BYTES
    ) -> Iterator[WeightBlock]:
        """Yield all weights in blocks of at most `most_bytes` bytes, at least one query a block.

        A tapped layer has one block.
        """
        if self.watch is not None:
            rows = slice(0, self.query_len)
            yield WeightBlock(rows, self.weights(rows, heads))
            return
        part = self if heads is None else self._select_heads(heads)
        row_bytes = (
            part.q.shape[0] * part.num_heads * self.key_len * self.q.element_size()
        )
        step = max(1, most_bytes // row_bytes)
        for start in range(0, self.query_len, step):
            rows = slice(start, min(start + step, self.query_len))
            yield WeightBlock(rows, part._weights(rows))

    def _select_heads(self, heads: Sequence[int]) -> "QueriesAndKeys":
        """Select query heads and repeat shared key heads, so that any choice of heads is valid."""
        chosen = list(heads)
        shared = self.num_heads // self.k.shape[1]
        mask = self.mask
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask[..., chosen, :, :]
        return QueriesAndKeys(
            self.q[:, chosen],
            self.k[:, [head // shared for head in chosen]],
            self.semantics.select_heads(chosen),
            self.query_positions,
            self.key_positions,
            mask,
            self.causal,
        )

    def _weights(self, rows: slice) -> Tensor:
        """Compute the weights of some queries and all heads; `rows` has a start and a stop."""
        # Keys after the last query of the rows are masked for all rows.
        seen = (
            max(0, self.key_len - self.query_len + rows.stop)
            if self.causal
            else self.key_len
        )
        weights = self._walk(QUICK_WEIGHT_STEPS, rows, seen)
        return (
            weights
            if seen == self.key_len
            else F.pad(weights, (0, self.key_len - seen))
        )

    def _watched(self, name: str, rows: slice, heads: Sequence[int] | None) -> Tensor:
        """Walk all steps for all heads and queries; select rows and heads of the result of step `name`."""
        found = dict[str, Tensor]()

        def watch(step: Step, value: Tensor) -> Tensor:
            found[step.name] = value if self.watch is None else self.watch(step, value)
            return found[step.name]

        self._walk(WEIGHT_STEPS, slice(0, self.query_len), self.key_len, watch)
        value = found[name] if heads is None else found[name][:, list(heads)]
        return value[:, :, rows]

    def _walk(
        self,
        steps: tuple[ScoreStep, ...],
        rows: slice,
        seen: int,
        watch: Watcher | None = None,
    ) -> Tensor:
        """Walk steps from the queries of some rows, with the first `seen` keys."""
        q = self.q[:, :, rows]
        k = self.k[:, :, :seen]
        at = self.query_positions[..., rows], self.key_positions[..., :seen]
        near, bias = LOCATE.run(q, k, self.semantics, *at)
        mask = self.mask
        if mask is not None:
            mask = slice_broadcast(
                mask, (slice(None), slice(None), rows, slice(0, seen))
            )
        # No step up to the weights reads values, so keys are passed as values.
        given = Inputs(
            q, k, k, both(mask, near), bias, self.causal, self.semantics, 0.0
        )
        return walk(steps, q, given, watch)
