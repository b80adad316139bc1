"""What a source of a model is: a run of ours, a checkpoint of another library, or a model in memory."""

import shutil
import weakref
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, final

from torch import nn

from triptych.errors import DataError, UsageError, near_path
from triptych.storage.hub import Repository, is_hub_id, open_hub
from triptych.storage.tensors import SAFETENSORS, InMemory, Tensors, of_one, open_tensors
from triptych.storage.untrusted import Stamps, read_json


@final
class Source:
    """A model's files, or the model of `transformers` in memory that takes their place."""

    def __init__(
        self, name: str, record: Mapping[str, Any], where: str, found: "Path | Repository | ModuleOfOthers"
    ) -> None:
        self.name, self.record, self.where, self.found = name, record, where, found
        self._stamps = Stamps(self._weight_files())

    def require_same(self) -> None:
        """Check that configuration and weights on this machine are what they were when they were found."""
        self._stamps.require_same()
        if isinstance(self.found, ModuleOfOthers):
            self.found.require_same()

    def _weight_files(self) -> Iterator[Path]:
        """The files of a path that say what the model computes; what is on the Hub does not change."""
        found = self.found
        if not isinstance(found, Path):
            return
        folder = found if found.is_dir() else found.parent
        yield folder / "config.json"
        if not found.is_dir():
            yield found
        elif self.is_own:  # a run's folder has the state of its training besides
            yield folder / SAFETENSORS
        else:
            for pattern in ("*.safetensors", "*.bin", "*.index.json"):
                yield from sorted(folder.glob(pattern))

    def named(self, name: str) -> "Source":
        """The same files under another name, which messages about the model have."""
        return Source(name, self.record, self.where, self.found)

    @property
    def is_in_memory(self) -> bool:
        """Whether there are no files that somebody else could replace."""
        return isinstance(self.found, ModuleOfOthers)

    def reopened(self) -> "Source":
        """What is now at the same path, or has the same name on the Hub."""
        if isinstance(self.found, Path):
            return find_source(self.found).named(self.name)
        offline = isinstance(self.found, Repository) and self.found.offline
        return find_source(self.name, offline=offline)

    @cached_property
    def path(self) -> Path:
        """The folder, or a tensor file next to its `config.json`; what is on the Hub is fetched whole."""
        return self.found if isinstance(self.found, Path) else self.found.fetch()

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def settings_folder(self) -> Path:
        """Where configuration and tokenizers lie, without the weights of a model in memory."""
        return self.found.folder if isinstance(self.found, ModuleOfOthers) else self.folder

    @property
    def is_own(self) -> bool:
        """Whether the model is in our own format: a run's, or a converted one."""
        return is_own_config(self.record)

    @property
    def translates(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        if self.is_own:
            return self.record.get("model_type") != "triptych"  # which models of one stack have
        return self.record.get("model_type") == "marian" or self.record.get("is_encoder_decoder") is True

    def file(self, name: str) -> Path | None:
        """A file next to the weights; None if there is none."""
        if isinstance(self.found, Repository):
            return self.found.download(name)
        path = self.settings_folder / name
        return path if path.is_file() else None

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """The weights, one at a time; of the Hub by range, unless they were fetched."""
        self.require_same()
        if isinstance(self.found, Path):
            return open_tensors(self.found, mapped=mapped)
        return self.found.tensors(mapped=mapped)


@final
class ModuleOfOthers:
    """A model of `transformers` in memory; its weights are written only where a path is asked for."""

    def __init__(self, module: Any, tokenizer: Any) -> None:
        self._module, self._version = module, _version_of(module)
        self.folder = Path(mkdtemp(prefix="triptych-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        if isinstance(tokenizer, str | Path):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
        for part in (module.config, getattr(module, "generation_config", None), tokenizer):
            if part is not None:
                part.save_pretrained(self.folder)

    def require_same(self) -> None:
        """Check that nobody wrote into the parameters: what was read of them would be of another model."""
        if _version_of(self._module) != self._version:
            raise DataError(
                f"the parameters of {type(self._module).__name__} were changed after it was opened: load it "
                "again"
            )

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Its parameters by the names that its files would have, in the memory that it has them in."""
        try:
            from transformers.core_model_loading import revert_weight_conversion
            from transformers.modeling_utils import remove_tied_weights_from_state_dict
        except ImportError:  # of another version, whose files tell the names
            return open_tensors(self.fetch(), mapped=mapped)
        module = self._module
        found = remove_tied_weights_from_state_dict(module.state_dict(), module)
        left_out = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
        found = {name: tensor for name, tensor in found.items() if name not in left_out}
        return of_one(InMemory(type(module).__name__, revert_weight_conversion(module, found)))

    def fetch(self) -> Path:
        """Write all of it, in its own format; returns the folder."""
        if not any(self.folder.glob("*.safetensors")):
            try:
                self._module.save_pretrained(self.folder)
            except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
                raise DataError(
                    f"{type(self._module).__name__}: transformers cannot write it: {error}"
                ) from error
        return self.folder


def _version_of(module: nn.Module) -> int:
    """A number that grows whenever a parameter of a module is written."""
    return sum(parameter._version for parameter in module.parameters())


def is_own_config(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one that we write."""
    return "format" in config and isinstance(config.get("model"), dict)


def find_source(source: object, *, tokenizer: Any = None, offline: bool = False) -> Source:
    """What is at a path, or has a name on the Hub (a path of that name comes first), or is in memory."""
    if isinstance(source, Source):
        return source
    if isinstance(source, nn.Module) and hasattr(source, "save_pretrained"):
        name = str(getattr(source, "name_or_path", "") or type(source).__name__)
        module = ModuleOfOthers(source, tokenizer)
        return Source(name, read_json(module.folder / "config.json"), f"{name}/config.json", module)
    if not isinstance(source, str | Path):
        raise UsageError(
            f"a {type(source).__name__} is no model: give a folder, a name on the Hub, a transformers model, "
            "or a model of triptych"
        )
    name, path = str(source), Path(source)
    if not path.exists():
        if not is_hub_id(name):
            raise UsageError(
                f"{name}: there is no such file or folder{near_path(path)}, and it is no name on the Hub "
                "(owner/name)"
            )
        repository = open_hub(name, offline=offline)
        return Source(name, repository.record, f"{name}/config.json", repository)
    config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.exists():
        raise UsageError(
            f"{path} is not a run folder, nor one in Hugging Face's format: it has no config.json. Give a "
            "run (triptych train makes one), a folder with config.json and *.safetensors, or a Hub name"
        )
    return Source(name, read_json(config), str(config), path)
