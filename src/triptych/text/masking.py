"""Batches for masked language models, which predict tokens that were hidden."""

import unicodedata
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Int64
from pydantic import BaseModel, ConfigDict, Field, model_validator

from triptych.errors import UsageError
from triptych.text.packing import NOT_COUNTED, LanguageBatch, plan_rows, starts_of
from triptych.text.sentencepiece import SPACE_MARK
from triptych.text.shards import TokenShards
from triptych.text.tokenizers import Tokenizer

_CONTINUES = "##"


@final
class MaskingSpec(BaseModel):
    """Which tokens a masked language model has to predict, and what it sees in their place.

    Attributes:
        share: share of the tokens that are targets.
        masked: share of the targets that are replaced by the mask token.
        random: share of the targets that are replaced by a random token; the rest stay as they are.
        whole_words: choose whole words; all tokens of a word are targets, or none.

    Source: Devlin et al. 2019, arXiv 1810.04805.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(0.15, gt=0, lt=1)
    masked: float = Field(0.8, ge=0, le=1)
    random: float = Field(0.1, ge=0, le=1)
    whole_words: bool = False

    @model_validator(mode="after")
    def _shares_sum_to_at_most_one(self) -> "MaskingSpec":
        if self.masked + self.random > 1:
            raise ValueError(f"masked {self.masked} and random {self.random} are more than all")
        return self


@final
class MaskedBatches:
    """Cuts a corpus into rows of `context` tokens, of which some, at least one, are hidden: the targets."""

    def __init__(
        self,
        shards: TokenShards,
        tokenizer: Tokenizer,
        masking: MaskingSpec,
        *,
        context: int,
        batch_size: int,
        seed: int,
        within_documents: bool = False,
        shuffle: bool = True,
    ) -> None:
        if tokenizer.mask_id is None:
            raise UsageError("the tokenizer has no mask token: a masked language model needs one that has")
        if shards.num_tokens < 1:
            raise UsageError(f"the corpus in {shards.folder} is empty; give more text")
        self._shards, self._context, self._batch_size = shards, context, batch_size
        self._seed, self._shuffle, self._within_documents = seed, shuffle, within_documents
        self._masking = masking
        self._mask_id = tokenizer.mask_id
        self._fill_id = tokenizer.mask_id if tokenizer.pad_id is None else tokenizer.pad_id
        self._is_special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_special[list(tokenizer.special_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        self._joints = _joints(tokenizer) if masking.whole_words else None
        # An index is the number of the epoch and of the place, as one.
        self._stride = shards.num_tokens + context

    def plan(self, epoch: int) -> list[Int64[np.ndarray, "batch"]]:
        """What `collate` makes each batch of an epoch of, one array per batch."""
        seed = [self._seed, epoch] if self._shuffle else None
        rows = plan_rows(self._shards.num_tokens, self._context, self._batch_size, seed)
        return [places + self._context + epoch * self._stride for places in rows]

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> LanguageBatch:
        """Make the tensors of one batch of a plan."""
        shape = (len(indices), self._context)
        ids = np.full(shape, self._fill_id, dtype=np.int64)
        targets = np.full(shape, NOT_COUNTED, dtype=np.int64)
        starts = np.zeros(shape, dtype=np.int64)
        any_short = False
        for row, index in enumerate(indices.tolist()):
            epoch, shifted = divmod(index, self._stride)
            place = shifted - self._context
            begin, end = max(place, 0), min(place + self._context, self._shards.num_tokens)
            tokens, length = self._shards.tokens(begin, end).astype(np.int64), end - begin
            generator = np.random.default_rng([self._seed, epoch, shifted])
            chosen = self._choose(tokens, generator)
            ids[row, :length] = self._hide(tokens, chosen, generator)
            targets[row, :length][chosen] = tokens[chosen]
            inside = np.zeros(0, dtype=np.int64)
            if self._within_documents:
                inside = self._shards.starts_within(begin + 1, end) - begin if end > begin + 1 else inside
            starts[row] = starts_of(inside, length, self._context)
            any_short |= length < self._context
        return LanguageBatch(
            ids=torch.from_numpy(ids),
            targets=torch.from_numpy(targets),
            # Nothing may attend to what fills a row up.
            starts=torch.from_numpy(starts) if self._within_documents or any_short else None,
            num_target_tokens=int((targets != NOT_COUNTED).sum()),
        )

    @property
    def num_target_tokens(self) -> int:
        """About how many tokens of one pass are learned from."""
        return max(1, round(self._masking.share * self._shards.num_tokens))

    def _choose(
        self, tokens: Int64[np.ndarray, "length"], generator: np.random.Generator
    ) -> Bool[np.ndarray, "length"]:
        """Which tokens are targets."""
        is_ordinary = ~self._is_special[tokens]
        if not is_ordinary.any():
            is_ordinary[:1] = True  # a batch without a target has no loss
        wanted = max(1, round(self._masking.share * int(is_ordinary.sum())))
        joins = np.zeros(len(tokens), dtype=bool)
        if self._joints is not None:
            joins_left, joins_right = self._joints
            joins[1:] = joins_left[tokens[1:]] & joins_right[tokens[:-1]]
        word_of = np.cumsum(~joins) - 1
        sizes = np.bincount(word_of, weights=is_ordinary).astype(np.int64)
        order = generator.permutation(np.flatnonzero(sizes))
        # Words are taken until there are enough tokens.
        enough = np.cumsum(sizes[order]) - sizes[order]
        return np.asarray(np.isin(word_of, order[enough < wanted]) & is_ordinary)

    def _hide(
        self,
        tokens: Int64[np.ndarray, "length"],
        chosen: Bool[np.ndarray, "length"],
        generator: np.random.Generator,
    ) -> Int64[np.ndarray, "length"]:
        fate, masking = generator.random(len(tokens)), self._masking
        others = generator.choice(self._ordinary, len(tokens))
        hidden = np.where(fate < masking.masked, self._mask_id, others)
        return np.where(chosen & (fate < masking.masked + masking.random), hidden, tokens)


def _joints(tokenizer: Tokenizer) -> tuple[Bool[np.ndarray, "vocab"], Bool[np.ndarray, "vocab"]]:
    """For each token, whether it can continue the word of the token before it, and be continued itself."""
    # A word is a run of letters and digits, or what the vocabulary marks as one ("##").
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    special = tokenizer.special_ids
    ordinary = np.array([token not in special for token in range(len(pieces))])
    if any(piece.startswith(_CONTINUES) for piece in pieces):
        return np.array([piece.startswith(_CONTINUES) for piece in pieces]) & ordinary, ordinary
    if not any(SPACE_MARK in piece for piece in pieces):
        return np.zeros_like(ordinary), ordinary  # no token has a space: each is a word
    joins_left = np.array([piece != "" and _is_of_word(piece[0]) for piece in pieces])
    joins_right = np.array([piece != "" and _is_of_word(piece[-1]) for piece in pieces])
    return joins_left & ordinary, joins_right & ordinary


def _is_of_word(char: str) -> bool:
    # U+FFFD stands for a part of a character, which nearly always is a letter.
    return char.isalnum() or char == "\ufffd" or unicodedata.category(char).startswith("M")
