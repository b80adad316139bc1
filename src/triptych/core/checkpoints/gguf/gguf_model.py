"""A GGUF file as a checkpoint: its configuration, tokenizer and tensors in the format of `transformers`."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from triptych.core.checkpoints.family import family_of
from triptych.core.checkpoints.gguf.architectures import Architecture, Joined
from triptych.core.checkpoints.gguf.metadata import (
    find_architecture,
    read_configuration,
    unfollowed,
)
from triptych.core.checkpoints.gguf.names import expert_name, names_in_transformers
from triptych.core.checkpoints.gguf.row_orders import (
    Heads,
    Layout,
    join,
    layout_of,
)
from triptych.core.checkpoints.gguf.token_lists import (
    Vocabulary,
    has_vocabulary,
    token_ids,
)
from triptych.core.checkpoints.written_files import WrittenFiles
from triptych.core.storage.gguf import SHARD, SUFFIX, Gguf, shards_of
from triptych.core.storage.hub import fetch_files
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import (
    InMemory,
    TensorFile,
    TensorInfo,
    Tensors,
    of_one,
)
from triptych.errors import ConfigurationWarning, DataError, UsageError
from triptych.extras import require_extra
from triptych.files import write_json, write_text
from triptych.untrusted import LocalBytes, MappedBytes, Stamps, shown

# Tensors of values stored as configuration fields in `transformers`.
_OF_POSITIONS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
_STACKED = "_exps."


_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "num_transformer_layers",
)


@final
class GgufModel(WrittenFiles):
    """A model in a GGUF file, or in several; its files for `transformers` are made when they are needed."""

    has_tokenizer: bool

    def __init__(self, path: Path, name: str) -> None:
        require_extra("gguf", "gguf", what="a GGUF file")
        self.path = path
        self.name = name
        self._paths = _present(path)
        # Taken before the headers are read, so that a later change of a file is noticed.
        self._stamps = Stamps(self._paths)
        self._files = {one: Gguf(LocalBytes(one)) for one in self._paths}
        first = next(iter(self._files.values()))
        self.metadata = first.metadata
        self._tensors = of_several(list(self._files.values()), name)
        self.has_tokenizer = has_vocabulary(self.metadata)
        self.architecture, settings = find_architecture(
            self.metadata, name, frozenset(self._tensors.infos)
        )
        shapes = {own: info.shape for own, info in self._tensors.infos.items()}
        self.record = read_configuration(
            self.architecture, settings, shapes, self._vector
        )
        self.record |= token_ids(self.metadata)
        if strange := unfollowed(self.architecture, settings):
            warnings.warn(
                f"{name}: its metadata has {', '.join(strange)} of {self.architecture.name}, which is not "
                "followed",
                ConfigurationWarning,
                stacklevel=2,
            )

    def require_same(self) -> None:
        """Check that the files are unchanged since they were opened."""
        self._stamps.require_same()

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Open the tensors under their names in `transformers`; a tensor is unpacked when it is read."""
        self.require_same()
        files = self._files.items()
        read = [
            file.through(MappedBytes(path)) if mapped else file for path, file in files
        ]
        return in_transformers(
            of_several(read, self.name), self.architecture, self.record, self.metadata
        )

    def write_beside(self, folder: Path) -> None:
        write_json(folder / "config.json", self.record)
        if self.has_tokenizer:
            for name, content in Vocabulary(self.metadata, self.name).files().items():
                write_text(folder / name, content)

    def _vector(self, name: str) -> list[float]:
        if len(self._tensors.infos[name].shape) != 1:
            raise DataError(f"{self.name}: tensor {name} is no vector")
        return [float(number) for number in self._tensors.read(name).tolist()]


def of_several(files: list[Gguf], name: str) -> Tensors:
    """Return the tensors of the files of a model."""
    found: dict[str, TensorFile] = {}
    for file in files:
        for tensor in file.infos:
            if tensor in found:
                raise DataError(
                    f"{file.name}: tensor {shown(tensor)} is in another file of the model, too"
                )
            found[tensor] = file
    return Tensors(name, found)


def _present(path: Path) -> list[Path]:
    found = list(shards_of(path))
    if missing := [one.name for one in found if not one.is_file()]:
        raise DataError(
            f"{path}: of its {len(found)} files {missing[0]} is missing: fetch it, too"
        )
    return found


