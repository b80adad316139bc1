"""Words of a translation aligned with words of its source by the attention of a head."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Word(NamedTuple):
    """A word of a text, without the space before it: its first token, and one past its last."""

    text: str
    start: int
    stop: int


def words_of(pieces: Sequence[str], special: Sequence[bool]) -> tuple[Word, ...]:
    """The words of a text from its readable tokens; special tokens belong to none.

    A word begins at a token that begins with a space ("▁"), and at punctuation, which is a word of its own.
    """
    found = list[Word]()
    fresh = True
    for place, (piece, is_special) in enumerate(zip(pieces, special, strict=True)):
        text = piece.replace(_SPACE, "")
        if is_special or not text:
            fresh = True
            continue
        mark = all(unicodedata.category(character)[0] == "P" for character in text)
        if fresh or mark or piece.startswith(_SPACE) or not found:
            found.append(Word(text, place, place + 1))
        else:
            found[-1] = Word(found[-1].text + text, found[-1].start, place + 1)
        fresh = mark
    return tuple(found)


def align_words(
    weights: Float[Tensor, "tgt_len src_len"], source: Sequence[Word], target: Sequence[Word]
) -> list[int]:
    """The source word of each target word: the one with most of the weight of its tokens."""
    by_source = torch.stack([weights[:, word.start : word.stop].sum(dim=-1) for word in source], dim=-1)
    return [int(by_source[word.start : word.stop].sum(dim=0).argmax()) for word in target]
