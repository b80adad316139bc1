"""Copying of tensor files with some tensors replaced; every byte is read once and hashed.

A safetensors file keeps the order of its tensors, and unless a shape changes, its header byte for byte. A
pickled file becomes a safetensors file.
"""

import hashlib
import json
import os
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from triptych.core.storage.pickled import Pickled
from triptych.core.storage.tensors import (
    STORED_DTYPES,
    Safetensors,
    TensorInfo,
    Tensors,
)
from triptych.errors import DataError
from triptych.files import write_atomically
from triptych.untrusted import LocalBytes

# Returns the replacement of a tensor, in its dtype: a tensor with its name, tensors by name, or None to copy
# the tensor.
Replacement = Callable[[str], Tensor | Mapping[str, Tensor] | None]
OnWritten = Callable[[int], None]
"""Called repeatedly with the number of further bytes written."""

_LABELS = {dtype: label for label, dtype in STORED_DTYPES.items()}
_BLOCK = 1 << 22
_Blocks = Iterator[memoryview | bytearray]
_MOST_WAITING = (
    8  # tensors copied or written at a time; replacements are in memory until written
)


class TensorHash(NamedTuple):
    """sha256 of a tensor before and after copying; see `tensor_hash`."""

    read: str | None  # hash of the tensor read; None for a new tensor
    written: str | None  # hash of the tensor written; None for a removed tensor


def tensor_hash(tensor: Tensor) -> str:
    """Compute sha256 of a line with dtype and shape as in safetensors (`F32 [2, 3]`), and the raw bytes."""
    found = _new_digest(tensor.dtype, tuple(tensor.shape))
    for block in _blocks_of(tensor):
        found.update(block)
    return found.hexdigest()


@final
class _SafetensorsShard:
    """A safetensors file read in blocks."""

    def __init__(self, path: Path) -> None:
        self._source = LocalBytes(path)
        self._file = Safetensors(self._source)
        infos = self._file.infos
        start = self._file.start
        ordered = sorted(infos, key=lambda name: (start(name), infos[name].num_bytes))
        self.infos = {name: infos[name] for name in ordered}
        self._handle = os.open(path, os.O_RDONLY)

    def header(self, written: Mapping[str, TensorInfo]) -> bytes:
        end = self._file.data_start
        sizes = [info.num_bytes for info in self.infos.values()]
        expected = accumulate(
            sizes, initial=end
        )  # offsets without gaps between tensors
        adjoin = all(
            self._file.start(name) == at
            for name, at in zip(self.infos, expected, strict=False)
        )
        if adjoin and self.infos == dict(written):
            return bytes(self._source.read(0, end))
        return _header_of(written, self._file.metadata)

    def blocks(self, name: str) -> _Blocks:
        start = self._file.start(name)
        size = self.infos[name].num_bytes
        for at in range(0, size, _BLOCK):
            yield self._source.read(start + at, min(_BLOCK, size - at))

    def location(self, name: str) -> tuple[int, int] | None:
        """Return the open file and the offset of a tensor's bytes in it."""
        return self._handle, self._file.start(name)

    def close(self) -> None:
        os.close(self._handle)


@final
class _PickledShard:
    """An old torch file with memory-mapped tensors, to be written as safetensors."""

    def __init__(self, path: Path) -> None:
        self._file = Pickled(path)
        infos = self._file.infos
        strange = next(
            (name for name, info in infos.items() if info.dtype not in _LABELS), None
        )
        if strange is not None:
            raise DataError(
                f"{path}, tensor {strange}: safetensors has no {infos[strange].dtype}".replace(
                    "torch.", ""
                )
            )
        # The order follows safetensors' writer: every tensor is aligned to the size of its entries.
        ordered = sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name))
        self.infos = {name: infos[name] for name in ordered}

    def header(self, written: Mapping[str, TensorInfo]) -> bytes:
        return _header_of(written, {"format": "pt"})

    def blocks(self, name: str) -> _Blocks:
        return _blocks_of(self._file.read(name))

    def location(self, name: str) -> tuple[int, int] | None:
        return None

    def close(self) -> None:
        """Leave the mapping to the object's destruction."""


_Shard = _SafetensorsShard | _PickledShard


def write_tensors(tensors: Tensors, target: Path) -> None:
    """Write tensors one by one to a new safetensors file."""
    infos = {
        name: TensorInfo(info.dtype, info.shape, prod(info.shape) * info.dtype.itemsize)
        for name, info in tensors.infos.items()
    }

    def save(path: Path) -> None:
        with path.open("wb") as file:
            file.write(_header_of(infos, {"format": "pt"}))
            for name in infos:
                for block in _blocks_of(tensors.read(name)):
                    file.write(block)

    write_atomically(target, save)


