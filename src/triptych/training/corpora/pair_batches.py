"""Batches of sentence pairs of similar length, within a budget of tokens."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from triptych.errors import UsageError
from triptych.running.text.sequences import TokenSequences
from triptych.training.corpora.encoded import EncodedCorpus

# What one more batch may cost in padding, as a share of the budget. On Multi30k and 4,096 tokens, shares of
# 1/16, 1/14, 1/8 and 1 leave 2.3, 2.4, 2.6 and 3.1 % of padding in 130, 128, 123 and 119 batches; 128 is what
# full batches in order of the target come to. Fewer batches are fewer updates, and an epoch teaches less.
_PRICE_OF_A_BATCH = 1 / 14


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs as padded tensors for teacher forcing."""

    src: Int[Tensor, "batch src_len"]  # source ids, then `<eos>`
    tgt_in: Int[Tensor, "batch tgt_len"]  # `<bos>`, then target ids: what the decoder reads
    tgt_out: Int[Tensor, "batch tgt_len"]  # target ids, then `<eos>`: what it should predict
    line_numbers: tuple[int, ...]  # 1-based line of each pair where it was read
    num_target_tokens: int  # entries of `tgt_out` that are not padding

    def pinned(self) -> "Batch":
        """A copy in page-locked memory, from which a GPU takes it while the CPU goes on."""
        src, tgt_in, tgt_out = (side.pin_memory() for side in (self.src, self.tgt_in, self.tgt_out))
        return replace(self, src=src, tgt_in=tgt_in, tgt_out=tgt_out)


@final
class TokenBatches:
    """Cuts a corpus into batches whose padded size on each side stays within a budget."""

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
        """Which pairs make up each batch of an epoch: a function of corpus, budget, seed and epoch alone."""
        if not self._shuffle:
            return self._cut(np.argsort(self._places, kind="stable"))
        generator = np.random.default_rng([self._seed, epoch])
        shuffled = generator.permutation(len(self._corpus))
        # A stable sort leaves pairs of equal lengths in shuffled order.
        batches = self._cut(shuffled[np.argsort(self._places[shuffled], kind="stable")])
        return [batches[index] for index in generator.permutation(len(batches))]

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> Batch:
        """Make the tensors of one batch of a plan."""
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
        """Tokens of one pass that are learned from, ends of sentence included."""
        return int(self._tgt_lengths.sum())

    def padding_waste(self, epoch: int) -> float:
        """Share of padding among the entries of `src` and `tgt_out` over an epoch, from 0 up to 1."""
        num_slots = sum(
            len(batch) * int(self._src_lengths[batch].max() + self._tgt_lengths[batch].max())
            for batch in self.plan(epoch)
        )
        return 1.0 - int(self._src_lengths.sum() + self._tgt_lengths.sum()) / num_slots

    def _cut(self, order: Int64[np.ndarray, "num_pairs"]) -> list[Int64[np.ndarray, "batch"]]:
        """Cut the order into batches, each where it costs the least per token that is no padding."""
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
            bounds.append(start + len(src) - int(np.argmin(costs[::-1])))  # the largest of equals
        return [order[start:end] for start, end in pairwise(bounds)]

    def _pad(
        self,
        sequences: TokenSequences,
        lengths: Int64[np.ndarray, "num_pairs"],
        indices: Int64[np.ndarray, "batch"],
        *,
        start: int,
    ) -> Int64[np.ndarray, "batch length"]:
        """The sequences as rows of padding, each begun at column `start`."""
        width = int(lengths[indices].max())
        padded = np.full((len(indices), width), self._pad_id, dtype=np.int64)
        num_ids = lengths[indices] - 1
        ends = np.cumsum(num_ids)
        # The ids of all rows, end to end, as a mask over the rows takes them.
        flat = np.arange(ends[-1]) + np.repeat(sequences.offsets[indices] - (ends - num_ids), num_ids)
        padded[:, start : start + width - 1][np.arange(width - 1) < num_ids[:, None]] = sequences.ids[flat]
        return padded


# The longer side counts first, since it uses up the budget; among pairs alike in it, the difference of the
# sides, upwards and downwards by turns.
def _places(
    src_lengths: Int64[np.ndarray, "num_pairs"], tgt_lengths: Int64[np.ndarray, "num_pairs"]
) -> Int64[np.ndarray, "num_pairs"]:
    """A number for each pair of lengths; in order of it, neighbours are alike in both."""
    longer = np.maximum(src_lengths, tgt_lengths)
    difference = src_lengths - tgt_lengths
    spacing = 2 * int(longer.max(initial=0))  # a difference is less than half of it
    return np.asarray(longer * spacing + np.where(longer % 2, difference, -difference))
