"""Words from tokens, and alignments that were planted."""

from typing import Any

import pytest
import torch

from triptych.attending.alignment import AlignmentCounts as Counts
from triptych.attending.alignment import align_words, anchors, on_diagonal, words_of

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
    weights = torch.zeros(1, len(GERMAN), len(ENGLISH))
    weights[0, 0, 0] = 1
    weights[0, 6, [3, 6, 7]] = torch.tensor([0.4, 0.3, 0.3])  # of "shi" and "rt" together more than of "a"
    found = align_words(weights, source, target)[0].tolist()
    assert (found[0], found[6]) == (0, 6)


def test_anchors_are_words_spelled_alike_once_on_both_sides() -> None:
    source, target = words(ENGLISH), words(GERMAN)
    assert anchors(source, target) == {2: 2, 4: 4, 6: 6}
    assert anchors(words(["▁in", "▁in"]), words(["▁in"])) == {}
    assert anchors(words(["."]), words(["."])) == {}


def test_the_diagonal_goes_from_the_first_word_to_the_last() -> None:
    assert on_diagonal(5, 3).tolist() == [0, 2, 4]
    assert on_diagonal(4, 1).tolist() == [0]


def test_a_head_that_aligns_rightly_has_all_anchors_and_one_of_word_order_those_on_the_diagonal() -> None:
    source, target = words(["▁x", "▁Anna", "▁sees", "▁Ben"]), words(["▁Ben", "▁sieht", "▁Anna", "▁y"])
    right, order = torch.tensor([3, 2, 1, 0]), on_diagonal(4, 4)
    counts = Counts()
    for _ in range(3):
        counts.add(source, target, {0: torch.stack([right, order])})
    found = counts.result(shifted=False)
    assert found.layers[0].anchors.tolist() == [1, 0]
    assert found.layers[0].order.tolist() == pytest.approx([2, 0])
    assert (found.by_order, found.even, found.num_anchors) == (0, 0.25, 6)
    assert found.best() == (0, 0)