def copy_shard(
    path: Path, target: Path, replacement: Replacement, on_written: OnWritten
) -> tuple[dict[str, TensorInfo], dict[str, TensorHash]]:
    """Copy one file, several tensors at a time.

    Returns the tensors written, and the hashes of all tensors read or written.
    """
    shard: _Shard = (
        _SafetensorsShard if path.suffix == ".safetensors" else _PickledShard
    )(path)
    written = dict[str, TensorInfo]()
    hashes = dict[str, TensorHash]()
    waiting: deque[tuple[int, Future[dict[str, TensorHash]]]] = deque()
    # The final header is known only after all replacements. Data are written behind the space of the old
    # header; a shorter header is padded with blanks, a longer header moves the data.
    header = shard.header(shard.infos)
    at = room = len(header)

    def complete(most: int) -> None:
        while len(waiting) > most:
            num_bytes, future = waiting.popleft()
            hashes.update(future.result())
            on_written(num_bytes)

    handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    pool = ThreadPoolExecutor(4)
    try:
        _write_at(handle, header, 0)
        for name, info in shard.infos.items():
            complete(_MOST_WAITING - 1)
            new = replacement(name)
            new = {name: new} if isinstance(new, Tensor) else new
            for tensor in (new or {}).values():
                if tensor.dtype != info.dtype:
                    raise ValueError(
                        f"{name} is {_LABELS[info.dtype]}, and what replaces it {tensor.dtype}"
                    )
            infos = {name: info}
            if new is not None:
                infos = {
                    own: TensorInfo(one.dtype, tuple(one.shape), one.nbytes)
                    for own, one in new.items()
                }
            written |= infos
            num_bytes = sum(one.num_bytes for one in infos.values())
            waiting.append(
                (num_bytes, pool.submit(_copy, shard, name, new, handle, at))
            )
            at += num_bytes
        complete(0)
        header = shard.header(written)
        if len(header) <= room:
            blanks = b" " * (room - len(header))
            _write_at(handle, struct.pack("<Q", room - 8) + header[8:] + blanks, 0)
    finally:
        pool.shutdown(cancel_futures=True)
        os.close(handle)
        shard.close()
    if len(header) > room:
        _move_data(target, header, room)
    return written, hashes


def _copy(
    shard: _Shard, name: str, new: Mapping[str, Tensor] | None, handle: int, at: int
) -> dict[str, TensorHash]:
    info = shard.infos[name]
    # A replaced tensor is read, too, since its hash is part of the result.
    read = _new_digest(info.dtype, info.shape)
    source = shard.location(name)  # enables a copy in the kernel
    done = 0
    for block in shard.blocks(name):
        read.update(block)
        if new is None and (
            source is None
            or not _copy_in_kernel(
                source[0], source[1] + done, handle, at + done, len(block)
            )
        ):
            source = None
            _write_at(handle, block, at + done)
        done += len(block)
    if new is None:
        return {name: TensorHash(read.hexdigest(), read.hexdigest())}
    hashes = {name: TensorHash(read.hexdigest(), None)}
    for own, tensor in new.items():
        written = _new_digest(tensor.dtype, tuple(tensor.shape))
        for block in _blocks_of(tensor):
            written.update(block)
            _write_at(handle, block, at)
            at += len(block)
        hashes[own] = TensorHash(
            read.hexdigest() if own == name else None, written.hexdigest()
        )
    return hashes


def _copy_in_kernel(source: int, start: int, handle: int, at: int, length: int) -> bool:
    """Copy from file to file in the kernel, at a tenth of the cost; return False unless all was copied."""
    try:
        while length:
            count = os.copy_file_range(source, handle, length, start, at)
            if not count:
                return False
            start = start + count
            at = at + count
            length = length - count
    except (
        OSError,
        AttributeError,
    ):  # unsupported by the system or between two disks; the caller writes
        return False
    return True


def _new_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> "hashlib._Hash":
    return hashlib.sha256(f"{_LABELS[dtype]} {list(shape)}\n".encode())


def _blocks_of(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel():
        whole = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(whole), _BLOCK):
            yield whole[start : start + _BLOCK]


def _write_at(handle: int, content: bytes | bytearray | memoryview, at: int) -> None:
    left = memoryview(content)
    while left:
        count = os.pwrite(handle, left, at)
        left = left[count:]
        at = at + count


def _header_of(
    written: Mapping[str, TensorInfo], metadata: dict[str, str] | None
) -> bytes:
    record: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, info in written.items():
        size = prod(info.shape) * info.dtype.itemsize
        record[name] = {
            "dtype": _LABELS[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _move_data(path: Path, header: bytes, start: int) -> None:
    """Rewrite a file with a longer header; its data begin at `start`."""
    moved = path.with_name(f"{path.name}.moved")
    with path.open("rb") as old, moved.open("xb") as new:
        old.seek(start)
        new.write(header)
        shutil.copyfileobj(old, new, _BLOCK)
    moved.replace(path)
