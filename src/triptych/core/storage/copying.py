"""Atomic copying of a checkpoint's folder with some of its tensors replaced, in one pass.

The copy is written to a temporary folder next to the target, flushed to the disk and renamed. After a full
disk or a killed process, the target does not exist.
"""

import fnmatch
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, final

from triptych.core.storage.shards import OnWritten, Replacement, TensorHash, copy_shard
from triptych.core.storage.tensors import (
    PICKLED,
    PICKLED_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    TensorInfo,
    Tensors,
    open_tensors,
)
from triptych.errors import DataError, UsageError
from triptych.files import NewFolder, leads_to, write_json
from triptych.untrusted import read_json

CONFIG = "config.json"
# File next to a rewritten checkpoint, with the claims about it.
CERTIFICATE = "certificate.json"
# The same weights in other formats, and their files: they would contradict the copy.
_OTHER_WEIGHTS = (
    *(
        "*.h5",
        "*.msgpack",
        "*.onnx",
        "*.onnx_data",
        "*.ckpt",
        "*.ckpt.*",
        "*.gguf",
        "*.ot",
        "*.tflite",
    ),
    *("*.pt", "*.pth", "*.npz", "*.h5.index.json", "*.msgpack.index.json"),
)
# Patterns of the model's weights at the top level; in subfolders, such files have other purposes.
_WEIGHTS_AT_TOP = (
    "*.safetensors",
    "*.bin",
    "*.safetensors.index.json",
    "*.bin.index.json",
)
_OTHER_FOLDERS = ("onnx", "openvino", "coreml", "original", "gguf", "mlx")
_NOT_OF_A_CHECKPOINT = (".git", ".cache", "__pycache__", ".ipynb_checkpoints")


