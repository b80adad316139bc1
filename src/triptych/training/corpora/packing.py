"""Batches for language models: concatenated documents, cut into rows of equal length."""

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from triptych.errors import UsageError
from triptych.running.text import Masking
from triptych.training.corpora.token_shards import TokenShards

NOT_COUNTED = -1


@final
@dataclass(frozen=True, eq=False)
class LanguageBatch:
    """Rows of tokens and their targets."""

    ids: Int[Tensor, "batch context"]  # input ids
    # Token to predict at each position; -1 for positions without a loss.
    targets: Int[Tensor, "batch context"]
    # Position in the row of the first token of each token's document; None for attention across documents.
    starts: Int[Tensor, "batch context"] | None
    num_target_tokens: int  # number of targets with a loss

    @property
    def positions(self) -> Int[Tensor, "batch context"] | None:
        """Position of each token in its document; None for attention across documents."""
        if self.starts is None:
            return None
        return torch.arange(self.ids.shape[1], device=self.ids.device) - self.starts

    @property
    def mask(self) -> Bool[Tensor, "batch 1 context context"] | None:
        """Mask, True within a document, without causality; None for attention across documents."""
        if self.starts is None:
            return None
        return (self.starts[:, :, None] == self.starts[:, None, :])[:, None]

    def pinned(self) -> "LanguageBatch":
        """Copy the batch to page-locked memory for asynchronous transfers to a GPU."""
        starts = None if self.starts is None else self.starts.pin_memory()
        return replace(
            self,
            ids=self.ids.pin_memory(),
            targets=self.targets.pin_memory(),
            starts=starts,
        )


@final
class PackedBatches:
    """Batches of a corpus in rows of `context` tokens; targets are the next tokens, or masked tokens."""

    def __init__(
        self,
        shards: TokenShards,
        *,
        context: int,
        batch_size: int,
        seed: int,
        within_documents: bool = False,
        shuffle: bool = True,
        masking: Masking | None = None,
    ) -> None:
        self._ahead = (
            1 if masking is None else 0
        )  # tokens after a row needed for its targets
        if shards.num_tokens < 1 + self._ahead:
            state = "is empty" if masking else "has fewer than two tokens"
            raise UsageError(f"the corpus in {shards.folder} {state}; give more text")
        self._shards = shards
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._within_documents = within_documents
        self._masking = masking
        # With masking, an index encodes epoch and start: the masked tokens differ in every epoch.
        self._stride = shards.num_tokens + context

    def plan(self, epoch: int) -> list[Int64[np.ndarray, "batch"]]:
        """Return the start positions of the rows of each batch of an epoch, as indices for `collate`."""
        # Shuffled epochs shift all rows by a random offset, so that rows differ between epochs.
        starts = np.arange(0, self._shards.num_tokens - self._ahead, self._context)
        if self._shuffle:
            generator = np.random.default_rng([self._seed, epoch])
            first = -int(generator.integers(self._context))
            starts = np.arange(
                first, self._shards.num_tokens - self._ahead, self._context
            )
            starts = generator.permutation(starts)
        if self._masking is not None:
            starts = starts + self._context + epoch * self._stride
        return np.split(starts, range(self._batch_size, len(starts), self._batch_size))

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> LanguageBatch:
        """Make the tensors of one batch of a plan."""
        shape = (len(indices), self._context)
        masking = self._masking
        ids = np.full(shape, 0 if masking is None else masking.fill_id, dtype=np.int64)
        targets = np.full(shape, NOT_COUNTED, dtype=np.int64)
        starts = np.zeros(shape, dtype=np.int64)
        # Tokens must not attend to padding at the end of a row. Causality ensures it for next-token targets.
        has_starts = self._within_documents
        for row, index in enumerate(indices.tolist()):
            epoch, place = (
                (0, index) if masking is None else divmod(index, self._stride)
            )
            begin = place if masking is None else place - self._context
            begin, end = (
                max(begin, 0),
                min(begin + self._context, self._shards.num_tokens - self._ahead),
            )
            length = end - begin
            tokens = self._shards.tokens(begin, end + self._ahead).astype(np.int64)
            inside = np.zeros(0, dtype=np.int64)
            if self._within_documents:
                inside = (
                    self._shards.starts_within(begin + 1, end + self._ahead) - begin
                )
            if masking is None:
                ids[row, :length], targets[row, :length] = tokens[:-1], tokens[1:]
                targets[row, inside - 1] = NOT_COUNTED
            else:
                generator = np.random.default_rng([self._seed, epoch, place])
                ids[row, :length], hidden = masking.hide(tokens, generator)
                targets[row, :length][hidden] = tokens[hidden]
                has_starts |= length < self._context
            starts[row] = _starts_of(inside[inside < length], length, self._context)
        return LanguageBatch(
            ids=torch.from_numpy(ids),
            targets=torch.from_numpy(targets),
            starts=torch.from_numpy(starts) if has_starts else None,
            num_target_tokens=int((targets != NOT_COUNTED).sum()),
        )

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens of one epoch; with masking, the expected number."""
        if self._masking is not None:
            return max(1, round(self._masking.share * self._shards.num_tokens))
        return self._shards.num_tokens - (
            self._shards.num_documents if self._within_documents else 1
        )


def _starts_of(
    inside: Int64[np.ndarray, "num_inside"], length: int, context: int
) -> Int64[np.ndarray, "context"]:
    """Return the start of each position's document in a row; padding counts as a separate document."""
    bounds = np.concatenate([[0], inside, [length] if length < context else []]).astype(
        np.int64
    )
    return bounds[np.searchsorted(bounds, np.arange(context), side="right") - 1]
