"""Batches of sentence pairs of like length, cut to a budget of tokens."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from triptych.errors import UsageError
from triptych.text.encoded import EncodedCorpus, TokenSequences


@final
@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs as padded tensors for teacher forcing.

    Attributes:
        src: source ids, then `<eos>`.
        tgt_in: `<bos>`, then target ids: what the decoder reads.
        tgt_out: target ids, then `<eos>`: what it should say at each place.
        line_numbers: 1-based line of each pair where it was read.
        num_target_tokens: entries of `tgt_out` that are not padding.
    """

    src: Int[Tensor, "batch src_len"]
    tgt_in: Int[Tensor, "batch tgt_len"]
    tgt_out: Int[Tensor, "batch tgt_len"]
    line_numbers: tuple[int, ...]
    num_target_tokens: int


@final
class TokenBatches:
    """Deals a corpus out in batches whose padded size on each side stays within a budget.

    Each epoch sorts the pairs by length, cuts the sorted list into batches, and shuffles these; a pair meets
    other pairs of its length each time, and every pair comes exactly once.

    Args:
        corpus: the pairs; every one must fit the budget alone.
        max_tokens: most padded tokens per batch in `src`, and likewise in `tgt_in` and `tgt_out`; a sentence
            of n ids takes n + 1 of them, for its `<eos>` or `<bos>`.
        seed: with the epoch, determines the batches; 0 or more.
        pad_id: fills the rows up.
        bos_id: begins `tgt_in`.
        eos_id: ends `src` and `tgt_out`.
        shuffle: False gives the same batches in order of length, for evaluation.

    Raises:
        UsageError: a pair past the budget; the message gives its line and both numbers.
    """

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
        self._pad_id = pad_id
        self._bos_id = bos_id
        self._eos_id = eos_id
        self._shuffle = shuffle
        self._src_lengths = corpus.source.lengths + 1
        self._tgt_lengths = corpus.target.lengths + 1
        self._refuse_pairs_past_budget()

    def plan(self, epoch: int) -> list[Int64[np.ndarray, "batch"]]:
        """Which pairs make up each batch of an epoch: a function of corpus, budget, seed and epoch alone.

        Args:
            epoch: 0 or more.

        Returns:
            Indices into the corpus, one array per batch; together they hold every index once.
        """
        if not self._shuffle:
            return self._cut(np.lexsort((self._src_lengths, self._tgt_lengths)))
        generator = np.random.default_rng([self._seed, epoch])
        shuffled = generator.permutation(len(self._corpus))
        # lexsort is stable, so pairs of equal lengths stay in shuffled order.
        order = np.lexsort((self._src_lengths[shuffled], self._tgt_lengths[shuffled]))
        batches = self._cut(shuffled[order])
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

    def padding_waste(self, epoch: int) -> float:
        """Share of padding among the entries of `src` and `tgt_out` over an epoch, from 0 up to 1."""
        num_slots = sum(
            len(batch) * int(self._src_lengths[batch].max() + self._tgt_lengths[batch].max())
            for batch in self.plan(epoch)
        )
        return 1.0 - int(self._src_lengths.sum() + self._tgt_lengths.sum()) / num_slots

    def _refuse_pairs_past_budget(self) -> None:
        longest = np.maximum(self._src_lengths, self._tgt_lengths)
        past = np.flatnonzero(longest > self._max_tokens)
        if len(past):
            first = past[0]
            raise UsageError(
                f"{self._corpus.name}, line {self._corpus.line_numbers[first]}: a side of {longest[first]:,} "
                f"tokens, its <bos> or <eos> included, is past max_tokens = {self._max_tokens:,} per batch; "
                "raise training.batch_tokens, or lower data.max_sentence_tokens"
            )

    def _cut(self, order: Int64[np.ndarray, "num_pairs"]) -> list[Int64[np.ndarray, "batch"]]:
        """Cut the order into batches, each as large as the budget allows."""
        src_lengths = self._src_lengths[order].tolist()
        tgt_lengths = self._tgt_lengths[order].tolist()
        starts: list[int] = []
        start = widest = 0
        for end, (src_length, tgt_length) in enumerate(zip(src_lengths, tgt_lengths, strict=True)):
            widest = max(widest, src_length, tgt_length)
            if widest * (end - start + 1) > self._max_tokens:
                starts.append(end)
                start, widest = end, max(src_length, tgt_length)
        return np.split(order, starts)

    def _pad(
        self,
        sequences: TokenSequences,
        lengths: Int64[np.ndarray, "num_pairs"],
        indices: Int64[np.ndarray, "batch"],
        *,
        start: int,
    ) -> Int64[np.ndarray, "batch length"]:
        """The sequences as rows of padding, each begun at column `start`."""
        padded = np.full((len(indices), int(lengths[indices].max())), self._pad_id, dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            ids = sequences[index]
            padded[row, start : start + len(ids)] = ids
        return padded
