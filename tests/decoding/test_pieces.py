"""Cutting long lines."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.running.text.sentences import cut_to_fit

LINES = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from(" .,;!?…。\n\t")), min_size=1, max_size=120
)


def at_most(limit: int) -> Callable[[str], bool]:
    return lambda text: len(text) <= limit


@given(line=LINES, limit=st.integers(4, 40))
def test_every_piece_fits_and_nothing_is_lost(line: str, limit: int) -> None:
    def fits(text: str) -> bool:
        return len(text.encode()) <= limit

    pieces = cut_to_fit(line, fits)
    assert all(fits(piece.strip()) for piece in pieces)
    assert "".join(pieces) == line


@given(line=LINES)
def test_a_line_that_fits_is_left_alone(line: str) -> None:
    assert cut_to_fit(line, at_most(120)) == [line]


@pytest.mark.parametrize(
    ("line", "limit", "expected"),
    [
        ("One two. Three four! Five six? Seven.", 14, ["One two.", "Three four!", "Five six?", "Seven."]),
        ("One. Two. Three four five six.", 20, ["One. Two.", "Three four five six."]),
        ("One two, three four; five six", 12, ["One two,", "three four;", "five six"]),
        ("one two three four", 9, ["one two", "three", "four"]),
        ("abcdefgh", 3, ["ab", "cd", "ef", "gh"]),
        ("Short. And a far longer sentence, with a clause.", 30,
         ["Short.", "And a far longer sentence,", "with a clause."]),
        ("Preis: 3.50 Euro. Gut.", 18, ["Preis: 3.50 Euro.", "Gut."]),
    ],
)  # fmt: skip
def test_a_line_is_cut_between_sentences_else_clauses_else_words_else_anywhere(
    line: str, limit: int, expected: list[str]
) -> None:
    assert [part.strip() for part in cut_to_fit(line, at_most(limit))] == expected


def test_neighbours_are_joined_as_long_as_they_fit() -> None:
    pieces = [part.strip() for part in cut_to_fit("A man. " * 30, at_most(30))]
    assert pieces == ["A man. A man. A man. A man."] * 7 + ["A man. A man."]
