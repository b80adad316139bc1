"""The source of a `Model` with its changes: files or a module, each part opened on first use."""

import shutil
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.family import Family, read_family
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_layers import AttentionSource
from triptych.core.heads import Head, Layer, Layers, Stack
from triptych.core.places import Heads, PlaceNames, in_words
from triptych.errors import DataError, TriptychError, UsageError
from triptych.literals import EngineName, Precision
from triptych.printable import table_html
from triptych.running.options import Languages, Options, require_ctranslate2
from triptych.user_code import use_code

# Modules and readers are imported when a model first runs: heads are read without them.
if TYPE_CHECKING:
    from triptych.core.models import AnyModel, AttentionSite
    from triptych.running.changes import Change
    from triptych.running.opening.reader import Reader


@final
@dataclass(eq=False)
class Opened:
    """A source with its parts opened so far, and changes made to its model.

    Attributes:
        source: files, or module in memory.
        options: options for opening and running the model.
        temporary: folder of a rewritten model, removed together with this object.
        is_mapped: True if weights are memory-mapped from their files rather than read.
        changes: changes of the model, in order.
    """

    source: Source
    options: Options
    temporary: Path | None = None
    is_mapped: bool = True
    changes: "tuple[Change, ...]" = ()
    _before: "Opened | None" = field(default=None, init=False)
    _owns_weights: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.temporary is not None:
            weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)

    @property
    def name(self) -> str:
        """The source as given, or the name of a module."""
        return self.source.name

    def changed(self, *changes: "Change") -> "Opened":
        """Return the source with further changes; weights without a change are shared."""
        made = replace(self, temporary=None, changes=(*self.changes, *changes))
        made._before = self.unchanged
        return made

    @property
    def unchanged(self) -> "Opened":
        """The source without changes; models changed from it share its files and weights."""
        return self if self._before is None else self._before

    def named(self, name: str, *, is_mapped: bool = True) -> "Opened":
        """Return the same source, and its opened model if any, under another name.

        Weights not run by the model are mapped from their files, or read if `is_mapped` is False: then no
        change of a file can end the process.
        """
        before = self.unchanged
        made = replace(
            before,
            source=before.source.named(name),
            temporary=None,
            is_mapped=is_mapped,
        )
        made.__dict__["named_after"] = (
            before  # a reference, so that its temporary folder is not removed
        )
        if "plain_reader" in before.__dict__:
            made.__dict__["plain_reader"] = before.plain_reader.named(name)
        return made.changed(*self.changes) if self.changes else made

    def reopened(self) -> "Opened":
        """Return the source with its changes, opened again from its files."""
        if self.source.is_in_memory:
            raise UsageError(
                f"{self.name} is in memory: it has no files that could be opened anew"
            )
        others = tuple(one.reopened() for one in self.options.ensemble)
        made = Opened(self.source.reopened(), replace(self.options, ensemble=others))
        return made.changed(*self.changes) if self.changes else made

    @cached_property
    def attention(self) -> AttentionSource:
        """The attention layers with all changes; weights are read on first use."""
        if self.changes:
            from triptych.running.changed_source import ChangedSource

            return ChangedSource(self.unchanged.attention, self.changes)
        self.source.require_same()
        return open_checkpoint(self.source, mapped=self.is_mapped)

    @cached_property
    def places(self) -> PlaceNames:
        """The names of the attention layers."""
        return PlaceNames(
            [(one.site.named_stack, one.number) for one in self.attention.layers],
            self.name,
        )

    @cached_property
    def layers(self) -> Layers:
        """The attention layers under their names."""
        source = self.attention
        named = [*zip(source.layers, self.places.names, strict=True)]
        # A site has the name of the first layer with its weights.
        first = {layer.site: name for layer, name in named if not layer.is_shared}
        found = []
        for layer, name in named:
            lender = source.lender(layer.site)
            borrows = None if lender is None else first[lender]
            shares = first[layer.site] if layer.is_shared else None
            found.append(Layer(name, source, layer.site, borrows, shares))
        return Layers(found)

    def stack(self, name: str) -> Stack:
        """Return the layers of one stack: "encoder", "decoder" or "cross"."""
        found = [
            layer
            for layer, one in zip(self.layers, self.attention.layers, strict=True)
            if one.site.named_stack == name
        ]
        if not found:
            raise UsageError(
                f"{self.name} has no {name}: it has {', '.join(self.places.stacks)}"
            )
        return Stack(name, self.name, Layers(found))

    def find(self, place: int | str | tuple[int | str, int]) -> Layer | Head:
        """Return a layer or a head by its name."""
        number, head = self.places.find(place)
        return self.layers[number] if head is None else self.layers[number][head]

    def find_heads(self, heads: Heads) -> dict[int, tuple[int, ...]]:
        """Return the heads of names and patterns, by layer number in model order."""
        return self.places.heads(
            in_words(heads), [layer.num_heads for layer in self.layers]
        )

    @property
    def files(self) -> Source:
        """The files of the source, checked to be unchanged."""
        self.source.require_same()
        if self.source.module is not None:
            raise UsageError(
                f"{self.name} is a module in memory and has no files: save it first"
            )
        return self.source

    def require_same(self) -> None:
        """Check files and parameters for changes since the source was found."""
        self.source.require_same()
        for other in self.options.ensemble:
            other.require_same()

    @property
    def where(self) -> str:
        """The location of the source."""
        return self.source.where.removesuffix("/config.json")

    @cached_property
    def plain_reader(self) -> "Reader":
        """The reader as opened by the options, without changes, shortlist and ensemble."""
        if self.changes:
            return self.unchanged.plain_reader
        from triptych.running.opening.readers_of_sources import open_reader

        options = self.options
        # CTranslate2 runs its own copy, so the module stays on the CPU.
        on_cpu = options.engine == "ctranslate2" and self.source.module is None
        device = "cpu" if on_cpu else options.device
        self.source.require_same()
        return open_reader(self.source, device, options.dtype, options.languages)

    @cached_property
    def ready(self) -> "Reader":
        """The reader with changes, shortlist and ensemble; weights may be mapped from their files."""
        if self.changes:
            from triptych.running.changes import changed_copy

            reader = self.unchanged.ready
            return reader.with_model(
                changed_copy(reader.model, self.changes, self.sites_of)
            )
        reader = self.plain_reader
        options = self.options
        if options.shortlist is not None:
            reader = reader.with_shortlist(options.shortlist)
        if options.ensemble:
            from triptych.running.opening.readers_of_sources import open_reader

            others = (
                open_reader(one, options.device, options.dtype, options.languages)
                for one in options.ensemble
            )
            reader = reader.with_ensemble([*others])
        return reader

    @cached_property
    def to_run(self) -> "Reader":
        """The reader as in `ready`; the error for a model that cannot be run names what can be read."""
        try:
            return self.ready
        except DataError as error:
            if self._has_heads():
                raise DataError(
                    f"{error}; triptych inspect can read its heads"
                ) from None
            raise

    def _has_heads(self) -> bool:
        try:
            return bool(self.layers)
        except TriptychError:
            return False

    @cached_property
    def reader(self) -> "Reader":
        """The reader as in `to_run`, with the weights in memory."""
        reader = self.to_run
        self.own_weights()
        return reader

    def own_weights(self) -> None:
        """Copy the module's weights from their mapped files into memory if there is enough free memory.

        A truncated file would end the process during a long job.
        """
        if self.changes:
            self.unchanged.own_weights()  # changed models share these parameters
            return
        if self._owns_weights or self.source.is_in_memory:
            return
        from triptych.running.memory import own_memory

        own_memory([self.plain_reader.model])
        self.require_same()
        self._owns_weights = True

    @cached_property
    def why_not_run(self) -> str:
        """The reason why the model cannot be run; "" if it can."""
        try:
            assert self.unchanged.ready
        except TriptychError as error:
            return str(error)
        return ""

    @property
    def why_not_saved(self) -> str:
        """The reason why the files cannot store the changes; "" if they can."""
        if not self.changes:
            return ""
        from triptych.running.changed_source import why_not_saved

        source = self.unchanged.attention
        for change in self.changes:
            if reason := why_not_saved(change, source):
                return f"{change.words} cannot be saved: {reason}"
        return ""

    @property
    def num_parameters(self) -> int:
        """The number of parameters in all tensors of the files, or of the module."""
        return self.attention.num_parameters

    def sites_of(self, model: "AnyModel") -> "list[AttentionSite]":
        """Return the layers of a module in the order of `attention`."""
        from triptych.core.models import attention_sites

        sites = attention_sites(model)
        if len(model.stacks) == 1:
            return sites
        by_place = {(str(site.stack), site.block): site for site in sites}
        return [
            by_place[place.site.named_stack, place.number]
            for place in self.attention.layers
        ]


