"""Batches of sentence pairs of similar length, within a budget of tokens."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import numpy as np
import torch
from jaxtyping import Int, Int64
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
        shuffle: bool = True,
    ) -> None:
        self._corpus = corpus
        self._max_tokens = max_tokens
        self._seed = seed
        self._shuffle = shuffle
        self._pad_id = pad_id
        self._bos_id = bos_id
        self._eos_id = eos_id
        self._src_lengths = corpus.source.lengths + 1
        self._tgt_lengths = corpus.target.lengths + 1
        # Sorting by these keys brings pairs of similar lengths together.
        self._places = _places(self._src_lengths, self._tgt_lengths)
        longest = np.maximum(self._src_lengths, self._tgt_lengths)
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
        if not self._shuffle:
            return self._cut(np.argsort(self._places, kind="stable"))
        generator = np.random.default_rng([self._seed, epoch])
        shuffled = generator.permutation(len(self._corpus))
        # A stable sort keeps pairs of equal lengths in shuffled order.
        batches = self._cut(shuffled[np.argsort(self._places[shuffled], kind="stable")])
        return [batches[index] for index in generator.permutation(len(batches))]

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> Batch:
        """Make the tensors of one batch of a plan."""
        # Lengths include the end token, which replaces the last entry of padding in each row.
        src = self._pad(self._corpus.source, self._src_lengths, indices, start=0)
        tgt_out = self._pad(self._corpus.target, self._tgt_lengths, indices, start=0)
        tgt_in = self._pad(self._corpus.target, self._tgt_lengths, indices, start=1)
        rows = np.arange(len(indices))
        src[rows, self._src_lengths[indices] - 1] = self._eos_id
        tgt_out[rows, self._tgt_lengths[indices] - 1] = self._eos_id
        tgt_in[:, 0] = self._bos_id
        return Batch(
            src=torch.from_numpy(src),
            tgt_in=torch.from_numpy(tgt_in),
            tgt_out=torch.from_numpy(tgt_out),
            line_numbers=tuple(self._corpus.line_numbers[indices].tolist()),
            num_target_tokens=int(self._tgt_lengths[indices].sum()),
        )

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens of one epoch, `<eos>` included."""
        return int(self._tgt_lengths.sum())

    def padding_waste(self, epoch: int) -> float:
        """Return the share of padding in `src` and `tgt_out` over an epoch, in [0, 1)."""
        num_slots = sum(
            len(batch)
            * int(self._src_lengths[batch].max() + self._tgt_lengths[batch].max())
            for batch in self.plan(epoch)
        )
        return 1.0 - int(self._src_lengths.sum() + self._tgt_lengths.sum()) / num_slots

    def _cut(
        self, order: Int64[np.ndarray, "num_pairs"]
    ) -> list[Int64[np.ndarray, "batch"]]:
        """Cut the sorted pairs into batches, greedily with the least cost per real token."""
        # cost = (padded source + padded target + price of a batch) / real tokens, for every size of the batch
        src_lengths = self._src_lengths[order]
        tgt_lengths = self._tgt_lengths[order]
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
