"""Files that a command is asked to write."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from triptych.errors import UsageError
from triptych.files import leads_to


class Output(NamedTuple):
    """A file to write.

    Attributes:
        path: as it was given; None if it is not wanted.
        is_own: whether a file that is there is one that the command wrote, which may be written anew.
    """

    path: Path | None
    is_own: Callable[[Path], bool]


def unmarked(path: Path) -> bool:
    """Of plain text nobody can tell who wrote it."""
    del path
    return False


def require_free(outputs: Sequence[Output], read: Sequence[Path], *, force: bool) -> None:
    """Check that outputs can be written and replace neither each other, an input nor a user's file."""
    inputs = [leads_to(path) for path in read]
    taken: set[Path] = set()
    for path, is_own in outputs:
        if path is None:
            continue
        real, folder = leads_to(path), path.absolute().parent
        if not folder.is_dir():
            raise UsageError(f"the folder of {path} does not exist: make it first")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise UsageError(f"{path} cannot be written: it is a folder, or permission is denied")
        if real in taken:
            raise UsageError(f"{path} is given twice: each output needs its own file")
        taken.add(real)
        if not path.is_file() or is_own(path):  # a terminal or a pipe is written into
            continue
        if any(real == of or real.is_relative_to(of) for of in inputs):
            raise UsageError(f"{path} is a file of the checkpoint or text that is read: choose another name")
        if not force:
            raise UsageError(
                f"{path} is there, and triptych did not write it or cannot tell: choose another name, or add "
                "--force to replace it"
            )
