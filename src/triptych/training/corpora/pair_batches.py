"""Batches of sentence pairs of similar length, within a budget of tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import final

import numpy as np
import torch
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from triptych.errors import UsageError
from triptych.running.text import TokenSequences
from triptych.training.corpora.encoded import EncodedCorpus

# Cost of one more batch in tokens of padding, as a share of the budget. On Multi30k with 4,096 tokens, shares
# of 1/16, 1/14, 1/8 and 1 give 2.3, 2.4, 2.6 and 3.1 % of padding in 130, 128, 123 and 119 batches. Full
# batches in order of target length are 128. Fewer batches mean fewer updates, and an epoch trains less.
_PRICE_OF_A_BATCH = 1 / 14


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs as padded tensors for teacher forcing."""

    src: Int[Tensor, "batch src_len"]  # source ids, then `<eos>`
    tgt_in: Int[
        Tensor, "batch tgt_len"
    ]  # `<bos>`, then target ids: input of the decoder
    tgt_out: Int[Tensor, "batch tgt_len"]  # target ids, then `<eos>`: labels
    line_numbers: tuple[int, ...]  # 1-based line of each pair in its file
    num_target_tokens: int  # number of entries of `tgt_out` without padding

    def pinned(self) -> "Batch":
        """Copy the batch to page-locked memory for asynchronous transfers to a GPU."""
        src, tgt_in, tgt_out = (
            side.pin_memory() for side in (self.src, self.tgt_in, self.tgt_out)
        )
        return replace(self, src=src, tgt_in=tgt_in, tgt_out=tgt_out)


@final
class _Measured:
    """A corpus with the lengths of its sentences, end tokens included."""

    def __init__(self, corpus: EncodedCorpus) -> None:
        self.corpus = corpus
        self.src_lengths = corpus.source.lengths + 1
        self.tgt_lengths = corpus.target.lengths + 1
        # Sorting by these keys brings pairs of similar lengths together.
        self.places = _places(self.src_lengths, self.tgt_lengths)


