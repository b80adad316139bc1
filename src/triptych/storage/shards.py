"""Copy files of tensors with some of the tensors replaced. Each byte is read once and hashed.

A safetensors file keeps its header, byte for byte unless a shape changes, and the order of its tensors. A
pickled file becomes a safetensors file.
"""

import errno
import hashlib
import json
import os
import shutil
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from triptych.errors import DataError
from triptych.storage.tensors import STORED_DTYPES, Pickled, Safetensors, TensorInfo
from triptych.storage.untrusted import LocalBytes

Replacement = Callable[[str], Tensor | None]
OnWritten = Callable[[int], None]
"""Called now and then with how many more bytes are written."""

_LABELS = {dtype: label for label, dtype in STORED_DTYPES.items()}
_BLOCK = 1 << 20
# What a system says that does not copy from file to file by itself, or not between these two.
_CANNOT_COPY = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
# What the system keeps of files in memory is given back after so many bytes: what a copy goes through once
# would push out everything else, and fresh memory costs more than the copying itself.
_MOST_KEPT = 256 << 20
# Tensors that wait to be copied or written; bytes in memory of those that replace others.
_MOST_WAITING, _MOST_HELD = 64, 256 << 20


class TensorHash(NamedTuple):
    """sha256 of a tensor as it was read and as it was written; see `tensor_hash`."""

    read: str
    written: str


def tensor_hash(tensor: Tensor) -> str:
    """sha256, in hexadecimal digits, of a line with dtype and shape (`F32 [2, 3]`) and the raw bytes.

    It does not depend on the file format: dtypes are named as in safetensors, and bytes are row-major and
    little-endian.
    """
    found = _begun(tensor.dtype, tuple(tensor.shape))
    for block in _blocks_of(tensor):
        found.update(block)
    return found.hexdigest()


