"""A base model with adapters as one checkpoint; each tensor is merged when it is read."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from triptych.core.checkpoints.adapters.adapted_module import AdapterInMemory
from triptych.core.checkpoints.adapters.adapter import (
    EMBEDDINGS,
    HEADS,
    Adapter,
    AdapterFolder,
)
from triptych.core.checkpoints.made_files import TOKENIZER, MadeFiles, WithAndWithout
from triptych.core.checkpoints.written_files import (
    WrittenFiles,
    tokenizer_files,
)
from triptych.core.storage.quantised import dequantised
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import TensorFile, TensorInfo, Tensors, of_one
from triptych.errors import DataError
from triptych.files import write_json
from triptych.untrusted import shown

_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".index.json",
    ".gguf",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".onnx",
)


@final
class AdaptedModel(WrittenFiles):
    """A base with adapters, merged one after another; its files are made when they are needed."""

    def __init__(
        self, base: Any, adapters: Sequence[AdapterFolder | AdapterInMemory]
    ) -> None:
        self.base = base  # a `Source`, whose module imports this one
        self._adapters = adapters
        self.is_in_memory = base.is_in_memory
        self.folders = [one.folder for one in adapters if one.folder is not None]
        self.adapters = [one.adapter for one in self._adapters]
        self.adapter_names = tuple(adapter.name for adapter in self.adapters)
        self.record = self._merged(self.base_tensors())[1]
        made = base.found
        self.has_tokenizer = (
            not isinstance(made, MadeFiles)
            or made.has_tokenizer
            or bool(self._own_tokenizer)
        )

    def require_same(self) -> None:
        """Check that base and adapters are unchanged since they were opened."""
        self.base.require_same()
        for one in self._adapters:
            one.require_same()

    def base_tensors(self, *, mapped: bool = False) -> Tensors:
        """Open the tensors of the base, dequantised."""
        return dequantised(
            self.base.tensors(mapped=mapped),
            Settings(dict(self.base.record), self.base.where),
        )

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Open the tensors of the base with merged adapters."""
        self.require_same()
        return self._merged(self.base_tensors(mapped=mapped))[0]

    def in_double(self) -> WithAndWithout:
        """Open the tensors of the base without and with the adapters, in float64."""
        self.require_same()
        base = of_one(_InDouble(self.base_tensors()))
        return WithAndWithout(self.adapter_names, base, self._merged(base)[0])

    def _merged(self, tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors and the configuration with all adapters."""
        base = tensors
        record = {**self.base.record}
        record.pop("quantization_config", None)  # merged tensors are not quantised
        for adapter in self.adapters:
            merged = _Merged(tensors, adapter, record, base)
            record = merged.record
            tensors = of_one(merged)
        return tensors, record

    def write_beside(self, folder: Path) -> None:
        _copy(_beside_weights(self.base.settings_folder), folder)
        if self._own_tokenizer:
            for name in TOKENIZER:
                (folder / name).unlink(missing_ok=True)
            _copy(self._own_tokenizer, folder)
        write_json(folder / "config.json", self.record)

    @property
    def _own_tokenizer(self) -> list[Path]:
        """Files of the tokenizer in the last folder with a tokenizer."""
        found = (tokenizer_files(folder) for folder in reversed(self.folders))
        return next((files for files in found if files), [])


def _beside_weights(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.endswith(_WEIGHTS)
    ]


def _copy(files: Iterable[Path], target: Path) -> None:
    for path in files:
        shutil.copyfile(path, target / path.name)


@final
class _Merged(TensorFile):
    """The tensors of a model with an adapter merged.

    Attributes:
        record: configuration of the model with the adapter.
    """

    def __init__(
        self,
        tensors: Tensors,
        adapter: Adapter,
        record: Mapping[str, Any],
        base: Tensors,
    ) -> None:
        self.name = tensors.name
        self._base = base  # without other adapters
        self.record = dict(record)
        self._tensors = tensors
        self._adapter = adapter
        self._sources: dict[str, str] = {name: name for name in tensors.infos}
        self._saved: dict[str, str] = {}
        self._modules: dict[
            str, str
        ] = {}  # modules of the adapter by the names of weights
        self._biases: dict[str, str] = {}
        self._transposed: set[str] = set()
        self._skipped = ""
        self.infos = dict(tensors.infos)
        self._untie()
        for name, stored in adapter.saved.items():
            if stored != self._skipped:
                self._replace(name, stored)
        for module in adapter.modules:
            self._adapt(module)
        # A merged tensor depends on several stored tensors, and is not quantised.
        self.infos = {name: _plain(info) for name, info in self.infos.items()}

    def read(self, name: str) -> Tensor:
        found = self._unadapted(name)
        module = self._modules.get(name)
        if module is not None:
            factors = self._adapter.factors(module)
            base = self._base.read(name) if self._is_from_base(name) else found
            if name in self._transposed:
                return self._as_stored(name, factors.added(found.mT, base.mT).mT)
            return self._as_stored(name, factors.added(found, base))
        bias = self._adapter.bias(self._biases[name]) if name in self._biases else None
        if bias is None:
            return found
        dtype = torch.promote_types(found.dtype, torch.float32)
        return self._as_stored(name, found.to(dtype) + bias.to(dtype))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        module = self._modules.get(name)
        if name in self._saved or name in self._biases or name in self._transposed:
            return self.read(name)[start:stop]
        stop = min(stop, self.infos[name].shape[0])
        found = self._tensors.read_part(self._sources[name], 0, range(start, stop))
        if module is None:
            return found
        base = (
            self._base.read_part(name, 0, range(start, stop))
            if self._is_from_base(name)
            else found
        )
        return self._as_stored(
            name, self._adapter.factors(module).added(found, base, slice(start, stop))
        )

    def _is_from_base(self, name: str) -> bool:
        """Return True for a map whose form before all adapters has to be read from the base."""
        return (
            name in self._base.infos
            and self._base is not self._tensors
            and name not in self._saved
        )

    def _unadapted(self, name: str) -> Tensor:
        if name in self._saved:
            return self._as_stored(name, self._adapter.read(self._saved[name]))
        return self._tensors.read(self._sources[name])

    def _as_stored(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(self.infos[name].dtype).contiguous()

    def _untie(self) -> None:
        """Untie the output layer if the adapter changes the output layer or the embedding alone."""
        if self.record.get("tie_word_embeddings") is False:
            return
        adapter = self._adapter
        saved = {_module(name): stored for name, stored in adapter.saved.items()}
        head = next((saved[one] for one in HEADS if one in saved), None)
        embedding = next((saved[one] for one in EMBEDDINGS if one in saved), None)
        has_head = any(_module(name) in HEADS for name in self.infos)
        if (
            head
            and embedding
            and torch.equal(adapter.read(head), adapter.read(embedding))
        ):
            self._skipped = "" if has_head else head
            return
        if not (
            head
            or adapter.saves_untied(EMBEDDINGS)
            or adapter.adapts((*HEADS, *EMBEDDINGS))
        ):
            return  # the tied output layer shares the replaced embedding
        tables = [name for name in self.infos if _module(name) in EMBEDDINGS]
        if not has_head and len(tables) == 1:
            new = (
                "embed_out.weight"
                if _module(tables[0]) == "embed_in"
                else "lm_head.weight"
            )
            self._sources[new] = tables[0]
            self.infos[new] = self.infos[tables[0]]
            if embedding and not adapter.saves_untied(EMBEDDINGS):
                self._replace(new, embedding)
        self.record["tie_word_embeddings"] = False

    # Replaces a tensor of the model by a tensor of the adapter.
    def _replace(self, name: str, stored: str) -> None:
        own = self._named(name)
        if own is None:
            raise DataError(
                f"{self._adapter.name}: {shown(name)} is saved whole, and {self.name} has no tensor of that "
                "name: is it an adapter of this model?"
            )
        before = self.infos[own]
        shape = self._adapter.shape_of(stored)
        if shape != before.shape:
            self._resize(name, before.shape, shape)
        self._saved[own] = stored
        self.infos[own] = TensorInfo(before.dtype, shape, before.num_bytes)

    def _resize(
        self, name: str, before: tuple[int, ...], shape: tuple[int, ...]
    ) -> None:
        """Follow an embedding, or an output layer, with rows for other tokens."""
        tokens = self.record.get("vocab_size")
        if (
            len(shape) != len(before)
            or shape[1:] != before[1:]
            or tokens not in (before[0], shape[0])
        ):
            raise DataError(
                f"{self._adapter.name}: {shown(name)} has shape {[*shape]}, and that of {self.name} "
                f"{[*before]}: it is an adapter of another model"
            )
        self.record["vocab_size"] = shape[0]

    # Adds the factors, and the bias, of a module to its tensors.
    def _adapt(self, module: str) -> None:
        adapter = self._adapter
        own = self._named(f"{module}.weight")
        if own is None:
            raise DataError(
                f"{adapter.name}: it adapts {shown(module)}, and {self.name} has no tensor of that name: is "
                "it an adapter of this model?"
            )
        shape = adapter.shape(module)
        stored = self.infos[own].shape
        is_transposed = adapter.is_transposed and not adapter.is_embedding(module)
        if shape[0] != shape[1] and stored == shape:
            is_transposed = False
        if stored != (tuple(reversed(shape)) if is_transposed else shape):
            raise DataError(
                f"{adapter.name}: {shown(module)} maps {shape[1]} channels to {shape[0]}, and its tensor in "
                f"{self.name} has shape {[*stored]}: it is an adapter of another model"
            )
        self._modules[own] = module
        if is_transposed:
            self._transposed.add(own)
        if "lora_B.bias" in adapter.modules[module]:
            bias = self._named(f"{module}.bias")
            if bias is None:
                raise DataError(
                    f"{adapter.name}: {shown(module)} has no bias that lora_B.bias could be added to"
                )
            self._biases[bias] = module

    def _named(self, name: str) -> str | None:
        """Return the name of a tensor in the files, which may have other modules around them."""
        rest = name
        while "." in rest:
            if rest in self.infos:
                return rest
            rest = rest.partition(".")[2]
        found = [own for own in self.infos if own.endswith(f".{name}")]
        return found[0] if len(found) == 1 else None


@final
class _InDouble(TensorFile):
    """The tensors of a model in float64, so that merged values are not rounded to the model's dtype."""

    def __init__(self, tensors: Tensors) -> None:
        self.name = tensors.name
        self._tensors = tensors
        self.infos = {
            name: _plain(replace(info, dtype=torch.float64))
            if info.dtype.is_floating_point
            else info
            for name, info in tensors.infos.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors.read(name).to(self.infos[name].dtype)


def _module(name: str) -> str:
    """Return the last name of the module of a weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


# The entry of a tensor with the size of its values unpacked.
def _plain(info: TensorInfo) -> TensorInfo:
    size = info.dtype.itemsize
    for side in info.shape:
        size *= side
    return TensorInfo(info.dtype, info.shape, size)
