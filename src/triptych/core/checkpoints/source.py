"""What a source of a model is: a run of ours, a checkpoint of another library, or a model in memory."""

import atexit
import shutil
import weakref
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, final

from torch import nn

from triptych.core.checkpoints.family import Family
from triptych.core.storage.hub import Repository, is_hub_id, open_hub
from triptych.core.storage.tensors import (
    INDEX_AND_WHOLE,
    SAFETENSORS,
    InMemory,
    Tensors,
    of_one,
    open_tensors,
)
from triptych.core.storage.unreadable import what_is
from triptych.errors import DataError, UsageError, near_path
from triptych.untrusted import Stamps, read_json


@final
class Source:
    """A model's files, or the model of `transformers` in memory that takes their place.

    Attributes:
        name: as it was given.
        record: its configuration.
        where: the file of the configuration, for messages.
        found: where the files are.
        family: the family file that was given for it; None where its configuration tells.
        tokenizer: the folder of a tokenizer that was given for it; None for the files' own.
        strict: whether what `transformers` does not follow of the configuration is an error, not a warning.
    """

    def __init__(
        self,
        name: str,
        record: Mapping[str, Any],
        where: str,
        found: "Path | Repository | ModuleOfOthers",
    ) -> None:
        self.name = name
        self.record = record
        self.where = where
        self.found = found
        self.family: Family | None = None
        self.tokenizer: Path | None = None
        self.strict = False
        self._stamps = Stamps(self._weight_files())

    def require_same(self) -> None:
        """Check that configuration and weights on this machine are what they were when they were found."""
        self._stamps.require_same()
        if isinstance(self.found, ModuleOfOthers):
            self.found.require_same()

    def _weight_files(self) -> Iterator[Path]:
        """Yield the files of a path that decide what the model computes; none for the Hub."""
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
            # One that comes later may be read in the place of those that are there.
            yield from (folder / name for pair in INDEX_AND_WHOLE for name in pair)
            for pattern in ("*.safetensors", "*.bin", "*.index.json"):
                yield from sorted(folder.glob(pattern))

    def named(self, name: str) -> "Source":
        """Rename the source; messages about the model use the new name."""
        found = copy(self)
        found.name = name
        return found

    @property
    def is_in_memory(self) -> bool:
        """True if there are no files that somebody else could replace."""
        return isinstance(self.found, ModuleOfOthers)

    def reopened(self) -> "Source":
        """Find the source again, at the same path or name on the Hub, with the same options."""
        if isinstance(self.found, Path):
            found = _find(self.found, None, offline=False)
        else:
            offline = isinstance(self.found, Repository) and self.found.offline
            found = _find(self.name, None, offline)
        found.name = self.name
        found.family = self.family
        found.tokenizer = self.tokenizer
        found.strict = self.strict
        return found

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
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer that was given, or of the model's own."""
        return self.settings_folder if self.tokenizer is None else self.tokenizer

    def at(self, folder: Path) -> "Source":
        """Return the same source with its files in another folder, with the same options.

        Messages name this source, as the folder may be a temporary one.
        """
        found = find_source(folder)
        found.name = self.name
        found.where = self.where
        found.tokenizer = self.tokenizer
        found.strict = self.strict
        if found.record.get("model_type") == self.record.get("model_type"):
            found.family = self.family
        return found

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

    def __init__(self, module: Any, tokenizer: Path | None) -> None:
        self._module, self._version = module, _version_of(module)
        self.has_tokenizer = tokenizer is not None
        self.folder = Path(mkdtemp(prefix="triptych-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        parts = [module.config, getattr(module, "generation_config", None)]
        if tokenizer is not None:
            from transformers import AutoTokenizer

            parts.append(AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True))
        for part in parts:
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
    """Return a number that grows whenever a parameter of a module is written."""
    return sum(parameter._version for parameter in module.parameters())


def is_own_config(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one that we write."""
    return "format" in config and isinstance(config.get("model"), dict)


def tokenizer_folder(tokenizer: Any) -> Path | None:
    """Return the folder of a tokenizer that was given; one of `transformers` is saved in a folder."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, str | Path):
        folder = Path(tokenizer)
        if not folder.is_dir():
            raise UsageError(f"tokenizer: {folder} is no folder{near_path(folder)}: give that of a tokenizer")
        return folder
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "save_pretrained"):
        raise UsageError(
            f"tokenizer: a {type(tokenizer).__name__} is none: give the folder of one, or one of transformers"
        )
    folder = Path(mkdtemp(prefix="triptych-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    return folder


def find_source(
    source: object,
    *,
    tokenizer: Any = None,
    offline: bool = False,
    family: Family | None = None,
    strict: bool = False,
) -> Source:
    """What is at a path, or has a name on the Hub (a path of that name comes first), or is in memory."""
    if isinstance(source, Source):
        return source
    given = tokenizer_folder(tokenizer)
    found = _find(source, given, offline)
    found.family = family
    found.strict = strict
    if not isinstance(found.found, ModuleOfOthers):  # whose files have it among them
        found.tokenizer = given
    return found


def _find(source: object, tokenizer: Path | None, offline: bool) -> Source:
    if isinstance(source, nn.Module) and hasattr(source, "save_pretrained"):
        name = str(getattr(source, "name_or_path", "") or type(source).__name__)
        module = ModuleOfOthers(source, tokenizer)
        return Source(name, read_json(module.folder / "config.json"), f"{name}/config.json", module)
    if not isinstance(source, str | Path):
        raise UsageError(
            f"a {type(source).__name__} is no model: give a folder, a name on the Hub, a transformers model, "
            "or a model of triptych"
        )
    name = str(source)
    path = Path(source)
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
        told = what_is(path) or (
            "give a run (triptych train makes one), a folder with config.json and *.safetensors, or a Hub "
            "name"
        )
        raise UsageError(
            f"{path} is not a run folder, nor one in Hugging Face's format: it has no config.json; {told}"
        )
    return Source(name, read_json(config), str(config), path)
