"""Files that a command is asked to write."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from triptych.errors import UsageError
from triptych.files import cache_folder, file_hash, leads_to, write_text


class Output(NamedTuple):
    """A file to write."""

    path: Path | None  # given path; None without this output
    # returns True if the command wrote an existing file, so that it may be overwritten
    is_own: Callable[[Path], bool]


def begins_with(start: bytes) -> Callable[[Path], bool]:
    """Return a test of whether a file begins with these bytes."""

    def begins(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(len(start)) == start

    return begins


def remember(path: Path) -> None:
    """Store the hash of a plain text file, so that the next command may replace it."""
    if path.is_file():
        with suppress(OSError):
            (note := _note(path)).parent.mkdir(parents=True, exist_ok=True)
            write_text(note, file_hash(path))


def is_remembered(path: Path) -> bool:
    """Return True if a file is unchanged since a command of ours wrote it."""
    try:
        return _note(path).read_text(encoding="utf-8") == file_hash(path)
    except OSError:
        return False


def _note(path: Path) -> Path:
    return (
        cache_folder()
        / "written"
        / hashlib.sha256(os.fsencode(leads_to(path))).hexdigest()
    )


def require_free(
    outputs: Sequence[Output], read: Sequence[Path], *, force: bool
) -> None:
    """Check that outputs are writable and do not replace each other, an input or a user's file."""
    inputs = [leads_to(path) for path in read]
    taken: set[Path] = set()
    for path, is_own in outputs:
        if path is None:
            continue
        real = leads_to(path)
        folder = path.absolute().parent
        if not folder.is_dir():
            raise UsageError(f"the folder of {path} does not exist: make it first")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise UsageError(
                f"{path} cannot be written: it is a folder, or permission is denied"
            )
        if real in taken:
            raise UsageError(f"{path} is given twice: each output needs its own file")
        taken.add(real)
        if not path.is_file() or is_own(path):  # a terminal or a pipe is written into
            continue
        if any(real == of or real.is_relative_to(of) for of in inputs):
            raise UsageError(
                f"{path} is a file of the checkpoint or text that is read: choose another name"
            )
        if not force:
            raise UsageError(
                f"{path} is there, and triptych did not write it or cannot tell (it may have changed since): "
                "choose another name, or add --force to replace it"
            )
