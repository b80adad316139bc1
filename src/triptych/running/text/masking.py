"""Masking of tokens for masked language models."""

import unicodedata
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Bool, Int64
from pydantic import BaseModel, ConfigDict, Field, model_validator

from triptych.errors import UsageError
from triptych.running.text.pieces import bytes_of
from triptych.running.text.scripts import (
    INCOMPLETE,
    begins_inside,
    first_character,
    is_inside_character,
    is_unspaced,
)
from triptych.running.text.sentencepiece import SPACE_MARK
from triptych.running.text.tokenizers import Tokenizer

_CONTINUES = "##"
_LEAST_LEAD = 0xC0  # least first byte of a character of several bytes


@final
class MaskingSpec(BaseModel):
    """Which tokens a masked language model has to predict, and what it sees in their place.

    Attributes:
        share: share of the tokens that are targets.
        masked: share of the targets that are replaced by the mask token.
        random: share of the targets that are replaced by a random token; the rest stay as they are.
        whole_words: choose whole words; all tokens of a word are targets, or none. In scripts without spaces
            between words, a word is a token, or all tokens of a character with its marks.

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
            raise ValueError(
                f"masked {self.masked} and random {self.random} are more than all"
            )
        return self


@final
class Masking:
    """Random masking of the tokens of a text, with at least one target."""

    def __init__(self, tokenizer: Tokenizer, spec: MaskingSpec) -> None:
        if tokenizer.mask_id is None:
            raise UsageError(
                "the tokenizer has no mask token: a masked language model needs one that has"
            )
        self._spec = spec
        self.share = spec.share
        self._mask_id = tokenizer.mask_id
        self.fill_id = (
            tokenizer.mask_id if tokenizer.pad_id is None else tokenizer.pad_id
        )  # padding id
        self._is_special = np.zeros(tokenizer.vocab_size, dtype=bool)
        self._is_special[list(tokenizer.special_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        self._joints = _Joints.of(tokenizer) if spec.whole_words else None

    def hide(
        self, tokens: Int64[np.ndarray, "length"], generator: np.random.Generator
    ) -> tuple[Int64[np.ndarray, "length"], Bool[np.ndarray, "length"]]:
        """Return the model's input, and a mask over the tokens: True = target."""
        chosen = self._choose(tokens, generator)
        fate = generator.random(len(tokens))
        spec = self._spec
        others = generator.choice(self._ordinary, len(tokens))
        hidden = np.where(fate < spec.masked, self._mask_id, others)
        return np.where(
            chosen & (fate < spec.masked + spec.random), hidden, tokens
        ), chosen

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
            joins[1:] = self._joints.between(tokens)
        word_of = np.cumsum(~joins) - 1
        sizes = np.bincount(word_of, weights=is_ordinary).astype(np.int64)
        order = generator.permutation(np.flatnonzero(sizes))
        # Add words in random order until the number of targets is nearest to `wanted`.
        middles = np.cumsum(sizes[order]) - sizes[order] / 2
        middles[0] = 0
        return np.asarray(np.isin(word_of, order[middles < wanted]) & is_ordinary)


class _Joints(NamedTuple):
    """Masks over the vocabulary: rules for joining tokens to words."""

    is_ordinary: Bool[np.ndarray, "vocab"]  # not special
    goes_on: Bool[np.ndarray, "vocab"]  # begins inside a character (mark or later byte)
    # begins inside a character, and contains the start of another: its word ends with it, since such tokens
    # may follow each other for a whole text
    spans: Bool[np.ndarray, "vocab"]
    begins: Bool[np.ndarray, "vocab"]  # begins with a letter of a word
    ends: Bool[np.ndarray, "vocab"]  # ends with a letter of a word

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_Joints":
        pieces = tokenizer.pieces(range(tokenizer.vocab_size))
        is_ordinary = np.array(
            [token not in tokenizer.special_ids for token in range(len(pieces))]
        )
        are_marked = any(piece.startswith(_CONTINUES) for piece in pieces)
        texts = [
            bytes_of(piece.removeprefix(_CONTINUES) if are_marked else piece)
            for piece in pieces
        ]
        firsts = [*map(first_character, texts)]
        lasts = [raw.decode("utf-8", errors="replace")[-1:] for raw in texts]
        if are_marked:
            begins = [
                piece.startswith(_CONTINUES) and not is_unspaced(first)
                for piece, first in zip(pieces, firsts, strict=True)
            ]
            ends = [not is_unspaced(last) for last in lasts]
        else:
            # Without spaces in the vocabulary, every token is a word.
            has_words = any(SPACE_MARK in piece for piece in pieces)
            begins = [has_words and _is_of_word(first) for first in firsts]
            ends = [*map(_is_of_word, lasts)]
        goes_on = np.array([*map(is_inside_character, firsts)]) & is_ordinary
        spans = np.array(
            [begins_inside(raw) and max(raw) >= _LEAST_LEAD for raw in texts]
        )
        is_first = np.array(begins) & is_ordinary & ~goes_on
        return cls(is_ordinary, goes_on, spans, is_first, np.array(ends) & is_ordinary)

    def between(self, tokens: Int64[np.ndarray, "length"]) -> Bool[np.ndarray, "gaps"]:
        """Return True for each pair of neighbours in the same word."""
        before = tokens[:-1]
        after = tokens[1:]
        in_character = (
            self.goes_on[after] & self.is_ordinary[before] & ~self.spans[before]
        )
        return np.asarray(in_character | (self.begins[after] & self.ends[before]))


def _is_of_word(character: str) -> bool:
    """Return True for a letter or digit of a script with spaces between words."""
    if character == "" or is_unspaced(character):
        return False
    # An incomplete character is nearly always a letter.
    is_letter = character.isalnum() or unicodedata.category(character).startswith("M")
    return is_letter or character == INCOMPLETE
