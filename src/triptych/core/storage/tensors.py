"""Tensors of a checkpoint's files, read by name and one at a time.

Files are not trusted. This module reads and checks the header of a safetensors file, so that single tensors
can be fetched from a disk or a network.

Source: the format at github.com/huggingface/safetensors.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice, pairwise, takewhile
from math import prod
from pathlib import Path
from typing import Any, TypeGuard, final

import torch
from torch import Tensor

from triptych.core.storage.pickled import Pickled
from triptych.core.storage.tensor_file import TensorFile as TensorFile
from triptych.core.storage.tensor_file import TensorInfo as TensorInfo
from triptych.core.storage.tensor_file import (
    info_of,
    is_possible_shape,
    require_printable_name,
)
from triptych.core.storage.unreadable import what_is
from triptych.errors import DataError
from triptych.untrusted import (
    Bytes,
    LocalBytes,
    MappedBytes,
    parsed_json,
    read_json,
    shown,
    stays_in_folder,
)

# Dtypes by their names in a safetensors header.
STORED_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
# The limit of the format's own reader.
_LONGEST_HEADER = 100_000_000
SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
# Names in the order of Hugging Face's library; the whole file of a pair takes precedence over its index.
INDEX_AND_WHOLE = ((SAFETENSORS_INDEX, SAFETENSORS), (PICKLED_INDEX, PICKLED))


@final
class Safetensors(TensorFile):
    """A safetensors file. Only its header is kept in memory."""

    def __init__(self, source: Bytes) -> None:
        self.name = source.name
        self._source = source
        self.data_start, header = _header(source)
        self.metadata = header.get("__metadata__")
        self.infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            require_printable_name(name, self.name)
            self.infos[name], self._offsets[name] = self._entry(name, entry)
        self._refuse_overlaps()

    def read(self, name: str) -> Tensor:
        info = self.infos[name]
        return self._read_values(name, 0, info.num_bytes).reshape(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        rows, *rest = self.infos[name].shape
        stop = min(stop, rows)
        width = self.infos[name].num_bytes // max(rows, 1)
        return self._read_values(name, start * width, (stop - start) * width).reshape(
            stop - start, *rest
        )

    def _read_values(self, name: str, first: int, num_bytes: int) -> Tensor:
        dtype = self.infos[name].dtype
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        found = self._source.read(self.start(name) + first, num_bytes)
        return torch.frombuffer(found, dtype=dtype)

    def start(self, name: str) -> int:
        """Return the offset of a tensor's bytes in the file."""
        return self.data_start + self._offsets[name]

    def _entry(self, name: str, entry: Any) -> tuple[TensorInfo, int]:
        # The size follows twice from an entry, by its shape and by its offsets: both must agree.
        where = f"{self.name}, tensor {shown(name)}"
        if not isinstance(entry, dict):
            raise DataError(f"{where}: its header entry is no record")
        label = entry.get("dtype")
        shape = entry.get("shape")
        offsets = entry.get("data_offsets")
        if not isinstance(label, str) or label not in STORED_DTYPES:
            raise DataError(
                f"{where}: dtype {shown(label)} is not one of {', '.join(STORED_DTYPES)}"
            )
        if not _are_counts(shape):
            raise DataError(f"{where}: shape {shown(shape)} is not a list of sizes")
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise DataError(
                f"{where}: data_offsets {shown(offsets)} are not a start and an end"
            )
        if not is_possible_shape(shape):
            raise DataError(f"{where}: shape {shown(shape)} is not a valid shape")
        dtype = STORED_DTYPES[label]
        needed = prod(shape) * dtype.itemsize
        given = offsets[1] - offsets[0]
        if needed != given:
            raise DataError(
                f"{where}: {label} of shape {shown(shape)} takes {needed:,} bytes, and it has {shown(given)}"
            )
        if self.data_start + offsets[1] > self._source.size:
            raise DataError(
                f"{where}: it ends at byte {self.data_start + offsets[1]:,} of a file of "
                f"{self._source.size:,}: the file is truncated; fetch it again"
            )
        return TensorInfo(dtype, tuple(shape), given), offsets[0]

    def _refuse_overlaps(self) -> None:
        filled = [
            (start, start + self.infos[name].num_bytes, name)
            for name, start in self._offsets.items()
            if self.infos[name].num_bytes
        ]
        filled.sort()
        for (_, end, one), (start, _, other) in pairwise(filled):
            if start < end:
                raise DataError(
                    f"{self.name}: tensors {shown(one)} and {shown(other)} share bytes"
                )


