"""Bytes, JSON records and names from files that are not trusted.

What is wrong with them is a `DataError` in one printable line. A name must stay within its folder.
"""

import json
import mmap
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, final

from triptych.errors import DataError

_LONGEST_JSON = 64 << 20
# Below so many bytes a part of a file is read, not mapped; so are tensors that begin at odd places.
_LEAST_MAPPED, _ALIGNMENT = 1 << 16, 8
# Of a file, on most systems.
_LONGEST_NAME = 255


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
        """Read `length` bytes from `start` into a writable buffer.

        Raises:
            DataError: it cannot be read, or there are fewer.
        """


@final
class LocalBytes(Bytes):
    """A file on a disk."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        try:
            self.size = path.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{path} is missing: fetch it again") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None

    def read(self, start: int, length: int) -> bytearray | memoryview:
        found = bytearray(length)
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(start)
                view, done = memoryview(found), 0
                while done < length and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise DataError(f"{self.name}: {error.strerror or error}") from None
        if done < length:
            raise DataError(f"{self.name} ends after {start + done:,} bytes: it is truncated; fetch it again")
        return found


@final
class MappedBytes(Bytes):
    """A memory-mapped file on a disk: a page is read at its first use.

    Changes stay in memory (copy on write). The file must not become shorter while parts are in use.
    """

    def __init__(self, path: Path) -> None:
        self._whole = LocalBytes(path)
        self.name, self.size, self._path = self._whole.name, self._whole.size, path

    def read(self, start: int, length: int) -> bytearray | memoryview:
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if length < _LEAST_MAPPED or start % _ALIGNMENT:
            return self._whole.read(start, length)
        try:
            with self._path.open("rb", buffering=0) as file:
                mapped = mmap.mmap(
                    file.fileno(), start - first + length, access=mmap.ACCESS_COPY, offset=first
                )
        except (OSError, ValueError) as error:
            raise DataError(f"{self.name}: {error}: it cannot be mapped; fetch it again") from None
        return memoryview(mapped)[start - first :]


def read_json(path: Path) -> dict[str, Any]:
    """Read the record of a JSON file.

    Raises:
        DataError: the file is missing, is not a JSON record, or is nested too deeply.
    """
    source = LocalBytes(path)
    if source.size > _LONGEST_JSON:
        raise DataError(f"{source.name}: {source.size:,} bytes are too many for a file of settings")
    return parsed_json(bytes(source.read(0, source.size)), source.name)


def parsed_json(content: bytes | bytearray, where: str) -> dict[str, Any]:
    """The record that JSON text holds; `where` says where it is from.

    Raises:
        DataError: it is not a JSON record, has a name twice, or is nested too deeply.
    """

    def refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise DataError(f"{where}: {shown(twice)} stands there twice")
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
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 120 else text[:117] + "…"
