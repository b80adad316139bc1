"""Helpers of several commands for their options."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.cli.failures import say
from triptych.cli.signatures import Options
from triptych.cli.verbs import spelled
from triptych.errors import UsageError
from triptych.launch import num_on_machine
from triptych.literals import SpecialTokens
from triptych.model import Model, load
from triptych.printable import shortened
from triptych.threads import num_cores


def load_model(
    model: str | Path, without: str | None = None, opening: Options | None = None
) -> Model:
    """The model that a command is given, with the heads of `--without` off."""
    opened = load(model, **(opening or {}))
    return opened if without is None else opened.ablate(without)


def special_tokens_of(literal: bool) -> SpecialTokens:
    """Return how special tokens in a text are read, with `--literal` or without."""
    return "text" if literal else "tokens"


def token_ids(ids: str | None) -> list[int] | None:
    """Parse the token ids of `--ids 1,2,3`; None stays None."""
    if ids is None:
        return None
    parts = [part.strip() for part in ids.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 12 for part in parts):
        raise UsageError(
            f"--ids {shortened(ids, 40)}: write token ids with commas, as in 464,3797,3332"
        )
    return [*map(int, parts)]


def refuse_options(options: Mapping[str, Any], why: str) -> None:
    """Raise if any of these options is given."""
    if found := [
        name for name, value in options.items() if value not in (None, False, ())
    ]:
        raise UsageError(f"{spelled(found[0])[0]} {why}")


def translating_engine(opening: Options, own: Mapping[str, Any]) -> Options:
    """Options for opening a translator, with "auto" where no engine is given.

    `own` are options that need triptych's engine, by name.
    """
    if opening["engine"] is not None or opening.get("dtype") is not None:
        return opening
    if needs := [name for name, value in own.items() if value]:
        say(
            f"triptych: engine auto: triptych translates: {spelled(needs[0])[0]} needs its own search"
        )
        return opening | {"engine": "triptych"}
    return opening | {"engine": "auto"}


def check_attention(
    heads: Sequence[str], page: Path | None, engine: str | None, *, as_json: bool
) -> None:
    """Require this library's engine and JSON output for attention weights."""
    if (heads or page) and engine not in (None, "triptych"):
        raise UsageError(
            f"--attention goes with --engine triptych: {engine} gives no attention weights"
        )
    if heads and not as_json:
        raise UsageError("--attention goes with --json")


def number_of_workers(given: int | None) -> int:
    """Return the given number of workers, or by default this rank's share of the cores."""
    return max(num_cores() // num_on_machine(), 1) if given is None else given


def numbers(text: str | None, option: str) -> Sequence[int] | None:
    """Parse `0,3` and `0-5` as integers; return None for None."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise UsageError(f"{option} {text}: write numbers from 0 like 0,3 or 0-5")
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{option} {text}: {first} comes after {last}")
        found += range(first, last + 1)
    return sorted({*found})


def plain(value: Any) -> Any:
    """Convert a value for JSON: infinity and NaN become text."""
    match value:
        case dict():
            return {name: plain(own) for name, own in value.items()}
        case list() | tuple():
            return [plain(own) for own in value]
        case float() if not math.isfinite(value):
            return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    return value
