"""Word alignment of a translation with its source by the attention of a head."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.running.text import (
    bytes_of,
    first_character,
    is_inside_character,
    is_unspaced,
)

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BLANKS = f"{_SPACE} \t\n\v\f\r"


class Word(NamedTuple):
    """A word of a text, without the space before it, and the range of its tokens."""

    text: str
    start: int
    stop: int


def words_of(pieces: Sequence[str], special: Sequence[bool]) -> tuple[Word, ...]:
    """Group readable tokens into words; special tokens do not belong to words.

    A word begins at a token with an initial space ("▁") or line break. Punctuation forms separate words,
    and so does every token of a script without spaces between words.
    """
    found = list[Word]()
    fresh = True
    for place, (piece, is_special) in enumerate(zip(pieces, special, strict=True)):
        text = "".join(character for character in piece if character not in _BLANKS)
        if is_special or not text:
            fresh = True
            continue
        # A word ends at a special token or punctuation.
        mark = all(unicodedata.category(character)[0] == "P" for character in text)
        if (
            fresh
            or mark
            or piece[0] in _BLANKS
            or not found
            or not _goes_on(found[-1].text, text)
        ):
            found.append(Word(text, place, place + 1))
        else:
            found[-1] = Word(found[-1].text + text, found[-1].start, place + 1)
        fresh = mark
    # Tokens of partial characters are named by their bytes; a word contains the whole character.
    return tuple(
        word._replace(text=bytes_of(word.text).decode("utf-8", errors="replace"))
        for word in found
    )


def all_words_of(pieces: Sequence[str], special: Sequence[bool]) -> tuple[Word, ...]:
    """Group all readable tokens into words: a special token is a word, and spaces belong to the next word."""
    begun = {word.start: word for word in words_of(pieces, special)}
    found = list[Word]()
    # `start` is the first token after the last word.
    start = place = 0
    while place < len(pieces):
        word = begun.get(place)
        if word is None and special[place]:
            word = Word(pieces[place], place, place + 1)
        place = place + 1 if word is None else word.stop
        if word is not None:
            found.append(word._replace(start=start))
            start = place
    if start < place:  # spaces at the end
        found.append(Word(_SPACE, start, place))
    return tuple(found)


def _goes_on(before: str, text: str) -> bool:
    """Return True if a token without a space before it continues the word before it."""
    first = first_character(bytes_of(text))
    last = bytes_of(before).decode("utf-8", errors="replace")[-1:]
    return is_inside_character(first) or not (is_unspaced(first) or is_unspaced(last))


def word_weights(
    weights: Float[Tensor, "tgt_len src_len"],
    source: Sequence[Word],
    target: Sequence[Word],
) -> Float[Tensor, "targets sources"]:
    """Sum the weights of each source word's tokens and of each target word's tokens."""
    rows = _members(target, weights[:, :1].T)
    columns = _members(source, weights[:1])
    return rows @ weights @ columns.T


def mean_word_weights(
    weights: Float[Tensor, "queries keys"],
    keys: Sequence[Word],
    queries: Sequence[Word],
) -> Float[Tensor, "query_words key_words"]:
    """Sum weights over the tokens of each word of the keys; average them over the tokens of query words.

    If the words contain all tokens, rows sum to 1 as the rows of the tokens do.

    Source: Clark et al. 2019, arXiv 1906.04341, section 4.1.
    """
    sizes = weights.new_tensor([word.stop - word.start for word in queries])
    return word_weights(weights, keys, queries) / sizes[:, None]


def _members(
    words: Sequence[Word], like: Float[Tensor, "1 length"]
) -> Float[Tensor, "words length"]:
    """Mark the tokens of each word with 1, all other tokens with 0."""
    found = like.new_zeros(len(words), like.shape[1])
    for row, word in zip(found, words, strict=True):
        row[word.start : word.stop] = 1.0
    return found


def _moved(words: Sequence[Word], before: Sequence[Word]) -> list[Word]:
    """Move the tokens of words behind the tokens of the preceding words."""
    start = before[-1].stop if before else 0
    return [
        word._replace(start=start + word.start, stop=start + word.stop)
        for word in words
    ]


def _block_diagonal(parts: Sequence[Tensor]) -> Tensor:
    joined: Tensor = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
    return joined


class AlignedWords(NamedTuple):
    """The words of a source and of its translation, and the attention `[targets, sources]` between them."""

    source: tuple[Word, ...]
    target: tuple[Word, ...]
    weights: Float[Tensor, "targets sources"]

    @classmethod
    def join(cls, parts: Sequence["AlignedWords"]) -> "AlignedWords":
        """Join the alignments of parts of a text; words of different parts have weight 0."""
        if len(parts) == 1:
            return parts[0]
        source = list[Word]()
        target = list[Word]()
        for part in parts:
            source += _moved(part.source, source)
            target += _moved(part.target, target)
        return cls(
            tuple(source),
            tuple(target),
            _block_diagonal([part.weights for part in parts]),
        )

    @property
    def links(self) -> list[int]:
        """Source word with the largest weight for each target word; empty without source words."""
        return (
            [int(place) for place in self.weights.argmax(dim=1)] if self.source else []
        )