def open_source(
    source: object,
    *,
    device: str,
    dtype: torch.dtype | str | None,
    tokenizer: Any,
    languages: tuple[str, str] | None,
    engine: EngineName | None,
    precision: Precision,
    offline: bool,
    family: Family | str | Path | None,
    strict: bool,
    shortlist: str | Path | None,
    ensemble: Sequence[str | Path],
    code: str | Path | None,
    adapter: Sequence[str | Path] | str | PathLike[str] = (),
) -> Opened:
    """Find a source: files, a name on the Hub, or a model in memory, without running it."""
    if code is not None:
        use_code(code)
    engine = engine or "triptych"
    if engine != "triptych" and dtype is not None:
        raise UsageError(f"--engine {engine} rounds by --precision: leave out --dtype")
    if engine == "ctranslate2":
        require_ctranslate2()
    options = Options(
        device,
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        None if languages is None else Languages(*languages),
        engine,
        precision,
        None if shortlist is None else Path(shortlist),
        tuple(find_source(one, offline=offline) for one in ensemble),
    )
    described = read_family(Path(family)) if isinstance(family, str | Path) else family
    adapters = (
        (Path(adapter),) if isinstance(adapter, str | PathLike) else tuple(adapter)
    )
    found = find_source(
        source,
        tokenizer=tokenizer,
        offline=offline,
        family=described,
        strict=strict,
        adapters=adapters,
    )
    # A model in memory has its configuration already: these options would be ignored.
    of_files = {
        "family": family,
        "strict": strict,
        "languages": languages,
        "offline": offline,
    }
    if found.module is not None and any(of_files.values()):
        stray = next(name for name, value in of_files.items() if value)
        raise UsageError(
            f"{stray} is for a model in files: leave it out for one in memory"
        )
    return Opened(found, options)


