"""Sources of models: runs of this library, checkpoints of other libraries, modules in memory."""

import atexit
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, final

from torch import nn

from triptych.core.checkpoints.adapters.adapter import (
    CONFIGURATION,
    AdapterFolder,
    adapter_on_hub,
    adapters_below,
    is_adapter,
)
from triptych.core.checkpoints.family import Family
from triptych.core.checkpoints.made_files import MadeFiles, WithAndWithout
from triptych.core.checkpoints.model_types import (
    model_type_of_class,
    model_types_of_tensors,
)
from triptych.core.storage.hub import (
    NoConfigurationError,
    Repository,
    gguf_on_hub,
    is_hub_id,
    open_hub,
)
from triptych.core.storage.tensors import (
    INDEX_AND_WHOLE,
    SAFETENSORS,
    Tensors,
    open_tensors,
)
from triptych.core.storage.unreadable import SUFFIXES, onnx_in, what_is
from triptych.errors import DataError, TriptychError, UsageError, near_path
from triptych.untrusted import Stamps, read_json, shown

# The kind of an encoder-decoder in the format of this library.
_PAIR = "encoder-decoder"
# Ends of names of classes with the encoder of an encoder-decoder alone, for any `is_encoder_decoder`. The
# class of T5Gemma for token classification has both stacks.
_ENCODERS_ALONE = ("EncoderModel", "T5ForTokenClassification")
# Words between the names of a base and of its adapters.
WITH_ADAPTERS = " with "
# The translator included in the package, and its name.
DEMO = "demo"
_DEMO_FOLDER = Path(__file__).parents[2] / "demo_model"


