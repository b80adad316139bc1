"""What a `Model` holds of its source: the files or the module, opened piece by piece as it is asked for."""

import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, final

import torch
from torch import nn

from triptych.checkpoints.checkpoint import open_checkpoint
from triptych.checkpoints.family import Family
from triptych.checkpoints.layer import AttentionLayer, AttentionSource, Site, SourceVisitor, T
from triptych.checkpoints.own import OwnModel
from triptych.checkpoints.translators import Languages
from triptych.decoding import Precision
from triptych.engines import EngineName
from triptych.errors import DataError, TriptychError, UsageError
from triptych.face.changes import Change
from triptych.models import EncoderDecoder, LanguageModel
from triptych.models.device import find_device
from triptych.opening import OpenedModel, Source, find_source, is_on_hub, open_model
from triptych.text import Tokenizer, TokenizerPair, load_tokenizer


@final
@dataclass(frozen=True)
class Options:
    """How a model is run; see `load`."""

    device: str = "auto"
    dtype: torch.dtype | None = None
    tokenizer: str | Path | None = None
    languages: Languages | None = None
    engine: EngineName = "triptych"
    precision: Precision = "fp32"
    family: Family | None = None


@final
@dataclass(eq=False)
class Opened:
    """A source, and what was read of it so far.

    Attributes:
        name: as it was given, or what a module is called.
        place: a path, or a name on the Hub.
        options: how it is run.
        module: a model of ours in memory, in the place of files.
        temporary: the folder that goes with it: the files of a model that was in memory, or rewritten.
    """

    name: str
    place: str | Path
    options: Options
    module: LanguageModel | EncoderDecoder | None = None
    temporary: Path | None = None

    def __post_init__(self) -> None:
        if self.temporary is not None:
            weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)

    @cached_property
    def attention(self) -> AttentionSource:
        """The attention layers; weights are read when a layer is asked for."""
        if self.module is not None:
            return OwnModel(self.module, self.name)
        return open_checkpoint(self.place, self.options.family, mapped=True)

    @cached_property
    def source(self) -> Source:
        """The files, on this machine."""
        if self.module is not None:
            raise UsageError(f"{self.name} is a module in memory and has no files")
        return find_source(self.place)

    @cached_property
    def model(self) -> OpenedModel:
        """The model, ready to run."""
        options = self.options
        if self.module is None:
            device = "cpu" if options.engine != "triptych" else options.device
            return open_model(self.source, device, options.dtype, options.languages)
        if options.tokenizer is None:
            raise UsageError(f"{self.name} has no tokenizer: load(module, tokenizer=FOLDER) reads texts")
        folder = Path(options.tokenizer)
        module = self.module.to(find_device(options.device), options.dtype)
        tokenizers: Tokenizer | TokenizerPair = (
            TokenizerPair.load(folder)
            if isinstance(module, EncoderDecoder)
            else load_tokenizer(folder, vocab_size=module.vocab_size)
        )
        return OpenedModel(self.name, folder, module, tokenizers)

    @property
    def folder(self) -> Path:
        """The folder of the files; of the Hub, fetched."""
        return self.source.folder

    @cached_property
    def why_not_run(self) -> str:
        """Why the model cannot be run; "" if it can."""
        try:
            assert self.model
        except TriptychError as error:
            return str(error)
        return ""


def open_anything(source: object, options: Options) -> Opened:
    """Find what a source is, without reading weights."""
    if isinstance(source, str | Path):
        if not Path(source).exists() and not is_on_hub(source):
            raise DataError(
                f"{source}: there is no such file or folder, and it is no name on the Hub (owner/name)"
            )
        return Opened(str(source), source if isinstance(source, Path) else str(source), options)
    if isinstance(source, LanguageModel | EncoderDecoder):
        return Opened(f"a module ({type(source).__name__})", "", options, module=source)
    if isinstance(source, nn.Module) and hasattr(source, "save_pretrained"):
        return _of_transformers(source, options)
    raise UsageError(
        f"a {type(source).__name__} is no model: give a folder, a name on the Hub, a transformers model, or "
        "a model of triptych"
    )


def _of_transformers(module: Any, options: Options) -> Opened:
    """A model of `transformers`: written to a temporary folder in its own format, which is then opened."""
    folder = Path(mkdtemp(prefix="triptych-"))
    name = str(getattr(module, "name_or_path", "") or type(module).__name__)
    opened = Opened(name, folder, options, temporary=folder)
    try:
        module.save_pretrained(folder)
        if options.tokenizer is not None and hasattr(options.tokenizer, "save_pretrained"):
            options.tokenizer.save_pretrained(folder)
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{type(module).__name__}: transformers cannot write it: {error}") from error
    return opened


@final
class ChangedSource(AttentionSource):
    """The attention layers of a source with changed weights."""

    def __init__(self, source: AttentionSource, changes: Sequence[Change]) -> None:
        self._source, self._changes = source, changes
        self.name, self.written_as, self.known_by = source.name, source.written_as, source.known_by
        self.sites, self.num_tensors, self.left_over = source.sites, source.num_tensors, source.left_over
        self.unread, self.absent, self.warnings = source.unread, source.absent, source.warnings

    def accept(self, visitor: SourceVisitor[T]) -> T:
        return self._source.accept(visitor)

    def read(self, site: Site) -> AttentionLayer:
        layer, number = self._source.read(site), self.sites.index(site)
        for change in self._changes:
            if change.changes_layer(number):
                layer = replace(layer, weights=change.of_weights(number, layer.weights))
        return layer

    def bytes_of(self, site: Site) -> int:
        return self._source.bytes_of(site)

    def longest_text(self, site: Site) -> int:
        return self._source.longest_text(site)

    def input_modules(self, site: Site) -> tuple[str, str]:
        return self._source.input_modules(site)

    def broken(self, layer: AttentionLayer) -> Mapping[str, int]:
        return self._source.broken(layer)
