"""What is given as a text: strings and token ids are taken, everything else is refused in one line."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.errors import UsageError
from triptych.running.text import as_lines, as_texts, encode_texts
from triptych.running.text.numbered import NumberedTokens
from triptych.running.text.pieces import bytes_of, piece_of


@pytest.mark.parametrize(
    ("given", "texts", "is_one"),
    [
        ("a", ["a"], True),
        ("", [""], True),
        (["a", "b"], ["a", "b"], False),
        ([1, 2], [[1, 2]], True),
        ((1, 2), [(1, 2)], True),
        ([[1, 2], "a", [3]], [[1, 2], "a", [3]], False),
        (torch.tensor([1, 2]), [[1, 2]], True),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]], False),
        (torch.tensor([1, 2], dtype=torch.uint8), [[1, 2]], True),
        ([torch.tensor(1), torch.tensor(2)], [[1, 2]], True),
        ([torch.tensor([1, 2]), "a"], [[1, 2], "a"], False),
        (np.array([1, 2]), [[1, 2]], True),
        (np.array([[1, 2], [3, 4]], dtype=np.uint16), [[1, 2], [3, 4]], False),
        (np.array([np.int64(1), 2], dtype=object), [[1, 2]], True),
        ([np.int64(1), np.int32(2)], [[1, 2]], True),
        ((np.uint8(1), 2), [[1, 2]], True),
        ([[np.int64(1)], [np.int64(2), 3]], [[1], [2, 3]], False),
        (array("H", [1, 2]), [[1, 2]], True),
        (iter([1, 2]), [[1, 2]], True),
        (np.array(["a", "b"]), ["a", "b"], False),
        (np.str_("a"), ["a"], True),
        (iter(["a"]), ["a"], False),
        ([], [], False),
    ],
)
def test_strings_and_token_ids_are_texts(given: Any, texts: list[Any], is_one: bool) -> None:
    found = as_texts(given)
    assert found == (texts, is_one)
    numbers = [one for text in found.texts if not isinstance(text, str) for one in text]
    assert {type(number) for number in numbers} <= {int}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "the text is None: give a string"),
        (5, "the text is the int 5: give a string"),
        (float("nan"), "the text is the float nan"),
        (True, "the text is the bool True"),
        (b"data", "the text is bytes: give a string, as data.decode"),
        (memoryview(b"data"), "the text is bytes: give a string, as data.decode"),
        (np.int64(5), "the text is the int 5: give a string"),
        ([np.bool_(True)], "text is the bool True"),
        ([np.float32(1)], "text is the float 1.0"),
        (Path("a.txt"), "the text is a path: give what is in the file"),
        ({"a": 1}, "the text is the dict"),
        ({"a"}, "the text is the set"),
        (["a", None], "text 2 is None"),
        (["a", b"b"], "text 2 is bytes"),
        ([["a"]], "the text is the list"),
        ([[1], ["a", 2]], "text 2 is the list"),
        ([1.5, 2], "text 1 is the float 1.5"),
        ([True, False], "text 1 is the bool True"),
        (torch.tensor([1.5]), "the text is the float 1.5"),
        ("a\ud800b", r"half of a surrogate pair \(character 2\)"),
        (["a", "\udfff"], "text 2 holds half of a surrogate pair"),
        (["x" * 10_000, [[1] * 10_000]], "text 2 is the list"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line_that_says_what_it_is(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        as_texts(given)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 160


def test_lines_are_strings_alone() -> None:
    assert as_lines("a") == ["a"]
    assert as_lines(("a", "")) == ["a", ""]
    with pytest.raises(UsageError, match="the source is the int 1"):
        as_lines([1], "source")


def test_without_a_tokenizer_token_ids_are_read_and_texts_say_why_not() -> None:
    tokens = NumberedTokens(10, UsageError("the module has no tokenizer"))
    assert encode_texts(tokens, [[1, 9]]) == [[1, 9]]
    assert tokens.pieces([1, 9]) == ["1", "9"]
    assert tokens.decode([[1, 9]]) == ["1 9"]
    for given, says in (
        ("a", "no tokenizer; token ids are read"),
        ([1, 10], "the token id 10: ids are from"),
    ):
        with pytest.raises(UsageError, match=says):
            encode_texts(tokens, [given])
    with pytest.raises(UsageError, match="from 0 to 9"):
        encode_texts(tokens, [[-1]])


CHARACTERS = ["😂", "é", "語", "e\u0301", "\u200d", "\U000e007f", "़", " ", "a"]


@pytest.mark.parametrize("text", ["".join(CHARACTERS), *CHARACTERS])
def test_each_part_of_a_character_has_a_name_of_its_own_that_gives_its_bytes(text: str) -> None:
    raw = text.encode()
    parts = {raw[start:stop] for start in range(len(raw)) for stop in range(start + 1, len(raw) + 1)}
    names = {piece_of(part): part for part in parts}
    assert len(names) == len(parts)
    assert all(bytes_of(name) == part for name, part in names.items())
    assert piece_of(raw) == text.replace(" ", "▁")
