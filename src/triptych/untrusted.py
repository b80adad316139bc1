"""Bytes, JSON records and names from files that are not trusted.

What is wrong with them is a `DataError` in one printable line. A name must stay within its folder. Pipes and
devices, which may never end, are refused.
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

# The most bytes of a file by its kind: far more than any that is known, and little enough to be held.
LONGEST_TEXT = 16 << 20  # a recipe, a template, a page
LONGEST_JSON = 64 << 20  # a configuration, an index, a certificate
LONGEST_TOKENIZER = 256 << 20
LONGEST_METRICS = 1 << 30
_BLOCK = 1 << 20
# A part of a file with fewer bytes is read, not mapped; so are tensors that begin at odd places.
_LEAST_MAPPED = 1 << 16
_ALIGNMENT = 8
# The longest name of a file on most systems.
_LONGEST_NAME = 255

_Record = TypeVar("_Record", bound=BaseModel)


def require_regular(path: Path, most: int | None = None) -> int:
    """Check that a path is a regular file, or a link to one, before it is opened by a library."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if most is not None and found.st_size > most:
        raise _too_large(path, most)
    return found.st_size


class Stamp(NamedTuple):
    """Figures that change when a file is written again or replaced."""

    size: int
    modified: int  # in nanoseconds
    device: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> "Stamp":
        """Make the stamp from a file's status."""
        return cls(found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)


def require_same(path: Path, before: Stamp, found: os.stat_result) -> None:
    """Check that a file is still the one that was opened."""
    if Stamp.of(found) != before:
        raise DataError(f"{path} was written anew while it was open: open the model again")


@final
class Stamps:
    """Files as they were at one time, so that a change is noticed and old and new numbers never mix."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Note files as they are now, and those that are not there."""
        self._found = {path: Stamp.of(path.stat()) if path.is_file() else None for path in paths}

    def require_same(self) -> None:
        """Check that every file is as it was, and that none has come."""
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
                continue  # whoever reads it refuses it by name
            if before is None:
                raise DataError(
                    f"{path} was not there when the model was opened, and is read first now: open the model "
                    "again"
                )
            require_same(path, before, found)


def read_limited(path: Path, most: int) -> bytes:
    """Read a regular file of at most a number of bytes."""
    require_regular(path, most)
    content = bytearray()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            content += block
            if len(content) > most:  # it has grown, or its size was not true
                raise _too_large(path, most)
    return bytes(content)


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {most:,} bytes, the most for such a file", str(path))


class Bytes(ABC):
    """A file of known size with random access.

    Attributes:
        name: for messages.
        size: in bytes.
    """

    name: str
    size: int

    @abstractmethod
    def read(self, start: int, length: int) -> bytearray | memoryview:
        """Read `length` bytes from `start` into a writable buffer."""


@final
class LocalBytes(Bytes):
    """A file on a disk."""

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
            raise DataError(f"{self.name} ends after {start + done:,} bytes: it is truncated; fetch it again")
        return found

    def require_same(self, descriptor: int) -> None:
        """Check that an open file is the one whose size and header were read."""
        require_same(self._path, self._stamp, os.fstat(descriptor))


@final
class MappedBytes(Bytes):
    """A memory-mapped file, which must not become shorter: a page is read at its first use."""

    def __init__(self, path: Path) -> None:
        self._whole = LocalBytes(path)
        self.name = self._whole.name
        self.size = self._whole.size
        self._path = path

    def read(self, start: int, length: int) -> bytearray | memoryview:
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if length < _LEAST_MAPPED or start % _ALIGNMENT:
            return self._whole.read(start, length)
        try:
            with self._path.open("rb", buffering=0) as file:
                self._whole.require_same(file.fileno())
                mapped = mmap.mmap(
                    file.fileno(), start - first + length, access=mmap.ACCESS_COPY, offset=first
                )
        except (OSError, ValueError) as error:
            raise DataError(f"{self.name}: {error}: it cannot be mapped; fetch it again") from None
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
    """The settings in a file's record."""
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        given = "" if first["type"] == "missing" else f", not {shown(repr(first['input']))}"
        raise DataError(f"{path}: {where}: {first['msg']}{given}") from None


def parsed_json(content: bytes | bytearray, where: str) -> dict[str, Any]:
    """The record that JSON text holds; `where` says where it is from."""

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
        raise DataError(f"{where}: a JSON record was expected, not a {type(record).__name__}")
    return record


def stays_in_folder(name: str) -> bool:
    """Whether a name stays in its folder on every operating system."""
    return (
        0 < len(name) <= _LONGEST_NAME
        and name.isprintable()
        and all(
            not path.is_absolute() and not path.drive and ".." not in path.parts
            for path in (PurePosixPath(name), PureWindowsPath(name))
        )
    )


def shown(value: object) -> str:
    """Format a value from a file, short and in one line."""
    try:
        text = json.dumps(value, ensure_ascii=True, default=str) if not isinstance(value, str) else value
    except ValueError:  # a number of thousands of digits
        text = "a number too long to show"
    text = printable(text)
    return text if len(text) <= 120 else text[:117] + "…"
