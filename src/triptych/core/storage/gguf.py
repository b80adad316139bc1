"""GGUF files of llama.cpp: their metadata and their tensors, dequantised one at a time.

Files are not trusted: every count and length is compared with the number of remaining bytes before
reading. The package `gguf` only unpacks blocks of quantised values.

Source: docs/gguf.md in github.com/ggml-org/ggml.
"""

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from triptych.core.storage.tensors import TensorFile, TensorInfo
from triptych.errors import DataError
from triptych.extras import require_extra
from triptych.untrusted import Bytes, shown

SUFFIX = ".gguf"
# A file of several names its number and their count: "name-00002-of-00003.gguf".
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LONGEST_HEADER = 1 << 29
_LONGEST_KEY = 1 << 16  # the limit of the format
_MOST_DIMENSIONS = 4  # the limit of llama.cpp
_LONGEST_SIDE = 1 << 48
_PIECE = 1 << 20  # bytes of a header read at a time
_ALIGNMENT = 32
_LARGEST_ALIGNMENT = 1 << 20
_NUMBERS_AT_A_TIME = 1 << 22
_MOST_SHORTENED = 1 << 12  # array entries restored to their shortest decimal form
_STRING = 8
_ARRAY = 9
# Numbers of metadata by their type.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_FLOAT = np.dtype("<f4")
# Types of unquantised tensors; all other types have blocks of quantised values.
PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_PLAIN_NUMBERS = {
    0: "F32",
    1: "F16",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    30: "BF16",
}


