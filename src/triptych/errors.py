"""The errors a user can put right.

The command prints the message of a `TriptychError` as one line and exits with its code. Anything else is a
fault of ours: its traceback goes to a file (`cli/failures.py`).
"""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from triptych.printable import printable

# Characters of a line that a person will read; what a damaged file holds may be longer.
_LONGEST_LINE = 1500


class TriptychError(Exception):
    """Something the user can put right. The message says what was wrong, where, and what to do.

    Args:
        message: a very long line is cut in the middle; control characters become escapes.
    """

    exit_code = 1
    section = "errors-and-exit-codes"  # of docs/reference/errors.md

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(map(_shortened, printable(message, lines=True).split("\n"))))


class UsageError(TriptychError):
    """The request itself cannot be carried out: a bad option, recipe or file name."""

    exit_code = 2
    section = "a-request-cannot-be-carried-out"


class DataError(TriptychError):
    """The content of an input file is not what it should be."""

    section = "a-file-cannot-be-used"


class ElsewhereError(TriptychError):
    """Another process has failed, and says why; this one ends with the same exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ConfigurationWarning(UserWarning):
    """A field of a configuration or a layer of a file is left aside; `transformers` ignores it too."""


class EngineNote(UserWarning):
    """Which engine `engine="auto"` took and why, or that a precision is slow on the device."""


class SourceNote(UserWarning):
    """A note that bytes of a model were read without a comparison with a hash."""


class GenerationNote(UserWarning):
    """A note on the settings of a checkpoint's `generation_config.json` that a continuation follows."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one is nearest to, if one is near."""
    return next(iter(get_close_matches(word, list(known), n=1)), None)


def near_path(path: str | Path) -> str:
    """What a message says after a path that does not exist: the name in its folder that is nearest."""
    path, folder = Path(path), Path(path).parent
    try:
        if path.exists():
            return ""
        entries = sorted(folder.iterdir(), key=lambda entry: entry.suffix == path.suffix)
    except (OSError, ValueError):  # a folder that may not be read; no name of a file
        return ""
    # Names are compared without their endings, which many share.
    names = {entry.stem: entry for entry in entries}
    near = nearest(path.stem, names)
    return "" if near is None else f" (did you mean {names[near]}?)"


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE // 2]} … {line[-_LONGEST_LINE // 4 :]}"
