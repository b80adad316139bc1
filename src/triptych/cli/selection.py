"""Layers and heads by number."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from triptych.attending import Attention, Part
from triptych.errors import UsageError


class HeadSelection(NamedTuple):
    """Heads whose attention is printed: None stands for every layer, or every head."""

    kind: str
    layer: int | None
    head: int | None

    def of(self, attention: Attention) -> list[Part]:
        """The heads, layer by layer."""
        return attention.parts(
            [self.kind],
            None if self.layer is None else [self.layer],
            None if self.head is None else [self.head],
        )


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


def parse_index(text: str, count: int, name: str, whole: str) -> int | None:
    """A number below `count`, or None for "all"; `whole` is the value of --attention that it is part of."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) >= count:
        raise UsageError(
            f"--attention {whole}: {name} {text!r} is not 'all' or a number from 0 to {count - 1}"
        )
    return int(text)
