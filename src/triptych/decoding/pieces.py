"""Cutting a line that is longer than the model's limit, without losing any of it."""

import re
from collections.abc import Callable

# From the kindest place to cut to the last resort; what is cut off keeps its punctuation.
_BOUNDARIES = (re.compile(r"(?<=[.!?…。！？])\s+"), re.compile(r"(?<=[,;:–—])\s+"), re.compile(r"\s+"))


def split_line(line: str, fits: Callable[[str], bool]) -> list[str]:
    """Cut a line into pieces that fit: between sentences, else clauses, else words, else anywhere."""
    return _split(line, fits, 0)


def _split(text: str, fits: Callable[[str], bool], level: int) -> list[str]:
    if fits(text) or len(text) <= 1:
        return [text]
    if level == len(_BOUNDARIES):
        middle = len(text) // 2
        return _split(text[:middle], fits, level) + _split(text[middle:], fits, level)
    parts = [part for part in _BOUNDARIES[level].split(text) if part]
    joined: list[str] = []
    for part in parts:
        if joined and fits(f"{joined[-1]} {part}"):
            joined[-1] = f"{joined[-1]} {part}"
        else:
            joined.append(part)
    return [piece for part in joined for piece in _split(part, fits, level + 1)]