def summary_of(opened: Opened) -> str:
    """Describe a model in a line: family, layers, heads, widths, parameters."""
    # Cross-attention is not listed: it is part of every decoder layer.
    source = opened.attention
    layers = opened.layers
    stacks = dict[str, list[Layer]]()
    for layer, place in zip(layers, source.layers, strict=True):
        stacks.setdefault(place.site.named_stack, []).append(layer)
    parts = []
    for stack, own in stacks.items():
        if stack != "cross":
            name = stack if len(opened.places.stacks) > 1 else ""
            weights = len([layer for layer in own if layer.shares is None])
            of = "" if weights == len(own) else f" with the weights of {weights}"
            parts.append(
                f"{name} {len(own)} layers{of} × {own[0].num_heads} heads".strip()
            )
    first = layers[0]
    dtype = str(next(first.outline.tensors()).dtype).removeprefix("torch.")
    kind = "" if len(stacks) > 1 else f" {next(iter(stacks))}"
    millions = opened.num_parameters / 1e6
    size = f"{millions:,.1f} M" if millions >= 0.1 else f"{opened.num_parameters:,}"
    return (
        f"{source.written_as}{kind}, {', '.join(parts)}, d_model {first.d_model}, "
        f"d_k {first.outline.multiplied('q').d_out}, {size} parameters ({dtype})"
    )


def describe(opened: Opened) -> str:
    """Describe a model in lines: summary, changes, parts without attention, warnings, absent weights."""
    source = opened.unchanged.attention
    rows = [f"Model {opened.name}: {summary_of(opened)}"]
    if opened.changes:
        rows.append(f"  changed: {changes_in_words(opened)}")
    rows += [f"  {note}" for note in (source.others, *source.warnings[:2]) if note]
    if source.absent:
        rows.append(f"  absent from the files: {', '.join(source.absent)}")
    return "\n".join(rows)


def describe_as_html(opened: Opened) -> str:
    """Describe a model as an HTML table, for notebooks."""
    rows = [("model", summary_of(opened)), ("found at", opened.where)]
    if opened.changes:
        rows.append(("changed", changes_in_words(opened)))
    return table_html(opened.name, rows)


def changes_in_words(opened: Opened) -> str:
    return ", ".join(change.words for change in opened.changes)
