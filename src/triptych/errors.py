"""Errors that a user can correct.

The command prints the message of a `TriptychError` in one line and exits with its code. Any other exception
is a bug of triptych, and its traceback is written to a file (`cli/failures.py`).
"""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from triptych.printable import printable

# Maximum length of a line of a message; content of damaged files may be longer.
_LONGEST_LINE = 1500


class TriptychError(Exception):
    """Base class of errors that a user can correct. The message names the fault, its location and a remedy.

    Args:
        message: message; a very long line is cut in the middle, and control characters are escaped.
    """

    exit_code = 1
    code = "error"  # stable code, with a section in `explained.md`

    def __init__(self, message: str) -> None:
        super().__init__(
            "\n".join(map(_shortened, printable(message, lines=True).split("\n")))
        )


class UsageError(TriptychError):
    """A request that cannot be carried out: a bad option, recipe or file name."""

    exit_code = 2
    code = "request"


class DataError(TriptychError):
    """An input file with missing, damaged or unsupported content."""

    code = "file"


class ElsewhereError(TriptychError):
    """A failure of another process; this process ends with the same exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ConfigurationWarning(UserWarning):
    """A warning that a configuration field or a layer of a file is ignored, as in `transformers`."""


class EngineNote(UserWarning):
    """A note on the choice of `engine="auto"` and its reason, or on a precision slow on the device."""


class SourceNote(UserWarning):
    """A note about reading bytes of a model without a hash check."""


class GenerationNote(UserWarning):
    """A note on the settings of `generation_config.json` that generation follows."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to a mistyped word, or None if no word is similar."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def near_path(path: str | Path) -> str:
    """Return a hint for the path of a missing file: the most similar name in its folder, or ""."""
    path, folder = Path(path), Path(path).parent
    try:
        if path.exists():
            return ""
        entries = sorted(
            folder.iterdir(), key=lambda entry: entry.suffix == path.suffix
        )
    except (OSError, ValueError):  # an unreadable folder; an invalid file name
        return ""
    # Names are compared without suffixes, since many files have the same suffix.
    names = {entry.stem: entry for entry in entries}
    near = nearest(path.stem, names)
    return "" if near is None else f" (did you mean {names[near]}?)"


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE // 2]} … {line[-_LONGEST_LINE // 4 :]}"
