"""Writing files so that a reader, or the next run, never meets half of one."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary neighbour of `path`, flush it to the disk, then rename it.

    Until the rename, `path` keeps what it held; whatever goes wrong, the temporary file is removed. A link is
    followed; what is not a file (a terminal, a pipe, /dev/null) cannot be replaced and is written into.

    Args:
        path: the file to make or replace; its folder must exist.
        write: called with the temporary path, to create the content.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is unchanged.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        write(path)
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes a private file; give it the mode that open() would have given.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary neighbour of `path`, flush all of it to the disk, then rename it.

    Whatever goes wrong, the temporary folder is removed and `path` is not there.

    Args:
        path: the folder to make; it must not exist, and the folder it lies in must.
        write: called with the temporary folder, to fill it.

    Raises:
        OSError: the disk is full, the folder cannot be written, or `path` exists.
    """
    path = path.absolute()
    if path.exists() or path.is_symlink():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        write(temporary)
        for folder, _, names in os.walk(temporary):
            for name in names:
                with (Path(folder) / name).open("rb") as file:
                    os.fsync(file.fileno())
            _sync_folder(Path(folder))
        # mkdtemp makes a private folder; give it the mode that mkdir() would have given.
        temporary.chmod(0o777 & ~_umask())
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of a process that was killed while it wrote into the folder."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with `write_atomically`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes with `write_atomically`."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    # A rename is on the disk only once its folder is (POSIX); Windows cannot open folders.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