@final
class InMemory(TensorFile):
    """Tensors in memory, which may replace tensors of a file."""

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], file: TensorFile | None = None
    ) -> None:
        self.name = name
        self._tensors = tensors
        self._file = file
        self.infos = {own: info_of(tensor) for own, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach().cpu()

    def packed_as(self, name: str) -> str:
        return "" if self._file is None else self._file.packed_as(name)


@final
class Tensors:
    """All tensors of a checkpoint, in one file or several."""

    def __init__(self, name: str, files: Mapping[str, TensorFile]) -> None:
        self.name = name
        self._files = dict(files)
        self.infos = {
            tensor: file.infos[tensor] for tensor, file in self._files.items()
        }
        self._names = sorted(self.infos)

    def holding(self, tensors: Mapping[str, Tensor]) -> "Tensors":
        """Return all tensors, with some of them replaced by tensors in memory."""
        files = dict(self._files)
        for name, tensor in tensors.items():
            files[name] = InMemory(files[name].name, {name: tensor}, files[name])
        return Tensors(self.name, files)

    def replacing(self, hidden: Collection[str], file: TensorFile) -> "Tensors":
        """Return all tensors except `hidden`, together with the tensors of a further file."""
        kept = {name: own for name, own in self._files.items() if name not in hidden}
        return Tensors(self.name, {**kept, **dict.fromkeys(file.infos, file)})

    def below(self, module: str) -> list[str]:
        """Return the names of the tensors of a module and of its submodules."""
        start = bisect_left(self._names, f"{module}.")
        return list(
            takewhile(
                lambda name: name.startswith(f"{module}."),
                islice(self._names, start, None),
            )
        )

    def read(self, name: str) -> Tensor:
        """Read a tensor in its stored dtype and shape."""
        return self._files[name].read(name)

    def read_part(self, name: str, dim: int, indices: Sequence[int]) -> Tensor:
        """Read some rows (`dim` 0) or columns (`dim` 1) of a matrix; only rows save reading the whole."""
        if dim:
            return self.read(name)[:, list(indices)]
        # Merge consecutive rows into runs: each run is a single read, perhaps over the network.
        file = self._files[name]
        runs = list[tuple[int, int]]()
        for index in indices:
            if runs and runs[-1][1] == index:
                runs[-1] = runs[-1][0], index + 1
            else:
                runs.append((index, index + 1))
        parts = [file.read_rows(name, start, stop) for start, stop in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def packed_as(self, name: str) -> str:
        return self._files[name].packed_as(name)

    def where(self, name: str) -> str:
        """Return the name of a tensor's file, for messages."""
        return self._files[name].name


def open_tensors(path: Path, *, mapped: bool = False) -> Tensors:
    """Open the tensors of a folder in Hugging Face's layout, or of one file.

    `path`: the folder or file. `mapped`: map safetensors files into memory instead of copying from them.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if not path.is_dir():
        return of_one(_open_file(path, mapped))
    for index, whole in INDEX_AND_WHOLE:
        if (path / whole).exists():
            return of_one(_open_file(path / whole, mapped))
        if (path / index).exists():
            return from_index(
                read_json(path / index),
                str(path / index),
                str(path),
                lambda shard: _open_file(path / shard, mapped),
            )
    raise DataError(
        f"{path}: no {SAFETENSORS}, {SAFETENSORS_INDEX}, {PICKLED} or {PICKLED_INDEX} in it: "
        f"{what_is(path) or 'is this the folder of a checkpoint?'}"
    )


def from_index(
    index: Mapping[str, Any],
    where: str,
    name: str,
    open_shard: Callable[[str], TensorFile],
) -> Tensors:
    """Open the tensors that an index distributes over shards."""
    # Index and shards must list the same tensors: check both directions.
    shard_of = index.get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise DataError(f"{where}: it has no weight_map from tensors to files")
    files: dict[str, TensorFile] = {}
    for tensor, shard in shard_of.items():
        if not isinstance(shard, str) or not stays_in_folder(shard):
            raise DataError(
                f"{where}: tensor {shown(tensor)} is in {shown(shard)}, which is no file of that folder"
            )
        if shard not in files:
            files[shard] = open_shard(shard)
        if tensor not in files[shard].infos:
            raise DataError(
                f"{where}: {shown(shard)} does not hold tensor {shown(tensor)}"
            )
    for shard, file in files.items():
        if unlisted := [
            tensor for tensor in file.infos if shard_of.get(tensor) != shard
        ]:
            raise DataError(
                f"{where}: {shown(shard)} holds tensor {shown(unlisted[0])}, which is not listed for it"
            )
    return Tensors(name, {tensor: files[shard] for tensor, shard in shard_of.items()})


def _header(source: Bytes) -> tuple[int, dict[str, Any]]:
    """Return the offset of the data in a safetensors file, and its header."""
    if source.size < 8:
        raise DataError(
            f"{source.name}: {source.size} bytes are no safetensors file; fetch it again"
        )
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > source.size - 8:
        raise DataError(
            f"{source.name}: its header should have {length:,} bytes, and the file has {source.size:,}: "
            "it is truncated or no safetensors file; fetch it again"
        )
    if length > _LONGEST_HEADER:
        raise DataError(
            f"{source.name}: a header of {length:,} bytes is past {_LONGEST_HEADER:,}"
        )
    return 8 + length, parsed_json(bytes(source.read(8, length)), source.name)


def _open_file(path: Path, mapped: bool) -> TensorFile:
    if found := what_is(path):
        raise DataError(f"{path}: {found}")
    if path.suffix != ".safetensors":
        return Pickled(path)
    return Safetensors(MappedBytes(path) if mapped else LocalBytes(path))


def of_one(file: TensorFile) -> Tensors:
    """Return the tensors of a checkpoint in one file."""
    return Tensors(file.name, dict.fromkeys(file.infos, file))


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
    )