def fetch_gguf(hub_id: str, file: str, *, offline: bool = False) -> Path:
    """Download a GGUF file from the Hub, with the further files of its model; return its path."""
    folder = fetch_files(
        hub_id, [shard.name for shard in shards_of(Path(file))], offline=offline
    )
    return folder / file


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder, or None. Raises UsageError if the folder has several models."""
    found = sorted(
        path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("mmproj")
    )
    firsts = [
        path
        for path in found
        if (shard := SHARD.fullmatch(path.name)) is None or int(shard["number"]) == 1
    ]
    if len(firsts) > 1:
        names = ", ".join(shown(path.name) for path in firsts[:4])
        raise UsageError(
            f"{folder}: it holds {len(firsts)} models in GGUF ({names}): give the file of one"
        )
    return firsts[0] if firsts else None


def in_transformers(
    tensors: Tensors,
    architecture: Architecture,
    record: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> Tensors:
    """Return the tensors of a GGUF file under the names, and in the layouts, of `transformers`."""
    renamed = of_one(_Renamed(tensors, architecture, record))
    if not architecture.listed:
        return renamed
    lists = dict[str, Tensor]()
    for entry in architecture.listed:
        found = metadata.get(entry.key)
        values = found if isinstance(found, list) else []
        layers = record["num_hidden_layers"]
        are_numbers = all(isinstance(one, int | float) for one in values)
        if len(values) != layers or not are_numbers:
            raise DataError(
                f"{tensors.name}: {entry.key} is no list of {layers} numbers, one of each layer"
            )
        for layer, value in enumerate(values):
            name = f"{architecture.prefix}{entry.name.format(layer=layer)}"
            lists[name] = torch.full(entry.shape, float(value))
    return renamed.replacing(lists.keys(), InMemory(tensors.name, lists))


@final
class _Renamed(TensorFile):
    """Tensors of a GGUF file by their names in `transformers`."""

    def __init__(
        self,
        tensors: Tensors,
        architecture: Architecture,
        record: Mapping[str, Any],
    ) -> None:
        family = family_of(architecture.model_type)
        assert family is not None, architecture.model_type
        name = tensors.name
        self.name = name
        self._tensors = tensors
        # name in the file, number of the expert in a stack, and layout, by name in `transformers`
        self._stored: dict[str, tuple[str, int | None, Layout]] = {}
        self.infos = {}
        heads = _heads(record)
        self._heads = heads
        settings = Settings(record, name)
        layers = max(record[key] for key in _LAYERS if key in record)
        stored = [own for own in tensors.infos if own not in _OF_POSITIONS]
        self._joined: dict[str, tuple[Joined, dict[str, Layout]]] = {}
        for joined in architecture.joined:
            stored = self._join(joined, stored, architecture, settings)
        names = names_in_transformers(architecture, int(layers), family, stored)
        for own in stored:
            if own not in names:
                raise DataError(
                    f"{name}: tensor {shown(own)} is none that {family.name} has: such models of "
                    f"{architecture.name} "
                    "are not read"
                )
            layout = layout_of(architecture, own, heads, settings)
            for there, expert, info in self._infos(own, names[own]):
                if layout.transposed:
                    # Shapes follow `transformers`; `read` converts the values.
                    info = TensorInfo(
                        info.dtype, tuple(reversed(info.shape)), info.num_bytes
                    )
                self._stored[there] = own, expert, layout
                self.infos[there] = info

    def _join(
        self,
        joined: Joined,
        stored: list[str],
        architecture: Architecture,
        settings: Settings,
    ) -> list[str]:
        """Enter joined tensors of `transformers`; return the names of all other tensors."""
        used: set[str] = set()
        for first in stored:
            layer = first.removeprefix("blk.").removesuffix(f".{joined.parts[0]}")
            parts = [f"blk.{layer}.{part}" for part in joined.parts]
            # Files may have the joint tensor instead, or other tensors in this layer.
            if parts[0] != first or not all(
                one in self._tensors.infos for one in parts
            ):
                continue
            name = f"{architecture.prefix}{joined.name.format(layer=layer)}"
            self._joined[name] = (
                joined,
                {
                    part: layout_of(architecture, part, self._heads, settings)
                    for part in parts
                },
            )
            infos = [self._tensors.infos[part] for part in parts]
            shapes = [torch.empty(info.shape, device="meta") for info in infos]
            whole = self._whole(name, dict(zip(parts, shapes, strict=True)))
            size = sum(info.num_bytes for info in infos)
            self.infos[name] = TensorInfo(infos[0].dtype, tuple(whole.shape), size)
            used.update(parts)
        return [name for name in stored if name not in used]

    def _whole(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        joined, layouts = self._joined[name]
        try:
            read = [layouts[part].read(tensor) for part, tensor in parts.items()]
            return join(joined, read, self._heads)
        except (RuntimeError, IndexError):
            shapes = ", ".join(str(list(part.shape)) for part in parts.values())
            raise DataError(
                f"{self.name}: tensors {', '.join(parts)} of shapes {shapes} do not fit each other"
            ) from None

    def _infos(
        self, own: str, there: str
    ) -> Iterator[tuple[str, int | None, TensorInfo]]:
        info = self._tensors.infos[own]
        if _STACKED not in own:
            yield there, None, info
            return
        experts, *rest = info.shape
        for expert in range(experts):
            yield (
                expert_name(there, expert),
                expert,
                TensorInfo(info.dtype, tuple(rest), info.num_bytes // experts),
            )

    def read(self, name: str) -> Tensor:
        if name in self._joined:
            parts = self._joined[name][1]
            return self._whole(name, {one: self._tensors.read(one) for one in parts})
        own, expert, layout = self._stored[name]
        found = (
            self._tensors.read(own)
            if expert is None
            else self._tensors.read_part(own, 0, [expert])[0]
        )
        try:
            return layout.read(found)
        except RuntimeError:
            raise DataError(
                f"{self.name}: tensor {own} of shape {list(found.shape)} does not fit the heads of its "
                "metadata"
            ) from None

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._joined:
            return self.read(name)[start:stop]
        own, expert, layout = self._stored[name]
        if expert is None and layout.keeps_rows:
            return layout.read(
                self._tensors.read_part(
                    own, 0, range(start, min(stop, self.infos[name].shape[0]))
                )
            )
        return self.read(name)[start:stop]


_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


def _heads(record: Mapping[str, Any]) -> Heads:
    queries = next((record[key] for key in _HEADS if key in record), 1)
    keys = next((record[key] for key in _KEY_HEADS if key in record), None)
    if isinstance(queries, list) and isinstance(keys, list):
        # Heads of each layer: no layout of such models depends on them.
        return Heads(1, 1)
    if keys is None:
        keys = 1 if record.get("multi_query") else queries
    if not all(
        isinstance(count, int) and 1 <= count <= 1 << 20 for count in (queries, keys)
    ):
        raise DataError(
            f"its metadata have {shown(queries)} heads and {shown(keys)} of keys"
        )
    return Heads(queries, keys)
