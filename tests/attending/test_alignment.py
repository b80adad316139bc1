"""Words from tokens, and alignments that were planted."""

from typing import Any

import pytest
import torch

from attending.tiny_readers import language_reader, pair_reader
from triptych import UsageError
from triptych.seeing.attending import attend
from triptych.seeing.attending.alignment import AlignedWords, all_words_of, word_weights, words_of

ENGLISH = ["▁A", "▁man", "▁in", "▁a", "▁T", "-", "shi", "rt", ".", "</s>"]
GERMAN = ["▁Ein", "▁Mann", "▁in", "▁einem", "▁T", "-", "Shirt", ".", "</s>"]


def words(pieces: list[str]) -> Any:
    return words_of(pieces, [piece == "</s>" for piece in pieces])


def test_words_begin_at_spaces_and_at_punctuation() -> None:
    found = words(ENGLISH)
    assert [word.text for word in found] == ["A", "man", "in", "a", "T", "-", "shirt", "."]
    assert [(word.start, word.stop) for word in found][-2:] == [(6, 8), (8, 9)]


def test_a_word_takes_the_source_word_with_most_weight_of_its_tokens() -> None:
    source, target = words(ENGLISH), words(GERMAN)
    weights = torch.zeros(len(GERMAN), len(ENGLISH))
    weights[0, 0] = 1
    weights[6, [3, 6, 7]] = torch.tensor([0.4, 0.3, 0.3])  # of "shi" and "rt" together more than of "a"
    found = AlignedWords(source, target, word_weights(weights, source, target)).links
    assert (found[0], found[6]) == (0, 6)


def test_a_line_break_ends_a_word_as_a_space_does() -> None:
    pieces = ["▁but", "\n", "\n", "And", "\tso", "▁it", "\r\n"]
    assert [word.text for word in words_of(pieces, [False] * 7)] == ["but", "And", "so", "it"]
    # White space belongs to the word after it.
    assert [word.start for word in all_words_of(pieces, [False] * 7)] == [0, 1, 4, 5, 6]


def test_the_words_of_a_translation_are_aligned_by_a_head() -> None:
    attention = attend(pair_reader(), "the cat sat", target="a dog ran")
    found = attention.align("cross.1", 2)
    assert {target for target, _ in found} <= {"a", "dog", "ran"}
    assert {source for _, source in found} <= {"the", "cat", "sat"}
    weights, pieces = attention["cross.1.2"], attention.of("cross").keys
    best = pieces[int(weights[0, :-1].argmax())].strip("▁")
    assert best in found[0][1]
    with pytest.raises(UsageError, match="is not cross-attention"):
        attend(language_reader(), "the cat sat").align(1, 2)