@final
class TokenBatches:
    """Batches of a corpus; the padded sizes of source and target stay within a budget of tokens."""

    def __init__(
        self,
        corpus: EncodedCorpus,
        *,
        max_tokens: int,
        seed: int,
        pad_id: int,
        bos_id: int,
        eos_id: int,
        src_eos_id: int | None = None,
        shuffle: bool = True,
        of_epoch: Callable[[int], EncodedCorpus] | None = None,
    ) -> None:
        """Measure a corpus.

        Sources end with `src_eos_id` if it is given. `of_epoch` returns the pieces of an epoch, if
        pieces differ between epochs.
        """
        self._usual = _Measured(corpus)
        # An index encodes the epoch and the pair if pieces differ between epochs. Two epochs are kept:
        # batches are made ahead.
        self._of_epoch = (
            None
            if of_epoch is None
            else lru_cache(maxsize=2)(lambda epoch: _Measured(of_epoch(epoch)))
        )
        self._stride = len(corpus)
        self._max_tokens = max_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._pad_id = pad_id
        self._bos_id = bos_id
        self._eos_id = eos_id
        self._src_eos_id = eos_id if src_eos_id is None else src_eos_id
        longest = np.maximum(self._usual.src_lengths, self._usual.tgt_lengths)
        past = np.flatnonzero(longest > max_tokens)
        if len(past):
            first = past[0]
            raise UsageError(
                f"{corpus.name}, line {corpus.line_numbers[first]}: a side of {longest[first]:,} tokens, its "
                f"<bos> or <eos> included, is past max_tokens = {max_tokens:,} per batch; raise "
                "training.batch_tokens, or lower data.max_sentence_tokens"
            )

    def plan(self, epoch: int) -> list[Int64[np.ndarray, "batch"]]:
        """Return the indices of the pairs in each batch of an epoch.

        The plan depends only on corpus, budget, seed and epoch.
        """
        text = self._measured(epoch)
        if not self._shuffle:
            return self._cut(text, np.argsort(text.places, kind="stable"))
        generator = np.random.default_rng([self._seed, epoch])
        shuffled = generator.permutation(len(text.corpus))
        if text.corpus.weights is not None:
            shuffled = _drawn(shuffled, text.corpus.weights, generator)
        # A stable sort keeps pairs of equal lengths in shuffled order.
        order = shuffled[np.argsort(text.places[shuffled], kind="stable")]
        batches = self._cut(text, order)
        first = 0 if self._of_epoch is None else epoch * self._stride
        return [first + batches[index] for index in generator.permutation(len(batches))]

    def _measured(self, epoch: int) -> _Measured:
        """Return the corpus with the pieces of an epoch."""
        return self._usual if self._of_epoch is None else self._of_epoch(epoch)

    def _of_indices(
        self, indices: Int64[np.ndarray, "batch"]
    ) -> tuple[_Measured, Int64[np.ndarray, "batch"]]:
        """Return the corpus of a plan's indices, and the numbers of the pairs in it."""
        if self._of_epoch is None:
            return self._usual, indices
        return self._measured(int(indices[0]) // self._stride), indices % self._stride

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> Batch:
        """Make the tensors of one batch of a plan."""
        # Lengths include the end token, which replaces the last entry of padding in each row.
        text, indices = self._of_indices(indices)
        corpus = text.corpus
        src = self._pad(corpus.source, text.src_lengths, indices, start=0)
        tgt_out = self._pad(corpus.target, text.tgt_lengths, indices, start=0)
        tgt_in = self._pad(corpus.target, text.tgt_lengths, indices, start=1)
        rows = np.arange(len(indices))
        src[rows, text.src_lengths[indices] - 1] = self._src_eos_id
        tgt_out[rows, text.tgt_lengths[indices] - 1] = self._eos_id
        tgt_in[:, 0] = self._bos_id
        return Batch(
            src=torch.from_numpy(src),
            tgt_in=torch.from_numpy(tgt_in),
            tgt_out=torch.from_numpy(tgt_out),
            line_numbers=tuple(corpus.line_numbers[indices].tolist()),
            num_target_tokens=int(text.tgt_lengths[indices].sum()),
        )

    @property
    def num_target_tokens(self) -> int:
        """Expected number of target tokens of one epoch, `<eos>` included."""
        return self._usual.corpus.tokens_of_pass

    def padding_waste(self, epoch: int) -> float:
        """Return the share of padding in `src` and `tgt_out` over an epoch, in [0, 1)."""
        num_slots = 0
        num_tokens = 0
        for indices in self.plan(epoch):
            text, batch = self._of_indices(indices)
            src = text.src_lengths[batch]
            tgt = text.tgt_lengths[batch]
            num_slots += len(batch) * int(src.max() + tgt.max())
            num_tokens += int(src.sum() + tgt.sum())
        return 1.0 - num_tokens / num_slots

    def _cut(
        self, text: _Measured, order: Int64[np.ndarray, "num_drawn"]
    ) -> list[Int64[np.ndarray, "batch"]]:
        """Cut the sorted pairs into batches, greedily with the least cost per real token."""
        # cost = (padded source + padded target + price of a batch) / real tokens, for every size of the batch
        src_lengths = text.src_lengths[order]
        tgt_lengths = text.tgt_lengths[order]
        price = self._max_tokens * _PRICE_OF_A_BATCH
        bounds = [0]
        while bounds[-1] < len(order):
            start = bounds[-1]
            most = self._max_tokens // int(max(src_lengths[start], tgt_lengths[start]))
            src = src_lengths[start : start + most]
            tgt = tgt_lengths[start : start + most]
            src_width = np.maximum.accumulate(src)
            tgt_width = np.maximum.accumulate(tgt)
            sizes = np.arange(1, len(src) + 1)
            costs = (sizes * (src_width + tgt_width) + price) / np.cumsum(src + tgt)
            costs[sizes * np.maximum(src_width, tgt_width) > self._max_tokens] = np.inf
            bounds.append(
                start + len(src) - int(np.argmin(costs[::-1]))
            )  # the last minimum
        return [order[start:end] for start, end in pairwise(bounds)]

    def _pad(
        self,
        sequences: TokenSequences,
        lengths: Int64[np.ndarray, "num_pairs"],
        indices: Int64[np.ndarray, "batch"],
        *,
        start: int,
    ) -> Int64[np.ndarray, "batch length"]:
        """Return the sequences as padded rows; ids begin at column `start`."""
        width = int(lengths[indices].max())
        padded = np.full((len(indices), width), self._pad_id, dtype=np.int64)
        num_ids = lengths[indices] - 1
        ends = np.cumsum(num_ids)
        # Positions of all rows' ids in one array, in the row-major order of the mask below.
        flat = np.arange(ends[-1]) + np.repeat(
            sequences.offsets[indices] - (ends - num_ids), num_ids
        )
        padded[:, start : start + width - 1][
            np.arange(width - 1) < num_ids[:, None]
        ] = sequences.ids[flat]
        return padded


def _drawn(
    shuffled: Int64[np.ndarray, "num_pairs"],
    weights: Float64[np.ndarray, "num_pairs"],
    generator: np.random.Generator,
) -> Int64[np.ndarray, "num_drawn"]:
    """Draw the pairs of an epoch: the weight is the frequency of a pair, a fraction is a probability.

    The n pairs of one weight w are drawn w · n times together, rounded up or down.
    """
    # Systematic sampling: a pair is read once for each whole number that the running sum of weights passes.
    order = shuffled[np.argsort(weights[shuffled], kind="stable")]
    passed = np.floor(np.cumsum(weights[order]) + generator.random())
    times = np.diff(passed, prepend=0.0).astype(np.int64)
    times[-1] = max(times[-1], not times.any())  # an epoch is not empty
    return generator.permutation(np.repeat(order, times))


# The first key is the longer of the two lengths, since it uses the budget. The second key is the difference
# of the lengths, ascending for odd and descending for even first keys.
def _places(
    src_lengths: Int64[np.ndarray, "num_pairs"],
    tgt_lengths: Int64[np.ndarray, "num_pairs"],
) -> Int64[np.ndarray, "num_pairs"]:
    """Return a sort key for each pair of lengths; neighbours in its order are similar in both lengths."""
    longer = np.maximum(src_lengths, tgt_lengths)
    difference = src_lengths - tgt_lengths
    spacing = 2 * int(
        longer.max(initial=0)
    )  # absolute differences are less than half of the spacing
    return np.asarray(longer * spacing + np.where(longer % 2, difference, -difference))