@final
@dataclass(frozen=True)
class StoredType:
    """The type of a tensor: blocks of `block` values in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


@final
@dataclass(frozen=True)
class Entry:
    """A tensor in the header of a file."""

    type: StoredType
    shape: tuple[int, ...]  # PyTorch's order: the last dimension is contiguous
    offset: int  # bytes before it in the file
    num_bytes: int


@final
class Gguf(TensorFile):
    """A GGUF file. Only its header is kept in memory; quantised tensors are read as float32."""

    def __init__(self, source: Bytes) -> None:
        self.name = source.name
        self._source = source
        header = _Header(source)
        self.metadata = header.metadata
        self.entries = header.entries
        self.infos = {
            name: TensorInfo(
                PLAIN.get(entry.type.name, torch.float32), entry.shape, entry.num_bytes
            )
            for name, entry in self.entries.items()
        }

    def through(self, source: Bytes) -> "Gguf":
        """Return the same file read in another way, without reading its header again."""
        found = copy(self)
        found._source = source
        return found

    def read(self, name: str) -> Tensor:
        shape = self.entries[name].shape
        return self._rows(name, 0, prod(shape[:-1])).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        first, *rest = self.entries[name].shape
        if not rest:
            return self.read(name)[start:stop]
        stop = min(stop, first)
        each = prod(rest[:-1])
        return self._rows(name, start * each, stop * each).reshape(stop - start, *rest)

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows, with all dimensions except the last flattened."""
        entry = self.entries[name]
        width = entry.shape[-1] if entry.shape else 1
        row = width // entry.type.block * entry.type.num_bytes
        if stop <= start or not row:
            return torch.empty(
                max(0, stop - start), width, dtype=self.infos[name].dtype
            )
        if entry.type.name in PLAIN:
            found = self._source.read(entry.offset + start * row, (stop - start) * row)
            return torch.frombuffer(found, dtype=PLAIN[entry.type.name]).reshape(
                stop - start, width
            )
        # Unpacking takes several times the memory of its result, so a few rows are unpacked at a time.
        unpack = _unpacker(entry.type.name, f"{self.name}, tensor {shown(name)}")
        numbers = torch.empty(stop - start, width)
        at_a_time = max(1, _NUMBERS_AT_A_TIME // width)
        for first in range(start, stop, at_a_time):
            last = min(first + at_a_time, stop)
            found = self._source.read(entry.offset + first * row, (last - first) * row)
            blocks = np.frombuffer(found, dtype=np.uint8).reshape(last - first, row)
            numbers[first - start : last - start] = torch.from_numpy(unpack(blocks))
        return numbers


@final
class _Header:
    """The header of a file: its metadata and the entries of its tensors, checked."""

    def __init__(self, source: Bytes) -> None:
        self._source = source
        self._at = 0
        self._piece: bytes = b""
        self._piece_start = 0
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        if source.size < 24 or self._take(4) != _MAGIC:
            raise DataError(
                f"{source.name}: it is no GGUF file, or the beginning of one; fetch it again"
            )
        version = self._number("<I")
        if version not in _VERSIONS:
            # Bytes in reverse order reveal a file for big-endian machines.
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = (
                "written for big-endian machines"
                if swapped
                else f"of version {version:,}"
            )
            raise DataError(
                f"{source.name}: it is a GGUF file {what}: versions 2 and 3 are read"
            )
        num_tensors = self._count(self._number("<Q"), 24, "tensors")
        num_entries = self._count(self._number("<Q"), 13, "entries of metadata")
        for _ in range(num_entries):
            key = self._string(_LONGEST_KEY, "a key of the metadata")
            if key in self.metadata:
                raise DataError(f"{source.name}: {shown(key)} is in its metadata twice")
            self.metadata[key] = self._value(self._number("<I"), key)
        found = [self._tensor() for _ in range(num_tensors)]
        self._locate(found)

    def _tensor(self) -> tuple[str, StoredType, tuple[int, ...], int]:
        name = self._string(_LONGEST_KEY, "the name of a tensor")
        where = f"{self._source.name}, tensor {shown(name)}"
        if not name.isprintable():
            raise DataError(f"{where}: its name has unprintable characters")
        count = self._number("<I")
        if count > _MOST_DIMENSIONS:
            raise DataError(
                f"{where}: it has {count:,} dimensions, and {_MOST_DIMENSIONS} are the most"
            )
        sides = [self._number("<Q") for _ in range(count)]
        stored = _stored_type(self._number("<I"), where)
        if any(side > _LONGEST_SIDE for side in sides):
            raise DataError(f"{where}: {shown(sides)} is not a valid shape")
        if sides and sides[0] % stored.block:
            raise DataError(
                f"{where}: rows of {sides[0]:,} numbers are no blocks of {stored.block} ({stored.name})"
            )
        return name, stored, tuple(reversed(sides)), self._number("<Q")

    def _locate(
        self, found: list[tuple[str, StoredType, tuple[int, ...], int]]
    ) -> None:
        """Find the bytes of every tensor, and check for ranges outside the file and overlaps."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        powers = (
            isinstance(alignment, int)
            and 0 < alignment <= _LARGEST_ALIGNMENT
            and not alignment & (alignment - 1)
        )
        if not powers:
            raise DataError(
                f"{self._source.name}: general.alignment is {shown(alignment)}: a power of two is needed"
            )
        start = math.ceil(self._at / alignment) * alignment
        for name, stored, shape, offset in found:
            where = f"{self._source.name}, tensor {shown(name)}"
            if name in self.entries:
                raise DataError(
                    f"{self._source.name}: tensor {shown(name)} is there twice"
                )
            size = prod(shape) // stored.block * stored.num_bytes
            if offset % alignment:
                raise DataError(
                    f"{where}: its offset {offset:,} is no multiple of {alignment}"
                )
            if start + offset + size > self._source.size:
                raise DataError(
                    f"{where}: it ends at byte {start + offset + size:,} of a file of "
                    f"{self._source.size:,}: the "
                    "file is truncated; fetch it again"
                )
            self.entries[name] = Entry(stored, shape, start + offset, size)
        # Empty tensors have no bytes to share.
        filled = sorted(
            (e.offset, e.offset + e.num_bytes, n)
            for n, e in self.entries.items()
            if e.num_bytes
        )
        for (_, end, one), (begin, _, other) in pairwise(filled):
            if begin < end:
                raise DataError(
                    f"{self._source.name}: tensors {shown(one)} and {shown(other)} share bytes"
                )

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(_LONGEST_HEADER, shown(key))
        if kind == _ARRAY:
            inner = self._number("<I")
            length = self._number("<Q")
            if inner == _STRING:
                return self._strings(
                    self._count(length, 8, f"texts of {shown(key)}"), shown(key)
                )
            size = self._dtype(inner, key).itemsize
            return self._numbers(
                inner, key, self._count(length, size, f"numbers of {shown(key)}")
            )
        (number,) = self._numbers(kind, key, 1)
        return number

    def _numbers(self, kind: int, key: str, count: int) -> list[Any]:
        dtype = self._dtype(kind, key)
        found = np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        if dtype != _FLOAT or count > _MOST_SHORTENED:
            return list(found.tolist())
        # Shortest decimal of this float32: 1e-5, not 9.999999747378752e-06.
        return [float(str(number)) for number in found]

    def _strings(self, count: int, what: str) -> list[str]:
        """Read many short strings, most of them without a call of `_take`."""
        found: list[str] = []
        for _ in range(count):
            # Vocabularies have hundreds of thousands of strings: slices are faster than calls.
            start = self._at - self._piece_start
            length = int.from_bytes(self._piece[start : start + 8], "little")
            stop = start + 8 + length
            if start + 8 > len(self._piece) or stop > len(self._piece):
                found.append(self._string(_LONGEST_HEADER, what))
                continue
            try:
                found.append(self._piece[start + 8 : stop].decode())
            except UnicodeDecodeError:
                raise DataError(
                    f"{self._source.name}: {what} is no UTF-8 text; fetch the file again"
                ) from None
            self._at += 8 + length
        return found

    def _dtype(self, kind: int, key: str) -> np.dtype[Any]:
        if kind not in _SCALARS:
            what = "an array of arrays" if kind == _ARRAY else f"of type {kind:,}"
            raise DataError(
                f"{self._source.name}: {shown(key)} is {what}, which is not read"
            )
        return _SCALARS[kind]

    def _count(self, count: int, least: int, what: str) -> int:
        """Check that the remaining bytes suffice for `count` entries of at least `least` bytes."""
        if count * least > self._left:
            raise DataError(
                f"{self._source.name}: it claims {count:,} {what}, and {max(0, self._left):,} bytes are "
                "left: it is "
                "truncated or damaged; fetch it again"
            )
        return count

    def _string(self, most: int, what: str) -> str:
        length = self._count(self._number("<Q"), 1, f"characters for {what}")
        if length > most:
            raise DataError(
                f"{self._source.name}: {length:,} bytes for {what} are past {most:,}"
            )
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise DataError(
                f"{self._source.name}: {what} is no UTF-8 text; fetch the file again"
            ) from None

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(number)

    @property
    def _left(self) -> int:
        return min(self._source.size, _LONGEST_HEADER) - self._at

    # The next bytes of the header.
    def _take(self, length: int) -> bytes:
        if length > self._left:
            raise DataError(
                f"{self._source.name}: its header ends after {self._source.size:,} bytes, within a value: "
                "it is "
                "truncated or damaged; fetch it again"
            )
        end = self._at + length
        held = self._piece_start + len(self._piece)
        if end > held:
            # Keep the unread bytes of the piece: a value may begin in them.
            kept = self._piece[self._at - self._piece_start :]
            more = min(max(_PIECE, end - held), self._source.size - held)
            self._piece = kept + bytes(self._source.read(held, more))
            self._piece_start = self._at
        start = self._at - self._piece_start
        self._at = end
        return self._piece[start : start + length]


def _stored_type(number: int, where: str) -> StoredType:
    if (plain := _PLAIN_NUMBERS.get(number)) is not None:
        return StoredType(plain, 1, PLAIN[plain].itemsize)
    require_extra("gguf", "gguf", what="a quantised GGUF file")
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
        block, num_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise DataError(
            f"{where}: its type {number:,} is none that the package gguf knows: pip install -U gguf"
        ) from None
    return StoredType(kind.name, block, num_bytes)


def _unpacker(name: str, where: str) -> Callable[[np.ndarray], np.ndarray]:
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[name]

    def unpack(blocks: np.ndarray) -> np.ndarray:
        try:
            # Scales of damaged blocks may overflow: no warning of NumPy for them.
            with np.errstate(all="ignore"):
                found: np.ndarray = dequantize(blocks, kind)
        except NotImplementedError:
            raise DataError(
                f"{where}: it is stored as {name}, which the package gguf does not unpack"
            ) from None
        return found

    return unpack


def shards_of(path: Path) -> Iterator[Path]:
    """Yield the files of a model in several, given any of them; the path alone for a model in one file."""
    found = SHARD.fullmatch(path.name)
    if found is None:
        yield path
        return
    for number in range(1, int(found["count"]) + 1):
        yield path.with_name(f"{found['stem']}-{number:05}-of-{found['count']}{SUFFIX}")


def nested(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries below a prefix as records within records: "a.b" becomes `{"a": {"b": …}}`."""
    record: dict[str, Any] = {}
    for key, value in metadata.items():
        if not key.startswith(f"{prefix}."):
            continue
        *above, last = key.removeprefix(f"{prefix}.").split(".")
        inner = record
        for name in above:
            held = inner.setdefault(name, {})
            inner = held if isinstance(held, dict) else {}
        inner[last] = value
    return record
