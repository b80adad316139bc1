"""Layers and heads by number."""

import re
from collections.abc import Sequence

from triptych.errors import UsageError


def numbers(text: str | None, option: str) -> Sequence[int] | None:
    """`0,3` and `0-5` as numbers; None for None."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise UsageError(f"{option} {text}: write numbers from 0 like 0,3 or 0-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{option} {text}: {first} comes after {last}")
        found += range(first, last + 1)
    return sorted({*found})