@final
class Source:
    """A model's files, or its module in memory, of this library or of `transformers`.

    Attributes:
        name: path or name on the Hub, as given by the user.
        record: configuration; empty for a module of this library.
        where: path of the configuration for messages.
        found: path, repository on the Hub, module of this library, or model in another form.
        family: family given by the user; None to choose it by the configuration.
        tokenizer: folder of a tokenizer given by the user; None for the tokenizer among the files.
        strict: true if fields of the configuration without effect are an error instead of a warning.
        notes: sentences on assumptions about the configuration.
        base: for a model with adapters, the model without them.
        adapters: the adapters.
    """

    def __init__(
        self,
        name: str,
        record: Mapping[str, Any],
        where: str,
        found: "Path | Repository | MadeFiles | nn.Module",
    ) -> None:
        self.name = name
        self.record = record
        self.where = where
        self.found = found
        self.family: Family | None = None
        self.tokenizer: Path | None = None
        self.strict = False
        self.notes: tuple[str, ...] = ()
        self.base: Source | None = None
        self.adapters: tuple[AdapterFolder, ...] = ()
        # Stamps of the files, to refuse files replaced after this point.
        self._stamps = Stamps(self._weight_files())

    def require_same(self) -> None:
        """Check that configuration and weights on this machine are unchanged since they were found."""
        self._stamps.require_same()
        if isinstance(self.found, MadeFiles):
            self.found.require_same()

    def _weight_files(self) -> Iterator[Path]:
        """Yield the files of a local path on which the model's output depends."""
        found = self.found
        if not isinstance(found, Path):
            return
        folder = found if found.is_dir() else found.parent
        yield folder / "config.json"
        if not found.is_dir():
            yield found
        elif self.is_own:  # a run's folder also contains the state of its training
            yield folder / SAFETENSORS
        else:
            # Include names of absent files: a file added later may take precedence over the present files.
            yield from (folder / name for name in chain.from_iterable(INDEX_AND_WHOLE))
            for pattern in ("*.safetensors", "*.bin", "*.index.json"):
                yield from sorted(folder.glob(pattern))

    def named(self, name: str) -> "Source":
        """Return a copy with another name, for messages."""
        found = copy(self)
        found.name = name
        return found

    @property
    def module(self) -> Any:
        """The module in memory of this library; None for files and for modules of `transformers`."""
        return self.found if isinstance(self.found, nn.Module) else None

    @property
    def is_in_memory(self) -> bool:
        """True if the model is in memory, without files to be replaced."""
        return (
            isinstance(self.found, MadeFiles) and self.found.is_in_memory
        ) or self.module is not None

    def reopened(self) -> "Source":
        """Return the source found again at the same path or name on the Hub, with the same options."""
        path = self.found.path if isinstance(self.found, MadeFiles) else self.found
        if self.base is not None:
            again = [AdapterFolder(one.folder, one.name) for one in self.adapters]
            found = adapted(self.base.reopened(), again, self.name)
        elif isinstance(path, Path):
            found = _find(path, None, offline=False)
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
        """Folder, or tensor file next to its `config.json`; a repository on the Hub is fetched whole."""
        if isinstance(self.found, nn.Module):
            raise UsageError(
                f"{self.name} is a module in memory and has no files: save it first"
            )
        return self.found if isinstance(self.found, Path) else self.found.fetch()

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def settings_folder(self) -> Path:
        """Folder of configuration and tokenizer; weights of a model in another form are not written to it."""
        return self.found.folder if isinstance(self.found, MadeFiles) else self.folder

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer given by the user, or else of the model's tokenizer."""
        return self.settings_folder if self.tokenizer is None else self.tokenizer

    def at(self, folder: Path) -> "Source":
        """Return the source with its files in another folder and the same options.

        Messages use the name of this source, since the folder may be temporary.
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
        """True if the model is in this library's format: that of runs and of converted models."""
        return is_own_config(self.record)

    @property
    def translates(self) -> bool:
        """True if the model has an encoder and a decoder."""
        if self.module is not None:
            return bool(len(self.module.stacks) > 1)
        if self.is_own:
            return bool(self.record.get("kind", _PAIR) == _PAIR)
        named = self.record.get("architectures")
        name = str(named[0]) if isinstance(named, list) and named else ""
        if name.endswith(_ENCODERS_ALONE):
            return False
        if self.family is not None and self.family.model is not None:
            return self.family.model.encoder is not None
        is_pair = self.record.get("is_encoder_decoder") is True
        return is_pair or self.record.get("model_type") == "marian"

    def file(self, name: str) -> Path | None:
        """Return the path of a file next to the weights, or None if it does not exist."""
        if isinstance(self.found, Repository):
            return self.found.download(name)
        path = self.settings_folder / name
        return path if path.is_file() else None

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Open the weights, to be read one at a time; from the Hub by range, unless they were fetched.

        `mapped`: map local files into memory instead of copying from them.
        """
        self.require_same()
        if isinstance(self.found, Repository | MadeFiles):
            return self.found.tensors(mapped=mapped)
        return open_tensors(self.path, mapped=mapped)

    def without_and_with_adapters(self) -> WithAndWithout | None:
        """Open the tensors without and with the adapters, in float64; None for a model without adapters."""
        if isinstance(self.found, MadeFiles):
            return self.found.in_double()
        return None


def is_own_config(config: Mapping[str, Any]) -> bool:
    """Return True if this library wrote a configuration."""
    return "format" in config and isinstance(config.get("model"), dict)


def tokenizer_folder(tokenizer: Any) -> Path | None:
    """Return a tokenizer's folder; save a tokenizer of `transformers` in a temporary folder."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, str | Path):
        folder = Path(tokenizer)
        if not folder.is_dir():
            raise UsageError(
                f"tokenizer: {folder} is no folder{near_path(folder)}: give that of a tokenizer"
            )
        return folder
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "save_pretrained"):
        raise UsageError(
            f"tokenizer: a {type(tokenizer).__name__} is none: give the folder of one, or one of transformers"
        )
    # The folder lacks an owner, unlike the folder of a model in memory, so it is removed at exit.
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
    adapters: Sequence[str | Path] = (),
) -> Source:
    """Find a model by its path, by its name on the Hub, or in memory.

    `source`: path, name on the Hub (an existing path takes precedence), model of `transformers`, or source.
    `tokenizer`: tokenizer of `transformers`, or a tokenizer's folder. `offline`: use only cached files of the
    Hub. `family`: family to read the checkpoint with, instead of the family of its `model_type`. `strict`:
    raise an error for fields of the configuration without effect instead of a warning. `adapters`: folders of
    adapters of PEFT, or their names on the Hub; they are merged into the model in their order.

    Raises UsageError if the source or the tokenizer does not exist, or is of another type, or if a family is
    given for a model in this library's format. Raises DataError if the Hub cannot be reached or lacks the
    repository, or the configuration cannot be read.
    """
    if isinstance(source, Source):
        return source
    given = tokenizer_folder(tokenizer)
    found = _find(source, given, offline)
    if adapters:
        found = adapted(
            found,
            [_adapter(one, offline) for one in adapters],
            f"{found.name}{WITH_ADAPTERS}{', '.join(map(str, adapters))}",
        )
    is_unnamed = (
        bool(found.record)
        and not found.is_own
        and found.record.get("model_type") is None
    )
    if family is None and is_unnamed:
        _work_out_model_type(found)
    if family is not None and found.is_own:
        raise UsageError(f"{found.name} is a run: leave out --family")
    found.family = family
    found.strict = strict
    if found.module is not None or not isinstance(
        source, nn.Module
    ):  # else its files have the tokenizer
        found.tokenizer = given
    return found


