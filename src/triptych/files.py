"""Atomic writing of files and folders: a reader or the next run never sees partial content."""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, final

from triptych.errors import UsageError

if sys.platform != "win32":
    import fcntl

# System errors for lack of space: full disk, user quota, file size limit.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, flush the file to disk, and rename it to `path`.

    Until the rename, `path` keeps its content; after an error, the temporary file is removed. A link is
    followed. A terminal, a pipe or a device such as /dev/null cannot be replaced and is written to directly.
    """
    path = leads_to(path)
    try:
        if path.exists() and not path.is_file():
            write(path)
            return
        handle, name = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            sync(temporary)
            # mkstemp creates a private file; set the mode that open() would set.
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except Exception as error:
        _name_place(error, path)
        raise


@final
class NewFolder:
    """Context manager to create a folder atomically.

        with NewFolder(Path("out")) as folder:
            (folder.path / "file").write_text("…")
            folder.finish()

    The folder is filled under a temporary name in the same parent folder and renamed by `finish`, after all
    files are flushed to disk. Unless `finish` is called, the temporary folder is removed. Leftovers of a
    killed process are removed when a folder of the same name is next created. The folder is locked
    (`hold_folder`) until the context ends, also under its final name.

    Attributes:
        path: temporary path; the final path after `finish`.
    """

    path: Path

    def __init__(self, place: Path) -> None:
        self._place = place.absolute()
        self._handle: int | None = None
        self._require_free()

    def __enter__(self) -> "NewFolder":
        # Only names that mkdtemp draws are leftovers of this class.
        drawn = re.compile(rf"\.{re.escape(self._place.name)}\.partial-[a-z0-9_]+")
        for folder in self._place.parent.iterdir():
            if drawn.fullmatch(folder.name):
                _remove_if_left(folder)
        while True:
            prefix = f".{self._place.name}.partial-"
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=self._place.parent))
            self._handle = _lock_folder(self.path, wait=True)
            if (
                self.path.exists()
            ):  # otherwise another process removed it as a leftover before the lock
                return self
            self._let_go()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.path != self._place:
            shutil.rmtree(self.path, ignore_errors=True)
        self._let_go()
        if isinstance(error, Exception):
            _name_place(error, self._place)

    def finish(self) -> None:
        """Flush all files to disk and rename the folder to its final name."""
        # mkdtemp creates a private folder; set the mode that mkdir() would set.
        self.path.chmod(0o777 & ~_umask())
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                sync(Path(folder, name))
            _sync_folder(Path(folder))
        self._require_free()
        try:
            self.path = self.path.rename(self._place)
        except OSError:
            self._require_free()
            raise
        _sync_folder(self._place.parent)

    def _require_free(self) -> None:
        if os.path.lexists(self._place):
            raise FileExistsError(
                errno.EEXIST, os.strerror(errno.EEXIST), str(self._place)
            )

    def _let_go(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new folder atomically (`NewFolder`)."""
    with NewFolder(path) as folder:
        write(folder.path)
        folder.finish()


@contextmanager
def hold_folder(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder inside the block; other processes wait for the lock until block or process ends.

    Without `wait`, raise `UsageError` if another process has the lock.
    """
    handle = _lock_folder(folder, wait=wait)
    if handle is None and not wait and folder.is_dir():
        raise UsageError(
            f"{folder}: another process is at work in this folder; wait for it or stop it"
        )
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Remove temporary files that a killed process left in a folder while writing the named files."""
    for name in names:
        for leftover in folder.glob(f".{name}.*.tmp"):
            leftover.unlink(missing_ok=True)


def move_files(source: Path, target: Path, last: str) -> None:
    """Move every file below `source` to the same relative path below `target`, and remove `source`.

    Each file is replaced atomically, and the file named `last` comes after all other files. If an
    interruption left that file in `source`, a second call completes the move.
    """
    files = [path for path in source.rglob("*") if not path.is_dir()]
    for path in sorted(files, key=lambda path: (path.name == last, path)):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    _sync_folder(target)
    shutil.rmtree(source)


def write_text(path: Path, text: str) -> None:
    """Write text with `write_atomically`, in UTF-8. Lone surrogates are escaped."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON with `write_text`."""
    write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes with `write_atomically`."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def remove_folder(path: Path) -> None:
    """Remove a folder; other processes see the whole folder, or it is missing."""
    # `NewFolder` removes this name, too, if this process is killed now.
    leaving = path.with_name(f".{path.name}.partial-removed")
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def find_cache_folder() -> Path | None:
    """Return the cache folder: `triptych` in $XDG_CACHE_HOME, or in ~/.cache; None without a home folder."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "triptych"
    try:
        return Path.home() / ".cache" / "triptych"
    except RuntimeError:  # a user that the system does not know, as in containers
        return None


def cache_folder() -> Path:
    """Return the cache folder (`find_cache_folder`); raise `UsageError` without a home folder."""
    if (found := find_cache_folder()) is None:
        raise UsageError("there is no home folder: set XDG_CACHE_HOME to a folder")
    return found


def leads_to(path: Path) -> Path:
    """Return the absolute path of a file with links resolved."""
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found


def file_hash(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def system_error(error: BaseException) -> OSError | None:
    """Return the system error behind an exception, or None.

    Libraries written in Rust raise other exceptions for system errors, with the error number in the message.
    """
    if isinstance(error, OSError):
        return error
    found = _RUST_ERROR.search(str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def _name_place(error: Exception, place: Path) -> None:
    """Replace the temporary name in a system error by the final path."""
    found = system_error(error)
    if found is None:
        return
    if (
        found.filename is None and found.errno in FULL
    ):  # only writing raises these errors
        found.filename = str(place)
    elif isinstance(found.filename, str):
        temporary = re.escape(f"{place.parent / f'.{place.name}.'}")
        found.filename = re.sub(
            rf"^{temporary}[^/]*", lambda _: str(place), found.filename
        )
    if found is not error:
        raise found from error


def _remove_if_left(folder: Path) -> None:
    """Remove a folder unless a process has locked it."""
    handle = _lock_folder(folder, wait=False)
    if handle is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _lock_folder(folder: Path, *, wait: bool) -> int | None:
    """Lock a folder and return the handle of the lock; None if the folder cannot be locked."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        if sys.platform != "win32":
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    # A rename is durable only after its folder is synced (POSIX); Windows cannot open folders.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
