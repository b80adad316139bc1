"""Bytes, JSON records and names from untrusted files.

Faults raise a `DataError` with one printable line. A name must stay within its folder. Pipes and devices are
refused, since reading them may never end.
"""

import errno
import json
import mmap
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypeVar, final

from pydantic import BaseModel, ValidationError

from triptych.errors import DataError
from triptych.printable import printable

# Maximum sizes of files in bytes: far above all known files, and small enough for memory.
LONGEST_TEXT = 16 << 20  # a recipe, a template, a page
LONGEST_JSON = 64 << 20  # a configuration, an index, a certificate
LONGEST_TOKENIZER = 256 << 20
LONGEST_METRICS = 1 << 30
_BLOCK = 1 << 20
# Parts of a file with fewer bytes are read instead of mapped, and so are parts at unaligned offsets.
_LEAST_MAPPED = 1 << 16
_ALIGNMENT = 8
# Maximum length of a file name on most systems.
_LONGEST_NAME = 255

_Record = TypeVar("_Record", bound=BaseModel)


def require_regular(path: Path, most: int | None = None) -> int:
    """Check that a path is a regular file, or a link to a regular file; return its size.

    Without the check, opening a pipe or device in a library may block forever.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if most is not None and found.st_size > most:
        raise _too_large(path, most)
    return found.st_size


class Stamp(NamedTuple):
    """Identity of a file's content: it changes when the file is rewritten or replaced."""

    size: int
    modified: int  # modification time in nanoseconds
    device: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """Build a stamp from a file's status."""
        return cls(found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)


def require_same(path: Path, before: Stamp, found: os.stat_result) -> None:
    """Check that a file is unchanged since it was opened."""
    if Stamp.of(found) != before:
        raise DataError(
            f"{path} was written anew while it was open: open the model again"
        )


@final
class Stamps:
    """Stamps of files at a point in time, to detect changes, so that old and new values never mix."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Record the current stamps of files, with None for missing files."""
        self._found = {
            path: Stamp.of(path.stat()) if path.is_file() else None for path in paths
        }

    def require_same(self) -> None:
        """Check that every file is unchanged, and that missing files are still missing."""
        for path, before in self._found.items():
            try:
                found = path.stat()
            except OSError as error:
                if before is None:
                    continue
                raise DataError(
                    f"{path} was there when the model was opened, and is gone ({error.strerror}): open the "
                    "model again"
                ) from None
            if before is None and not stat.S_ISREG(found.st_mode):
                continue  # a reader of the file refuses it by name
            if before is None:
                raise DataError(
                    f"{path} was not there when the model was opened, and is read first now: open the model "
                    "again"
                )
            require_same(path, before, found)


def read_limited(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes."""
    require_regular(path, most)
    content = bytearray()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            content += block
            if (
                len(content) > most
            ):  # the file has grown, or its reported size was wrong
                raise _too_large(path, most)
    return bytes(content)


def _too_large(path: Path, most: int) -> OSError:
    return OSError(
        errno.EFBIG,
        f"it has more than {most:,} bytes, the most for such a file",
        str(path),
    )


class Bytes(ABC):
    """Base class of files of known size with random access.

    Attributes:
        name: name in messages.
        size: size in bytes.
    """

    name: str
    size: int

    @abstractmethod
    def read(self, start: int, length: int) -> bytearray | memoryview:
        """Read `length` bytes from `start` into a writable buffer."""


@final
class LocalBytes(Bytes):
    """A local file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        try:
            self.size = require_regular(path)
            self._stamp = Stamp.of(path.stat())
        except FileNotFoundError:
            raise DataError(f"{path} is missing: fetch it again") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None

    def read(self, start: int, length: int) -> bytearray | memoryview:
        found = bytearray(length)
        # Every read opens the file anew and compares its stamp.
        try:
            with self._path.open("rb", buffering=0) as file:
                self.require_same(file.fileno())
                file.seek(start)
                view = memoryview(found)
                done = 0
                while done < length and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise DataError(f"{self.name}: {error.strerror or error}") from None
        if done < length:
            raise DataError(
                f"{self.name} ends after {start + done:,} bytes: it is truncated; fetch it again"
            )
        return found

    def require_same(self, descriptor: int) -> None:
        """Check that an open file is unchanged since its size and header were read."""
        require_same(self._path, self._stamp, os.fstat(descriptor))


@final
class MappedBytes(Bytes):
    """A memory-mapped file. Pages are read lazily, so the file must not be truncated while in use."""

    def __init__(self, path: Path) -> None:
        self._whole = LocalBytes(path)
        self.name = self._whole.name
        self.size = self._whole.size
        self._path = path

    def read(self, start: int, length: int) -> bytearray | memoryview:
        # A mapping must start at a multiple of the allocation granularity.
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if length < _LEAST_MAPPED or start % _ALIGNMENT:
            return self._whole.read(start, length)
        try:
            with self._path.open("rb", buffering=0) as file:
                self._whole.require_same(file.fileno())
                mapped = mmap.mmap(
                    file.fileno(),
                    start - first + length,
                    access=mmap.ACCESS_COPY,
                    offset=first,
                )
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.name}: {error}: it cannot be mapped; fetch it again"
            ) from None
        return memoryview(mapped)[start - first :]


def read_json(path: Path) -> dict[str, Any]:
    """Read the record of a JSON file."""
    try:
        content = read_limited(path, LONGEST_JSON)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: fetch it again") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    return parsed_json(content, str(path))


def validated(kind: type[_Record], record: dict[str, Any], path: Path) -> _Record:
    """Validate a file's record as a pydantic model."""
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        given = (
            "" if first["type"] == "missing" else f", not {shown(repr(first['input']))}"
        )
        raise DataError(f"{path}: {where}: {first['msg']}{given}") from None


def parsed_json(content: bytes | bytearray, where: str) -> dict[str, Any]:
    """Parse a JSON record and refuse repeated names; `where` names the source in messages."""

    # Readers disagree on which value of a repeated name counts.
    def refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise DataError(f"{where}: {shown(twice)} is there twice")
        return found

    try:
        record = json.loads(content, object_pairs_hook=refuse_twins)
    except RecursionError:
        raise DataError(f"{where}: its JSON is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a JSON record was expected, not a {type(record).__name__}"
        )
    return record


def stays_in_folder(name: str) -> bool:
    """Return True if a name stays in its folder on every operating system."""
    return (
        0 < len(name) <= _LONGEST_NAME
        and name.isprintable()
        and all(
            not path.is_absolute() and not path.drive and ".." not in path.parts
            for path in (PurePosixPath(name), PureWindowsPath(name))
        )
    )


def shown(value: object) -> str:
    """Format a value from a file, shortened, in one line."""
    try:
        text = (
            json.dumps(value, ensure_ascii=True, default=str)
            if not isinstance(value, str)
            else value
        )
    except ValueError:  # an integer with thousands of digits
        text = "a number too long to show"
    text = printable(text)
    return text if len(text) <= 120 else text[:117] + "…"