def _of_gguf(
    name: str, file: Path | tuple[str, str], *, offline: bool = False
) -> Source:
    """Open a GGUF file, by its path or by its repository on the Hub and its name there."""
    # a large format of its own
    from triptych.core.checkpoints.gguf.gguf_model import GgufModel, fetch_gguf

    path = file if isinstance(file, Path) else fetch_gguf(*file, offline=offline)
    model = GgufModel(path, name)
    return Source(name, model.record, name, model)


def _gguf_at(path: Path) -> Path | None:
    """Return the GGUF file at a path, or in a folder without other weights; else None."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if _has_weights(path):
        return None
    if not any(path.glob("*.gguf")):
        return None
    # a large format of its own
    from triptych.core.checkpoints.gguf.gguf_model import find_gguf

    return find_gguf(path)


def _has_weights(folder: Path) -> bool:
    return any(
        (folder / name).exists() for name in chain.from_iterable(INDEX_AND_WHOLE)
    )


def adapted(base: Source, adapters: Sequence[AdapterFolder], name: str) -> Source:
    """Return a model with adapters of PEFT merged into it."""
    if base.module is not None or base.is_own:
        raise UsageError(
            f"{base.name} is a model of triptych, and adapters of PEFT are for those of transformers"
        )
    found = _with_adapters(base, adapters, name)
    found.base = base
    found.adapters = tuple(adapters)
    return found


def _adapter(given: str | Path, offline: bool) -> AdapterFolder:
    """Open an adapter by its folder, or by its name on the Hub; an existing folder takes precedence."""
    folder = Path(given)
    if not folder.exists() and _may_be_adapter_on_hub(name := folder.as_posix()):
        return adapter_on_hub(name, offline=offline)
    if not is_adapter(folder):
        raise UsageError(f"{folder}: {_no_adapter(folder)}")
    return AdapterFolder(folder)


def _may_be_adapter_on_hub(name: str) -> bool:
    # Models of the early Hub have names without an owner; adapters came later.
    return "/" in name and is_hub_id(name)


def _with_adapters(base: Source, adapters: Sequence[Any], name: str) -> Source:
    from triptych.core.checkpoints.adapters.adapted_model import AdaptedModel

    model = AdaptedModel(base, adapters)
    found = Source(name, model.record, base.where, model)
    found.notes = base.notes
    return found


def _no_adapter(folder: Path) -> str:  # words for messages
    if not folder.exists():
        return f"there is no such folder{near_path(folder)}: give that of an adapter"
    below = ", ".join(shown(str(path)) for path in adapters_below(folder))
    return f"it has no {CONFIGURATION}" + (
        f"; the folders of adapters in it are {below}" if below else ""
    )


def _with_its_base(opened_adapter: AdapterFolder, offline: bool) -> Source:
    adapter = opened_adapter.adapter
    name = opened_adapter.name
    base = adapter.base
    if base is None:
        raise UsageError(
            f"{name}: an adapter whose {CONFIGURATION} names no base model: give it, and this folder as "
            "the adapter (--adapter, adapter=)"
        )
    if Path(base).is_dir() and is_adapter(Path(base)) and not _has_weights(Path(base)):
        raise UsageError(
            f"{name}: its base {shown(base)} is an adapter, too: give the base and both adapters"
        )
    revision = adapter.record.get("revision")
    if (
        isinstance(revision, str)
        and revision
        and not Path(base).exists()
        and is_hub_id(f"{base}@{revision}")
    ):
        base = f"{base}@{revision}"
    try:
        opened = _find(base, None, offline)
    except TriptychError as error:
        raise type(error)(
            f"{name} is an adapter of {shown(base)}, which its {CONFIGURATION} names: {error}; give the "
            "base on this machine, and this folder as the adapter (--adapter, adapter=)"
        ) from None
    found = adapted(opened, [opened_adapter], name)
    found.notes = (
        *opened.notes,
        f"{name} is an adapter: read with its base, {shown(base)}",
    )
    return found


def _work_out_model_type(source: Source) -> None:
    record = source.record
    found = model_type_of_class(record)
    how = (
        f"architectures ({shown(record['architectures'][0])})"
        if found
        else "the names of its tensors"
    )
    if found is None:
        try:
            of_tensors = model_types_of_tensors(source.tensors())
        except DataError:  # reported when the tensors are opened for reading
            return
        found = of_tensors[0] if len(of_tensors) == 1 else None
    if found is not None:
        source.record = {**record, "model_type": found}
        source.notes = (
            f"{source.where}: there is no model_type; read as {found}, by {how}",
        )


def _find(source: object, tokenizer: Path | None, offline: bool) -> Source:
    if isinstance(source, nn.Module):
        return _of_module(source, tokenizer)
    if not isinstance(source, str | Path):
        raise UsageError(
            f"a {type(source).__name__} is no model: give a folder, a name on the Hub, a module of torch, "
            "or a model of triptych"
        )
    name = str(source)
    path = Path(source)
    if name == DEMO and not path.exists():
        path = _DEMO_FOLDER
    if not path.exists() and (on_hub := gguf_on_hub(name)) is not None:
        return _of_gguf(name, on_hub, offline=offline)
    if not path.exists():
        if not is_hub_id(name):
            raise UsageError(
                f"{name}: there is no such file or folder{near_path(path)}, and it is no name on the Hub "
                "(owner/name)"
            )
        return _on_hub(name, offline)
    if (file := _gguf_at(path)) is not None:
        return _of_gguf(name, file)
    folder = (
        path.parent if path.is_file() and path.name.startswith("adapter_") else path
    )
    if is_adapter(folder) and not _has_weights(folder):
        return _with_its_base(AdapterFolder(folder), offline)
    if (alone := _weights_alone(path)) is not None:
        return alone
    # A tensor file is read with the configuration next to it.
    config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.exists():
        told = what_is(path) or (
            "give a run (triptych train makes one), a folder with config.json and *.safetensors, a file of "
            "weights with a family file (family=, --family), or a Hub name"
        )
        raise UsageError(
            f"{path} is not a run folder, nor one in Hugging Face's format: it has no config.json; {told}"
        )
    return Source(name, read_json(config), str(config), path)


def _on_hub(name: str, offline: bool) -> Source:
    """Open a checkpoint on the Hub, or an adapter on the Hub with its base."""
    try:
        repository = open_hub(name, offline=offline)
    except NoConfigurationError as missing:
        if not _may_be_adapter_on_hub(name):
            raise
        try:
            adapter = adapter_on_hub(name, offline=offline)
        except NoConfigurationError:
            raise missing from None
        return _with_its_base(adapter, offline)
    return Source(name, repository.record, f"{name}/config.json", repository)


def _of_module(module: nn.Module, tokenizer: Path | None) -> Source:
    """Return a module in memory as a source, whether from this library, `transformers` or another library."""
    # Sources in files do not need the modules of this library.
    from triptych.core.checkpoints.adapters.adapted_module import (
        adapters_of,
        base_of,
        has_adapters,
    )
    from triptych.core.checkpoints.other_modules import AnyModule, ModuleOfTransformers
    from triptych.core.models.encoder_decoder import EncoderDecoder
    from triptych.core.models.language_model import LanguageModel

    kind = type(module).__name__
    if isinstance(module, EncoderDecoder | LanguageModel):
        return Source(f"a module ({kind})", {}, "memory", module)
    if not hasattr(module, "save_pretrained"):
        opened = AnyModule(module, tokenizer)
        return Source(kind, opened.record, f"the configuration of {kind}", opened)
    name = str(getattr(module, "name_or_path", "") or kind)
    made = ModuleOfTransformers(base_of(module), tokenizer)
    found = Source(
        name, read_json(made.folder / "config.json"), f"{name}/config.json", made
    )
    if has_adapters(module) and (adapters := adapters_of(module)):
        return _with_adapters(found, adapters, name)
    return found


def _weights_alone(path: Path) -> Source | None:
    """Return weights in ONNX, or in a file without a config.json next to it; None for other paths."""
    if path.is_dir():
        file = None if _has_weights(path) else onnx_in(path)
    elif path.suffix == ".onnx":
        file = path
    else:
        is_alone = (
            path.suffix in SUFFIXES and not (path.parent / "config.json").exists()
        )
        file = path if is_alone else None
    if file is None:
        return None
    from triptych.core.checkpoints.weights_alone import (
        WeightsAlone,
    )  # formats of other programs

    opened = WeightsAlone(file, str(path))
    found = Source(str(path), opened.record, opened.where, opened)
    found.notes = opened.notes
    return found