@final
class FolderCopy:
    """A copy of a checkpoint's folder; a context manager that removes it unless it is finished."""

    folder: Path  # folder of the copy; a temporary folder until it is finished
    left_out: tuple[
        str, ...
    ]  # files and folders left out, such as other formats of the weights

    def __init__(self, source: Path, target: Path) -> None:
        if sys.platform == "win32":
            raise UsageError("checkpoints are rewritten on POSIX systems only")
        self._layout = _layout(source)
        self._source, self._target = self._layout.folder, target.absolute()
        require_new_folder(self._source, self._target)
        # Links out of the folder are refused before anything is written.
        self.left_out, self._beside = _sort_files(self._layout)
        self.num_bytes = sum(
            info.num_bytes for info in self._layout.tensors.infos.values()
        )
        needed = self.num_bytes + sum(
            (self._source / name).stat().st_size for name in self._beside
        )
        free = shutil.disk_usage(self._target.parent).free
        if needed > free:
            raise UsageError(
                f"{target}: the copy takes {needed / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB free"
            )
        self._made = NewFolder(self._target)

    def __enter__(self) -> "FolderCopy":
        self.folder = self._made.__enter__().path
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._made.__exit__(kind, error, trace)

    @property
    def checkpoint(self) -> Path:
        """Path of the copied checkpoint: the folder of the copy, or its file if the source was a file."""
        return (
            self.folder / self._layout.weights if self._layout.single else self.folder
        )

    def write_shards(
        self, replacement: Replacement, on_written: OnWritten = lambda num_bytes: None
    ) -> dict[str, TensorHash]:
        """Copy the tensors, byte for byte unless they are replaced; return their hashes."""
        written = dict[str, dict[str, TensorInfo]]()
        hashes = dict[str, TensorHash]()
        for path, name in self._layout.shards.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            written[name], of_shard = copy_shard(
                path, self.folder / name, replacement, on_written
            )
            hashes |= of_shard
        self._write_index(written)
        return hashes

    def write_beside(self, settings: Mapping[str, Any]) -> None:
        """Copy all files but tensors, with some entries of the configuration changed.

        `settings`: new entries of the configuration, by dotted path.
        """
        for name in self._beside:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == CONFIG and settings:
                record = read_json(self._source / name)
                for entry, value in settings.items():
                    set_entry(record, entry, value)
                write_json(path, record)
            else:
                shutil.copyfile(self._source / name, path)

    def finish(self, extra: Mapping[str, bytes] | None = None) -> None:
        """Add files to the copy, flush it to the disk, and give it its name."""
        for name, content in (extra or {}).items():
            (self.folder / name).write_bytes(content)
        try:
            self._made.finish()
        except FileExistsError:
            raise UsageError(
                f"{self._target} was created meanwhile: choose another name"
            ) from None
        self.folder = self._target

    def _write_index(self, written: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        layout = self._layout
        if not layout.index:
            return
        # With unchanged names and shapes, the index is copied unchanged, unless names of files change.
        infos = dict(
            chain.from_iterable(of_shard.items() for of_shard in written.values())
        )
        shapes = {name: info.shape for name, info in layout.tensors.infos.items()}
        if layout.index != PICKLED_INDEX and shapes == {
            name: info.shape for name, info in infos.items()
        }:
            shutil.copyfile(self._source / layout.index, self.folder / layout.weights)
            return
        record = read_json(self._source / layout.index)
        shard_of = dict[str, str]()
        for name, of_shard in written.items():
            shard_of |= dict.fromkeys(of_shard, name)
        kept = [tensor for tensor in record["weight_map"] if tensor in shard_of]
        record["weight_map"] = {
            tensor: shard_of[tensor] for tensor in dict.fromkeys((*kept, *shard_of))
        }
        metadata = record.get("metadata")
        if isinstance(metadata, dict):
            numbers = {name: prod(info.shape) for name, info in infos.items()}
            if "total_size" in metadata:
                metadata["total_size"] = sum(
                    n * infos[name].dtype.itemsize for name, n in numbers.items()
                )
            if "total_parameters" in metadata:
                metadata["total_parameters"] = sum(numbers.values())
        write_json(self.folder / layout.weights, record)


def require_own(folder: Path, path: Path) -> None:
    """Check that a path is a file, or a link to a file in the folder or in its Hub cache."""
    if not path.is_file():
        raise DataError(f"{path} is not a regular file (a broken link?)")
    if not is_own(folder, path):
        raise DataError(
            f"{path} is a link out of the folder, to {leads_to(path)}: put the file itself there"
        )


def is_own(folder: Path, path: Path) -> bool:
    """Return True if a path in a folder resolves to a path in the folder, or in its Hub cache."""
    source = leads_to(folder)
    found = leads_to(path)
    cache = source.parent.parent / "blobs"
    return found.is_relative_to(source) or (
        source.parent.name == "snapshots" and found.parent == cache
    )


def require_new_folder(source: Path, target: Path) -> None:
    """Check that the target folder can be created, outside of the source."""
    target = target.absolute()
    if os.path.lexists(target):
        raise UsageError(f"{target} exists: give the name of a new folder")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: the folder {target.parent} does not exist")
    resolved = leads_to(target.parent) / target.name
    if resolved.is_relative_to(leads_to(source)):
        raise UsageError(
            f"{target} is inside {source}, which is copied: choose a folder outside"
        )


@final
@dataclass(frozen=True)
class _Layout:
    """The files with a checkpoint's tensors, and their names in a copy."""

    folder: Path  # folder of the checkpoint
    tensors: Tensors  # all tensors
    shards: dict[Path, str]  # names of the files in the copy, by file
    index: str  # name of the index in the source; "" without an index
    weights: str  # name of the whole file or of the index in the copy
    single: bool = False  # true if the source is a file, not a folder


def _layout(source: Path) -> _Layout:
    source = source.absolute()
    tensors = open_tensors(source)  # also checks the index, which is read again below
    if source.is_file():
        name = _in_safetensors(source.name)
        return _Layout(source.parent, tensors, {source: name}, "", name, single=True)
    for whole in (SAFETENSORS, PICKLED):
        index = SAFETENSORS_INDEX if whole == SAFETENSORS else PICKLED_INDEX
        if (source / whole).is_file():
            return _Layout(
                source, tensors, {source / whole: SAFETENSORS}, "", SAFETENSORS
            )
        if (source / index).is_file():
            named = dict.fromkeys(read_json(source / index)["weight_map"].values())
            shards = {source / shard: _in_safetensors(shard) for shard in named}
            if len(set(shards.values())) < len(shards):
                raise DataError(
                    f"{source / index}: two of its files would have one name as safetensors"
                )
            return _Layout(source, tensors, shards, index, SAFETENSORS_INDEX)
    raise AssertionError(f"{source} was opened, and has no tensors")


def _in_safetensors(name: str) -> str:
    """Return the name of a file after conversion to safetensors."""
    path = PurePosixPath(name)
    if path.suffix == ".safetensors":
        return path.as_posix()
    stem = path.stem
    stem = (
        "model" + stem.removeprefix("pytorch_model")
        if stem.startswith("pytorch_model")
        else stem
    )
    return path.with_name(f"{stem}.safetensors").as_posix()


def names_beside(source: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of files left out of a copy, and of files copied besides the tensors."""
    return _sort_files(_layout(source))


def _sort_files(layout: _Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    # Files to copy must be in the folder or in its Hub cache; files left out are not checked.
    left_out: list[str] = []
    beside: list[str] = []
    used = set(layout.shards)
    if layout.index:
        used.add(layout.folder / layout.index)
    for path in sorted(used):
        require_own(layout.folder, path)
    for path in _files_below(layout.folder, left_out):
        name = path.relative_to(layout.folder).as_posix()
        if path in used:
            continue
        patterns = (
            _OTHER_WEIGHTS if "/" in name else (*_OTHER_WEIGHTS, *_WEIGHTS_AT_TOP)
        )
        if any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in patterns):
            left_out.append(name)
            continue
        require_own(layout.folder, path)
        beside.append(name)
    return tuple(sorted(left_out)), tuple(sorted(beside))


def _files_below(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """Yield all files except in linked or unrelated folders; add these folders to `left_out`."""
    for parent, folders, names in os.walk(folder):
        for name in list(folders):
            path = Path(parent, name)
            if (
                path.is_symlink()
                or name in _NOT_OF_A_CHECKPOINT
                or name.lower() in _OTHER_FOLDERS
            ):
                folders.remove(name)
                left_out.append(f"{path.relative_to(folder).as_posix()}/")
        yield from (Path(parent, name) for name in names)


def set_entry(record: dict[str, Any], path: str, value: Any) -> None:
    """Set an entry of a configuration by its dotted path."""
    *above, last = path.split(".")
    for name in above:
        record = record.setdefault(name, {})
    record[last] = value
