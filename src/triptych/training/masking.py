"""Hiding tokens of a text, for a model that learns to say which they were.

Source: Devlin et al. 2018, arXiv 1810.04805, section 3.1; whole words: https://github.com/google-research/bert
"""

from dataclasses import replace
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Int64

from triptych.text.packing import NOT_COUNTED, LanguageBatch, PackedBatches
from triptych.training.recipe import MaskingConfig


@final
class MaskedBatches:
    """The batches of a packed text with some tokens hidden; those are the targets.

    Which tokens are hidden is a function of text, seed and epoch alone.

    Args:
        inner: the text.
        config: how much is hidden, and behind what.
        mask_id: the token that stands for a hidden one.
        never_ids: tokens that are never hidden and never put in a hidden one's place.
        vocabulary: every token, by id.
        seed: with the epoch, determines what is hidden.
    """

    def __init__(
        self,
        inner: PackedBatches,
        config: MaskingConfig,
        *,
        mask_id: int,
        never_ids: frozenset[int],
        vocabulary: tuple[str, ...],
        seed: int,
    ) -> None:
        self.inner, self.config, self.mask_id, self._seed = inner, config, mask_id, seed
        self._kept = np.zeros(len(vocabulary), dtype=bool)
        self._kept[list(never_ids)] = True
        self._others = np.flatnonzero(~self._kept)
        self._begins_word = word_beginnings(vocabulary) | self._kept if config.whole_words else None

    @property
    def num_target_tokens(self) -> int:
        """About as many as are hidden in a pass."""
        return max(round(self.inner.num_target_tokens * self.config.share), 1)

    def plan(self, epoch: int) -> list[Int64[np.ndarray, "batch"]]:
        """Each batch as the epoch, then what the text's own plan has."""
        return [np.concatenate([[epoch], indices]) for indices in self.inner.plan(epoch)]

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> LanguageBatch:
        """Make the tensors of one batch of a plan; at least one token of it is hidden."""
        batch, config = self.inner.collate(indices[1:]), self.config
        ids, real = batch.ids.numpy(), (batch.targets != NOT_COUNTED).numpy()
        # A place may be negative, which no seed may be.
        generator = np.random.default_rng([self._seed, int(indices[0]), int(indices[1]) % (1 << 63)])
        hidden = self._draw(ids, generator) & real & ~self._kept[ids]
        if not hidden.any():
            row, place = np.argwhere(real)[0]
            hidden[row, place] = True
        read, drawn = ids.copy(), generator.random(ids.shape)
        read[hidden & (drawn < config.masked)] = self.mask_id
        other = hidden & (drawn >= config.masked) & (drawn < config.masked + config.random)
        read[other] = generator.choice(self._others, size=int(other.sum()))
        return replace(
            batch,
            ids=torch.from_numpy(read),
            targets=torch.from_numpy(np.where(hidden, ids, NOT_COUNTED)),
            num_target_tokens=int(hidden.sum()),
        )

    def _draw(
        self, ids: Int64[np.ndarray, "rows length"], generator: np.random.Generator
    ) -> Bool[np.ndarray, "rows length"]:
        drawn = generator.random(ids.shape)
        if self._begins_word is not None:
            # Every token of a word takes the number drawn at the word's place in its row.
            words = np.cumsum(self._begins_word[ids], axis=1)
            drawn = np.take_along_axis(drawn, words - words[:, :1], axis=1)
        return drawn < self.config.share


def word_beginnings(vocabulary: tuple[str, ...]) -> Bool[np.ndarray, "vocab"]:
    """Which tokens begin a word: all but those that go on with a letter or a digit where no space was."""
    return np.array([not token[:1].isalnum() or token[:1] in "ĠĊ" for token in vocabulary])