class Shard(ABC):
    """A file of tensors to copy.

    Attributes:
        path: of the file.
        infos: of its tensors, in the order in which they are written.
    """

    path: Path
    infos: dict[str, TensorInfo]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.infos.items()}

    @abstractmethod
    def header(self, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
        """The header of the file for tensors of some shapes, preceded by its length."""

    @abstractmethod
    def blocks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in pieces. A piece is valid until the next one is requested."""

    def where(self, name: str) -> tuple[int, int] | None:
        """An open file and the offset of a tensor's bytes in it; None if no file has them so."""
        return None

    def forget(self, name: str) -> None:
        """Release the page cache of a tensor's bytes."""
        if (place := self.where(name)) is not None:
            _forget(*place, self.infos[name].num_bytes)

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


@final
class SafetensorsShard(Shard):
    """A safetensors file, read by blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = Safetensors(LocalBytes(path))
        infos = self._file.infos
        ordered = sorted(infos, key=lambda name: (self._file.start(name), infos[name].num_bytes))
        self.infos = {name: infos[name] for name in ordered}
        self._handle = os.open(path, os.O_RDONLY)

    def header(self, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
        end, sizes = self._file.data_start, [info.num_bytes for info in self.infos.values()]
        expected = accumulate(sizes, initial=end)  # without holes between them
        adjoin = all(self._file.start(name) == at for name, at in zip(shapes, expected, strict=False))
        if adjoin and dict(shapes) == self.shapes:
            return os.pread(self._handle, end, 0)
        return _header_of(shapes, self.infos, self._file.metadata)

    def blocks(self, name: str) -> Iterator[memoryview]:
        start, left = self._file.start(name), self.infos[name].num_bytes
        buffer = memoryview(bytearray(min(_BLOCK, left)))
        while left:
            count = os.preadv(self._handle, [buffer[: min(left, len(buffer))]], start)
            if not count:
                raise DataError(f"{self.path}, tensor {name}: the file has become shorter")
            yield buffer[:count]
            start, left = start + count, left - count

    def where(self, name: str) -> tuple[int, int]:
        return self._handle, self._file.start(name)

    def close(self) -> None:
        os.close(self._handle)


@final
class PickledShard(Shard):
    """An old torch file with memory-mapped tensors, which is written as safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = Pickled(path)
        infos = self._file.infos
        strange = next((name for name, info in infos.items() if info.dtype not in _LABELS), None)
        if strange is not None:
            raise DataError(
                f"{path}, tensor {strange}: safetensors has no {infos[strange].dtype}".replace("torch.", "")
            )
        # As safetensors' own writer has them: every tensor then begins at a multiple of its entries' size.
        ordered = sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name))
        self.infos = {name: infos[name] for name in ordered}

    def header(self, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
        return _header_of(shapes, self.infos, {"format": "pt"})

    def blocks(self, name: str) -> Iterator[memoryview]:
        return _blocks_of(self._file.read(name))

    def close(self) -> None:
        """Do nothing: the mapping ends with the object."""


@final
class _Copy:
    """A file that is being copied.

    Attributes:
        shard: the source.
        target: the path of the copy.
        handle: the open copy.
        room: bytes reserved for the header.
        shapes: the current shapes of the tensors.
        waiting: tensors that are not yet written.
    """

    def __init__(self, shard: Shard, target: Path) -> None:
        self.shard, self.target = shard, target
        self.handle: int | None = None
        self.room = 0
        self.shapes = dict(shard.shapes)
        self.waiting: set[Future[None]] = set()

    def close(self) -> None:
        self.shard.close()
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


@final
class ShardCopier:
    """Copies files of tensors, several tensors at a time.

    The next file is begun while the last tensors of a file are copied.
    """

    def __init__(self, replacement: Replacement, on_written: OnWritten) -> None:
        self.hashes: dict[str, TensorHash] = {}
        self._replacement, self._on_written = replacement, on_written
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
        self._beside = ThreadPoolExecutor(1)  # has what is written on the disk while more is copied
        self._giving_back: Future[None] | None = None
        self._lock, self._stopped = threading.Lock(), False
        self._copies: list[_Copy] = []
        self._held: dict[Future[None], int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._syncing: list[Future[None]] = []
        self._kept = 0

    def copy(self, shard: Shard, target: Path) -> None:
        """Copy one file."""
        copy = _Copy(shard, target)
        self._copies.append(copy)
        header = shard.header(shard.shapes)
        copy.handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        copy.room = len(header)
        _write_at(copy.handle, header, 0)
        self._copy_tensors(copy, copy.handle)
        while len(self._copies) > 1:
            self._complete_first()

    def finish(self) -> dict[str, tuple[int, ...]]:
        """Wait until everything is on the disk."""
        while self._copies:
            self._complete_first()
        for future in (*self._syncing, *([self._giving_back] if self._giving_back else [])):
            future.result()
        return self._shapes

    def close(self) -> None:
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)
        self._beside.shutdown()
        for copy in self._copies:
            copy.close()

    def _complete_first(self) -> None:
        """Wait for the tensors of a file, and write its header."""
        copy = self._copies[0]
        _drained(copy.waiting, 0)
        assert copy.handle is not None
        header = copy.shard.header(copy.shapes)
        fits = copy.shapes == copy.shard.shapes or _fit_header(copy.handle, header, copy.room)
        copy.close()
        del self._copies[0]
        if not fits:
            _move_data(copy.target, header, copy.room)
        self._shapes |= copy.shapes
        self._syncing.append(self._beside.submit(_sync_and_forget, os.open(copy.target, os.O_RDONLY)))

    def _copy_tensors(self, copy: _Copy, handle: int) -> None:
        """Copy all tensors in order. The last of them may still be copied when this returns."""
        shard, at = copy.shard, copy.room
        for name in shard.shapes:
            copy.waiting = _drained(copy.waiting, _MOST_WAITING)
            new = self._replacement(name)
            if new is None:
                copy.waiting.add(self._pool.submit(self._copy, shard, name, handle, at))
                at += shard.infos[name].num_bytes
                continue
            if new.dtype != shard.infos[name].dtype:
                raise ValueError(
                    f"{name} is {_LABELS[shard.infos[name].dtype]}, and what replaces it {new.dtype}"
                )
            copy.shapes[name] = tuple(new.shape)
            future = self._pool.submit(self._replace, shard, name, new, handle, at)
            copy.waiting.add(future)
            self._held[future] = new.nbytes
            at += new.nbytes
            del new, future
            self._write_held()

    def _write_held(self) -> None:
        """Wait until little enough is in memory waiting to be written."""
        while True:
            self._held = {future: size for future, size in self._held.items() if not future.done()}
            if sum(self._held.values()) <= _MOST_HELD:
                return
            wait(self._held, return_when=FIRST_COMPLETED)

    def _copy(self, shard: Shard, name: str, handle: int, at: int) -> None:
        found, where, done = _begun(shard.infos[name].dtype, shard.infos[name].shape), shard.where(name), 0
        for block in self._going_on(shard.blocks(name)):
            found.update(block)
            if where is None or not _copy_range(where[0], where[1] + done, handle, at + done, len(block)):
                where = None
                _write_at(handle, block, at + done)
            done += len(block)
            self._tell(len(block), handle)
        shard.forget(name)
        digits = found.hexdigest()
        self.hashes[name] = TensorHash(digits, digits)

    def _replace(self, shard: Shard, name: str, new: Tensor, handle: int, at: int) -> None:
        read = _begun(shard.infos[name].dtype, shard.infos[name].shape)
        for block in self._going_on(shard.blocks(name)):
            read.update(block)
        written = _begun(new.dtype, tuple(new.shape))
        for block in self._going_on(_blocks_of(new)):
            written.update(block)
            _write_at(handle, block, at)
            at += len(block)
            self._tell(len(block), handle)
        shard.forget(name)
        self.hashes[name] = TensorHash(read.hexdigest(), written.hexdigest())

    def _tell(self, num_bytes: int, handle: int) -> None:
        with self._lock:
            self._on_written(num_bytes)
            self._kept += num_bytes
            enough = self._kept > _MOST_KEPT
            if not enough:
                return
            self._kept = 0
            before, self._giving_back = (
                self._giving_back,
                self._beside.submit(_sync_and_forget, os.dup(handle)),
            )
        if before is not None:
            before.result()  # the disk is no further behind than that

    def _going_on(self, blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        """Yield the blocks; raise an error once another tensor has failed."""
        for block in blocks:
            if self._stopped:
                raise InterruptedError("stopped")
            yield block


def _sync_and_forget(handle: int) -> None:
    """Flush a file to the disk, release its page cache, and close it."""
    try:
        os.fsync(handle)
        _forget(handle)
    finally:
        os.close(handle)


def _forget(handle: int, start: int = 0, length: int = 0) -> None:
    """Release the page cache of a part of a file, to its end if the length is 0."""
    if sys.platform == "linux":
        os.posix_fadvise(handle, start, length, os.POSIX_FADV_DONTNEED)


def _begun(dtype: torch.dtype, shape: tuple[int, ...]) -> "hashlib._Hash":
    return hashlib.sha256(f"{_LABELS[dtype]} {list(shape)}\n".encode())


def _blocks_of(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel():
        whole = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(whole), _BLOCK):
            yield whole[start : start + _BLOCK]


def _drained(futures: set[Future[None]], most: int) -> set[Future[None]]:
    """Wait until at most a number of futures are left; raise the error of one that failed."""
    while len(futures) > most:
        done, futures = wait(futures, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
    return futures


def _write_at(handle: int, content: bytes | memoryview, at: int) -> None:
    left = memoryview(content)
    while left:
        count = os.pwrite(handle, left, at)
        left, at = left[count:], at + count


def _copy_range(source: int, start: int, handle: int, at: int, length: int) -> bool:
    """Copy from file to file in the kernel, at a tenth of the cost of writing; returns whether it worked."""
    if sys.platform != "linux":
        return False
    while length:
        try:
            count = os.copy_file_range(source, handle, length, start, at)
        except OSError as error:
            if error.errno in _CANNOT_COPY:
                return False
            raise
        if not count:
            return False
        start, at, length = start + count, at + count, length - count
    return True


def _header_of(
    shapes: Mapping[str, tuple[int, ...]], infos: Mapping[str, TensorInfo], metadata: dict[str, str] | None
) -> bytes:
    record: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, shape in shapes.items():
        dtype = infos[name].dtype
        size = prod(shape) * dtype.itemsize
        record[name] = {"dtype": _LABELS[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _fit_header(handle: int, header: bytes, room: int) -> bool:
    """Overwrite a header, padded with blanks; returns whether there was room."""
    if len(header) > room:
        return False
    _write_at(handle, struct.pack("<Q", room - 8) + header[8:] + b" " * (room - len(header)), 0)
    return True


def _move_data(path: Path, header: bytes, start: int) -> None:
    """Move the data of a file to make room for a longer header."""
    moved = path.with_name(f"{path.name}.moved")
    with path.open("rb") as old, moved.open("xb") as new:
        old.seek(start)
        new.write(header)
        shutil.copyfileobj(old, new, _BLOCK)
    moved.replace(path)
