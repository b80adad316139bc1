"""Masking of tokens for masked language models."""

import unicodedata
from typing import final

import numpy as np
from jaxtyping import Bool, Int64
from pydantic import BaseModel, ConfigDict, Field, model_validator

from triptych.errors import UsageError
from triptych.running.text.pieces import bytes_of
from triptych.running.text.sentencepiece import SPACE_MARK
from triptych.running.text.tokenizers import Tokenizer

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
class Masking:
    """Random masking of the tokens of a text, with at least one target."""

    def __init__(self, tokenizer: Tokenizer, spec: MaskingSpec) -> None:
        if tokenizer.mask_id is None:
            raise UsageError("the tokenizer has no mask token: a masked language model needs one that has")
        self._spec = spec
        self.share = spec.share
        self._mask_id = tokenizer.mask_id
        self.fill_id = tokenizer.mask_id if tokenizer.pad_id is None else tokenizer.pad_id  # padding id
        self._is_special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_special[list(tokenizer.special_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        self._joints = _joints(tokenizer) if spec.whole_words else None

    def hide(
        self, tokens: Int64[np.ndarray, "length"], generator: np.random.Generator
    ) -> tuple[Int64[np.ndarray, "length"], Bool[np.ndarray, "length"]]:
        """Return the model's input, and a mask over the tokens: True = target."""
        chosen = self._choose(tokens, generator)
        fate = generator.random(len(tokens))
        spec = self._spec
        others = generator.choice(self._ordinary, len(tokens))
        hidden = np.where(fate < spec.masked, self._mask_id, others)
        return np.where(chosen & (fate < spec.masked + spec.random), hidden, tokens), chosen

    def _choose(
        self, tokens: Int64[np.ndarray, "length"], generator: np.random.Generator
    ) -> Bool[np.ndarray, "length"]:
        """Choose the targets; True = target."""
        is_ordinary = ~self._is_special[tokens]
        if not is_ordinary.any():
            is_ordinary[:1] = True  # the loss is undefined without a target
        wanted = max(1, round(self.share * int(is_ordinary.sum())))
        joins = np.zeros(len(tokens), dtype=bool)
        if self._joints is not None:
            joins_left, joins_right = self._joints
            joins[1:] = joins_left[tokens[1:]] & joins_right[tokens[:-1]]
        word_of = np.cumsum(~joins) - 1
        sizes = np.bincount(word_of, weights=is_ordinary).astype(np.int64)
        order = generator.permutation(np.flatnonzero(sizes))
        # Add words in random order until the number of targets is reached.
        enough = np.cumsum(sizes[order]) - sizes[order]
        return np.asarray(np.isin(word_of, order[enough < wanted]) & is_ordinary)


def _joints(tokenizer: Tokenizer) -> tuple[Bool[np.ndarray, "vocab"], Bool[np.ndarray, "vocab"]]:
    """Return two masks over the vocabulary: tokens able to continue a word, tokens able to be continued."""
    # A word is a run of letters and digits, or a run marked by the vocabulary ("##").
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    special = tokenizer.special_ids
    ordinary = np.array([token not in special for token in range(len(pieces))])
    if any(piece.startswith(_CONTINUES) for piece in pieces):
        return np.array([piece.startswith(_CONTINUES) for piece in pieces]) & ordinary, ordinary
    if not any(SPACE_MARK in piece for piece in pieces):
        return np.zeros_like(ordinary), ordinary  # without spaces in the vocabulary, every token is a word
    texts = [bytes_of(piece).decode("utf-8", errors="replace") for piece in pieces]
    joins_left = np.array([text != "" and _is_of_word(text[0]) for text in texts])
    joins_right = np.array([text != "" and _is_of_word(text[-1]) for text in texts])
    return joins_left & ordinary, joins_right & ordinary


def _is_of_word(char: str) -> bool:
    # U+FFFD stands for an incomplete character, nearly always a letter.
    return char.isalnum() or char == "\ufffd" or unicodedata.category(char).startswith("M")
