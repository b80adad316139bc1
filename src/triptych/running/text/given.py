"""Texts given by users: strings, token ids or pairs. Other values are refused with a one-line message."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triptych.errors import UsageError
from triptych.printable import shortened
from triptych.running.text.lines import SURROGATE


class TextPair(NamedTuple):
    """A pair of texts in one input of a model, such as a premise and a hypothesis."""

    first: str
    second: str


# A text: a string, its token ids, or a pair of strings.
Text = str | Sequence[int] | TextPair
# A text as given by a user: a tuple of two strings is a pair.
GivenText = Text | tuple[str, str]

_MOST_SHOWN = 40
_BYTES = bytes | bytearray | memoryview


class GivenTexts(NamedTuple):
    """Given texts as a list."""

    texts: list[Text]
    is_one: bool  # True = a single text was given rather than a list


def as_texts(given: Any, what: str = "text") -> GivenTexts:
    """Convert one text or several texts to a list: strings, pairs, or token ids in a list, tensor or array.

    A tuple of two strings is a pair; a list of two strings are two texts.

    Raises UsageError if the value is not a text; the message names its type.
    """
    given = _plain(given)
    if isinstance(given, str) or _are_two(given) or _are_ids(given):
        return GivenTexts([_one(given, f"the {what}", may_be_ids=True)], is_one=True)
    items = [_plain(one) for one in _items(given, what)]
    found = [
        _one(one, which_of(what, number, items), may_be_ids=True)
        for number, one in enumerate(items, start=1)
    ]
    return GivenTexts(found, is_one=False)


def as_ids(given: Any) -> Sequence[int]:
    """Return the token ids of one text in a list, tensor or array, also in a batch of one text.

    Raises UsageError for other values.
    """
    found = _plain(given)
    is_list = isinstance(found, Sequence) and not isinstance(found, str | _BYTES)
    if is_list and len(found) == 1 and not _are_ids(found):
        (found,) = found
    if _are_ids(found) or (is_list and not found):
        return [*found]
    raise UsageError("decode takes the token ids of one text, such as run.ids")


def as_lines(given: Any, what: str = "text") -> list[str]:
    """Convert one string or several strings to a list.

    Raises UsageError if the value is not a string; the message names its type.
    """
    if isinstance(given, str):
        return [str(_one(given, f"the {what}"))]
    items = [*_items(_plain(given), what)]
    return [
        str(_one(one, which_of(what, number, items)))
        for number, one in enumerate(items, start=1)
    ]


def require_one(text: Text, which: str) -> str | Sequence[int]:
    """Return a text unchanged; refuse a pair."""
    if isinstance(text, TextPair):
        raise UsageError(
            f"{which} is a pair of texts, and one is read here: give a string, or a list for several texts"
        )
    return text


def refuse_file_name(text: Any, *, or_path: bool = False) -> Any:
    """Return a text unchanged; refuse the name of a file."""
    if isinstance(text, str) and os.path.isfile(text):  # noqa: PTH113 - Path raises where a name is too long
        instead = f'Path("{text}")' if or_path else "what is in it"
        raise UsageError(
            f'"{text}" is a file, and a string is the text itself: give {instead}'
        )
    return text


def require_ids(ids: Sequence[int], vocab_size: int, which: str) -> None:
    """Check that token ids are within the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"{which} has the token id {token}: ids are from 0 to {vocab_size - 1:,}"
            )


def _plain(given: Any) -> Any:
    """Convert tensors, arrays and table columns to lists of Python values, also within a list.

    All other values are returned unchanged.
    """
    if isinstance(given, str | _BYTES):
        return given
    found = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(found, Iterator):
        found = list(found)
    if isinstance(found, Sequence) and any(hasattr(one, "tolist") for one in found):
        return [one.tolist() if hasattr(one, "tolist") else one for one in found]
    return found


def _are_ids(given: Any) -> bool:
    """Return True for a sequence of at least one integer."""
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str | _BYTES)
        and len(given) > 0
        and all(isinstance(one, int) and not isinstance(one, bool) for one in given)
    )


def _are_two(given: Any) -> bool:
    """Return True for a tuple of two strings."""
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and all(isinstance(one, str) for one in given)
    )


def _items(given: Any, what: str) -> Iterable[Any]:
    no_list = isinstance(given, _BYTES | Mapping | set | frozenset | Path)
    if no_list or not isinstance(given, Iterable):
        raise _refusal(given, f"the {what}")
    return given


def which_of(what: str, number: int, items: Sequence[Any]) -> str:
    """Name a text in a message."""
    return f"{what} {number}" if len(items) > 1 else f"the {what}"


def _one(given: Any, which: str, *, may_be_ids: bool = False) -> Text:
    if may_be_ids and _are_two(given):
        for name, part in zip(("first", "second"), given, strict=True):
            _one(part, f"{which} ({name} of the pair)")
        return TextPair(*given)
    if isinstance(given, str):
        # Lone surrogates are the only characters of Python strings without a UTF-8 encoding.
        if not given.isascii() and (half := SURROGATE.search(given)):
            raise UsageError(
                f"{which} holds half of a surrogate pair (character {half.start() + 1:,}), which is no "
                "character: give UTF-8 text"
            )
        return given
    if may_be_ids and _are_ids(given):
        ids: Sequence[int] = given
        return ids
    raise _refusal(given, which)


def _refusal(given: Any, which: str) -> UsageError:
    match given:
        case bytes() | bytearray() | memoryview():
            return UsageError(
                f'{which} is bytes: give a string, as data.decode("utf-8")'
            )
        case Path():
            return UsageError(
                f"{which} is a path: give what is in the file, as path.read_text()"
            )
        case list() | tuple():
            shown = shortened(repr(given), _MOST_SHOWN)
            return UsageError(f"{which} is the list {shown}: give a string")
    name = type(given).__name__
    shown = (
        "None" if given is None else f"the {name} {shortened(repr(given), _MOST_SHOWN)}"
    )
    return UsageError(f"{which} is {shown}: give a string")
