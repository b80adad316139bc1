"""Sequences of token ids as one compact array."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import numpy as np
from jaxtyping import Bool, Int32, Int64


@final
@dataclass(frozen=True, eq=False)
class TokenSequences:
    """Sequences of token ids, end to end in one array."""

    ids: Int32[np.ndarray, "num_tokens"]  # all tokens, `[num_tokens]`
    # `[num_sequences + 1]`; sequence i is `ids[offsets[i]:offsets[i + 1]]`.
    offsets: Int64[np.ndarray, "num_sequences_plus_1"]

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int]]) -> "TokenSequences":
        """Copy lists of ids into one array."""
        lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        ids = np.fromiter(
            chain.from_iterable(sequences), dtype=np.int32, count=int(lengths.sum())
        )
        return cls(ids, offsets_of(lengths))

    @property
    def lengths(self) -> Int64[np.ndarray, "num_sequences"]:
        """Number of tokens in each sequence."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Int32[np.ndarray, "length"]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def where(self, keep: Bool[np.ndarray, "num_sequences"]) -> "TokenSequences":
        """Return the sequences with a true entry in `keep`."""
        lengths = self.lengths
        return TokenSequences(
            self.ids[np.repeat(keep, lengths)], offsets_of(lengths[keep])
        )


def offsets_of(
    lengths: Int64[np.ndarray, "num_sequences"],
) -> Int64[np.ndarray, "num_sequences_plus_1"]:
    """Return the start of each sequence in the array, and the end of the last sequence."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
