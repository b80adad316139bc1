"""Messages for errors and warnings, in one line."""

import errno
import os
import platform
import select
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

from triptych.errors import (
    ConfigurationWarning,
    EngineNote,
    GenerationNote,
    SourceNote,
    TriptychError,
)
from triptych.files import FULL, system_error
from triptych.printable import printable

_WAYS_ON = {
    **dict.fromkeys(
        FULL,
        "free some space, or choose another place; what was there before is unchanged",
    ),
    errno.EFBIG: "files may not be larger here (ulimit -f): raise the limit, or choose another place",
    errno.EEXIST: "choose another name",
}
_SHOWN = (ConfigurationWarning, EngineNote, SourceNote, GenerationNote)
# Words of an allocator, whose exception is a RuntimeError like any other.
_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class UnforeseenError(TriptychError):
    """A fault of triptych itself."""

    exit_code = 70  # EX_SOFTWARE of sysexits.h
    code = "fault"


def flush_output() -> None:
    """Write what is buffered for standard output; a pipe without a reader, as after `| head`, is no error."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python tries again when it ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def is_output_unread() -> bool:
    """Return True if standard output is a pipe without a reader, as after `| head` has ended."""
    if sys.stdout is None or not hasattr(select, "poll"):
        return False
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # not a file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def as_triptych_error(error: BaseException) -> TriptychError:
    """Return the `TriptychError` that the command reports for another error."""
    if (of_system := system_error(error)) is not None:
        return _of_system(of_system)
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if isinstance(error, MemoryError) or any(words in str(error) for words in _MEMORY):
        return TriptychError(
            f"not enough memory ({text}): give shorter texts, or fewer at a time"
        )
    return UnforeseenError(
        f"internal error ({text}): please report it, with {_write_error_report(error)}"
    )


def _of_system(error: OSError) -> TriptychError:
    # Whatever writes a file names it (files.py).
    where = error.filename or ("standard output" if error.errno in FULL else None)
    parts = where, error.strerror or error, _WAYS_ON.get(error.errno or 0)
    return TriptychError(": ".join(str(part) for part in parts if part))


def _write_error_report(error: BaseException) -> str:
    """Write a file for a report; return a description of the information to attach."""
    lines = [
        f"triptych {version('triptych')}, Python {platform.python_version()}, {platform.platform()}",
        *(f"{name} {version(name)}" for name in ("torch", "safetensors", "tokenizers")),
        f"arguments: {sys.argv[1:]!r}",
        "".join(traceback.format_exception(error)),
    ]
    try:
        handle, name = tempfile.mkstemp(".txt", "triptych-error-")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123
            file.write("\n".join(lines))
    except OSError:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"what the command was, and this place: {last.filename}, line {last.lineno}"
        )
    return f"the traceback in {name}"


def print_error(error: TriptychError) -> None:
    """Print the message of an error, and with `--verbose` its notes and its code."""
    notes = getattr(error, "__notes__", [])
    says_all = is_given("--verbose", "-v")
    more = " (more with --verbose)" if notes and not says_all else ""
    rest = (
        [*notes, f"code {error.code}: triptych explain {error.code}"]
        if says_all
        else []
    )
    say("\n".join([f"triptych: {printable(str(error))}{more}", *rest]))


def is_given(*spellings: str) -> bool:
    """Return True if a switch common to all commands is on the command line."""
    return not set(spellings).isdisjoint(sys.argv[1:])


def say(message: str) -> None:
    """Print a message to standard error; ignore a closed stream."""
    with suppress(OSError, ValueError):
        print(printable(message, lines=True), file=sys.stderr, flush=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """While entered, print every distinct warning and note of this library once, on a separate line."""
    with warnings.catch_warnings():
        as_before = warnings.showwarning
        shown = set[str]()

        def show(
            message: Warning | str, category: type[Warning], *where: Any, **how: Any
        ) -> None:
            if not issubclass(category, _SHOWN):
                as_before(message, category, *where, **how)
            elif str(message) not in shown:  # several callers may issue it
                shown.add(str(message))
                kind = "warning: " if issubclass(category, ConfigurationWarning) else ""
                say(f"triptych: {kind}{message}")

        for ours in _SHOWN:
            warnings.simplefilter("default", ours)
        warnings.showwarning = show
        yield
