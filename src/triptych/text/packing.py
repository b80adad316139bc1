"""Batches for language models: documents end to end, cut into rows of one length."""

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from triptych.errors import UsageError
from triptych.text.shards import TokenShards

NOT_COUNTED = -1


@final
@dataclass(frozen=True, eq=False)
class LanguageBatch:
    """Rows of tokens and their targets."""

    ids: Int[Tensor, "batch context"]  # what the model reads
    # The token to predict at each position; -1 where the loss leaves it out.
    targets: Int[Tensor, "batch context"]
    # For attention within documents, the position in the row at which each token's document begins; None for
    # attention across documents.
    starts: Int[Tensor, "batch context"] | None
    num_target_tokens: int  # targets that the loss counts

    @property
    def positions(self) -> Int[Tensor, "batch context"] | None:
        """Position of each token in its document; None for attention across documents."""
        if self.starts is None:
            return None
        return torch.arange(self.ids.shape[1], device=self.ids.device) - self.starts

    @property
    def mask(self) -> Bool[Tensor, "batch 1 context context"] | None:
        """Which tokens are of one document; None for attention across documents. Causality is the model's."""
        if self.starts is None:
            return None
        return (self.starts[:, :, None] == self.starts[:, None, :])[:, None]

    def pinned(self) -> "LanguageBatch":
        """A copy in page-locked memory, from which a GPU takes it while the CPU goes on."""
        starts = None if self.starts is None else self.starts.pin_memory()
        return replace(self, ids=self.ids.pin_memory(), targets=self.targets.pin_memory(), starts=starts)


@final
class PackedBatches:
    """Cuts a corpus into rows of `context` tokens, whose targets are the tokens that follow."""

    def __init__(
        self,
        shards: TokenShards,
        *,
        context: int,
        batch_size: int,
        seed: int,
        within_documents: bool = False,
        shuffle: bool = True,
    ) -> None:
        if shards.num_tokens < 2:
            raise UsageError(f"the corpus in {shards.folder} has fewer than two tokens; give more text")
        self._shards, self._context, self._batch_size = shards, context, batch_size
        self._seed, self._shuffle, self._within_documents = seed, shuffle, within_documents

    def plan(self, epoch: int) -> list[Int64[np.ndarray, "batch"]]:
        """The places at which the rows of each batch of an epoch begin."""
        seed = [self._seed, epoch] if self._shuffle else None
        return plan_rows(self._shards.num_tokens - 1, self._context, self._batch_size, seed)

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> LanguageBatch:
        """Make the tensors of one batch of a plan."""
        shape = (len(indices), self._context)
        ids = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, NOT_COUNTED, dtype=np.int64)
        starts = np.zeros(shape, dtype=np.int64)
        for row, place in enumerate(indices.tolist()):
            begin, end = max(place, 0), min(place + self._context, self._shards.num_tokens - 1)
            tokens = self._shards.tokens(begin, end + 1)
            length = end - begin
            ids[row, :length], targets[row, :length] = tokens[:-1], tokens[1:]
            if self._within_documents:
                inside = self._shards.starts_within(begin + 1, end + 1) - begin
                targets[row, inside - 1] = NOT_COUNTED
                starts[row] = starts_of(inside[inside < length], length, self._context)
        return LanguageBatch(
            ids=torch.from_numpy(ids),
            targets=torch.from_numpy(targets),
            starts=torch.from_numpy(starts) if self._within_documents else None,
            num_target_tokens=int((targets != NOT_COUNTED).sum()),
        )

    @property
    def num_target_tokens(self) -> int:
        """Tokens of one pass that are learned from."""
        if self._within_documents:
            return self._shards.num_tokens - self._shards.num_documents
        return self._shards.num_tokens - 1


def plan_rows(
    num_tokens: int, context: int, batch_size: int, seed: list[int] | None
) -> list[Int64[np.ndarray, "batch"]]:
    """The places at which the rows of each batch begin; together the rows hold every token once."""
    starts = np.arange(0, num_tokens, context)
    if seed is not None:
        generator = np.random.default_rng(seed)
        starts = np.arange(-int(generator.integers(context)), num_tokens, context)
        starts = generator.permutation(starts)
    return np.split(starts, range(batch_size, len(starts), batch_size))


def starts_of(
    inside: Int64[np.ndarray, "num_inside"], length: int, context: int
) -> Int64[np.ndarray, "context"]:
    """Where the document of each place of a row begins; what fills it up is one of its own."""
    bounds = np.concatenate([[0], inside, [length] if length < context else []]).astype(np.int64)
    return bounds[np.searchsorted(bounds, np.arange(context), side="right") - 1]
