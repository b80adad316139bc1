"""Safe display of text from files, folders and models."""

import re
from collections.abc import Mapping, Sequence, Sized
from html import escape
from textwrap import wrap
from typing import Any

# Control characters, line separators, marks of text direction, and code points that UTF-8 or XML cannot
# encode. All of them are below U+10000.
_OBEYED = "\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
_ALL = re.compile(f"[{_OBEYED}]")
_BUT_LINES = re.compile(f"(?![\n\t])[{_OBEYED}]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
# Limits of a repr: number of lines, characters of a line, characters of a value.
_LINES = 8
_WIDTH = 110
_LONGEST = 48


def printable(text: str, *, lines: bool = False) -> str:
    r"""Replace control characters of a text by JSON escapes, such as `\u001b`.

    JSON text keeps its meaning, and printable text is unchanged. With `lines`, line breaks and tabs stay.
    """
    kept = _BUT_LINES if lines else _ALL
    return kept.sub(lambda found: _SHORT.get(found[0], f"\\u{ord(found[0]):04x}"), text)


def shortened(text: str, most: int) -> str:
    """Escape control characters of a text and shorten it to at most `most` characters."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown_fields(name: str, values: Mapping[str, Any]) -> str:
    """Format a record in at most 8 lines, with shapes for tensors and without None fields."""
    words = [
        name,
        *(
            f"{field} {_shown(value)}"
            for field, value in values.items()
            if value is not None
        ),
    ]
    lines = wrap(
        "  ".join(words), _WIDTH, subsequent_indent="  ", break_long_words=False
    )
    return "\n".join(lines if len(lines) <= _LINES else [*lines[: _LINES - 1], "  …"])


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return str(list(shape))
    if isinstance(value, str):
        return shortened(value, _LONGEST)
    if isinstance(value, Sized) and not isinstance(value, str):
        own = repr(value) if len(value) <= _LONGEST else ""
        simple = 0 < len(own) <= _LONGEST and "\n" not in own
        return own if simple else f"{type(value).__name__} of {len(value)}"
    own = repr(value)
    return own if len(own) <= _LONGEST and "\n" not in own else type(value).__name__


def table_html(
    title: str, rows: Sequence[Sequence[str]], columns: Sequence[str] = ()
) -> str:
    """Format a small HTML table with a caption, for a notebook; the first cell of a row is its heading."""
    head = (
        f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in columns)}</tr>"
        if columns
        else ""
    )
    body = "".join(
        f"<tr><th scope='row'>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    return f"<table><caption>{escape(title)}</caption>{head}{body}</table>"
