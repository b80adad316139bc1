"""The source of a `Model`: its files or its module, each part opened on first use."""

import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import final

import torch

from triptych.core.algebra.weights import Link, Side
from triptych.core.checkpoints.checkpoint import Checkpoint, OwnModel, open_checkpoint
from triptych.core.checkpoints.source import ModuleOfOthers, Source
from triptych.core.checkpoints.stored_layers import (
    AttentionLayer,
    AttentionSource,
    LayerPlace,
    Site,
    in_ranges,
)
from triptych.core.heads import Layer
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.core.models.device import find_device
from triptych.core.models.sites import AttentionSite, attention_sites
from triptych.core.places import PlaceNames
from triptych.errors import TriptychError, UsageError
from triptych.running.changes import Change, Steering
from triptych.running.decoding.linear_maps import own_memory
from triptych.running.opening import OpenedModel, open_model
from triptych.running.opening.options import Options
from triptych.running.text import Tokenizer, TokenizerPair, load_tokenizer


@final
@dataclass(eq=False)
class Opened:
    """A source with its parts opened so far.

    Attributes:
        name: source as given, or name of a module.
        source: files; None for a triptych module.
        options: options for opening and running the model.
        module: triptych model in memory, instead of files.
        temporary: folder of a rewritten model, removed together with this object.
        is_mapped: True if weights are memory-mapped from their files rather than read.
    """

    name: str
    source: Source | None
    options: Options
    module: LanguageModel | EncoderDecoder | None = None
    temporary: Path | None = None
    is_mapped: bool = True
    _owns_weights: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.temporary is not None:
            weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)

    def named(self, name: str, *, is_mapped: bool) -> "Opened":
        """Return the same source, and its opened model if any, under another name."""
        source = None if self.source is None else self.source.named(name)
        made = replace(self, name=name, source=source, temporary=None, is_mapped=is_mapped)
        made.__dict__["named_after"] = self  # a reference, so that its temporary folder is not removed
        if "model" in self.__dict__:
            made.__dict__["model"] = self.model.named(name)
        return made

    def reopened(self) -> "Opened":
        """Return the same source, opened again from its files."""
        if self.source is None or self.source.is_in_memory:
            raise UsageError(f"{self.name} is in memory: it has no files that could be opened anew")
        others = tuple(one.reopened() for one in self.options.ensemble)
        return Opened(self.name, self.source.reopened(), replace(self.options, ensemble=others))

    @cached_property
    def attention(self) -> AttentionSource:
        """The attention layers, with weights read on first use."""
        if self.module is not None:
            return OwnModel(self.module, self.name)
        return open_checkpoint(self.files, mapped=self.is_mapped)

    @property
    def files(self) -> Source:
        """The files of the source, checked to be unchanged."""
        if self.source is None:
            raise UsageError(f"{self.name} is a module in memory and has no files: save it first")
        self.source.require_same()
        return self.source

    def require_same(self) -> None:
        """Check files and parameters for changes since the source was found."""
        if self.source is not None:
            self.source.require_same()
        for other in self.options.ensemble:
            other.require_same()

    @property
    def where(self) -> str:
        """The location of the source."""
        return "memory" if self.source is None else self.source.where.removesuffix("/config.json")

    @cached_property
    def model(self) -> OpenedModel:
        """The model with its tokenizers, opened by the options."""
        options = self.options
        if self.module is None:
            # CTranslate2 runs its own copy, so the module stays on the CPU.
            device = "cpu" if options.engine == "ctranslate2" else options.device
            return open_model(self.files, device, options.dtype, options.languages)
        module = self.module.to(find_device(options.device), options.dtype)
        if options.tokenizer is None:
            why = UsageError(f"{self.name} has no tokenizer: load(module, tokenizer=FOLDER) reads texts")
            if isinstance(module, EncoderDecoder):
                raise why
            return OpenedModel(self.name, Path(), module, why)
        folder = options.tokenizer
        tokenizers: Tokenizer | TokenizerPair = (
            TokenizerPair.load(folder)
            if isinstance(module, EncoderDecoder)
            else load_tokenizer(folder, vocab_size=module.vocab_size)
        )
        return OpenedModel(self.name, folder, module, tokenizers)

    @cached_property
    def ready(self) -> OpenedModel:
        """The model with its shortlist and ensemble, ready to run on texts."""
        opened = self.model
        options = self.options
        found = None if self.source is None else self.source.found
        # A module of another library without a tokenizer runs on token ids only.
        if isinstance(found, ModuleOfOthers) and not found.has_tokenizer:
            why = UsageError(f"{self.name} has no tokenizer: load(model, tokenizer=…) reads texts")
            opened = opened.without_tokenizer(why)
        if options.shortlist is not None:
            opened = opened.with_shortlist(options.shortlist)
        if options.ensemble:
            others = (
                open_model(one, options.device, options.dtype, options.languages) for one in options.ensemble
            )
            opened = opened.with_ensemble([*others])
        return opened

    def own_weights(self) -> None:
        """Copy the module's weights from their mapped files into memory if there is enough free memory.

        A truncated file would end the process during a long job.
        """
        if self._owns_weights or self.source is None or self.source.is_in_memory:
            return
        own_memory([self.model.model])  # changed models share these parameters
        self.require_same()
        self._owns_weights = True

    @cached_property
    def why_not_run(self) -> str:
        """The reason why the model cannot be run; "" if it can."""
        try:
            assert self.ready
        except TriptychError as error:
            return str(error)
        return ""

    @property
    def num_parameters(self) -> int:
        """The number of parameters in all tensors of the files, or of the module."""
        source = self.attention
        if isinstance(source, Checkpoint):
            return sum(torch.Size(info.shape).numel() for info in source.tensors.infos.values())
        assert isinstance(source, OwnModel)
        return sum(parameter.numel() for parameter in source.model.parameters())

    def sites_of(self, model: LanguageModel | EncoderDecoder) -> list[AttentionSite]:
        """Return the layers of a module in the order of `attention`."""
        sites = attention_sites(model)
        if isinstance(model, LanguageModel):
            return sites
        by_place = {(str(site.stack), site.block): site for site in sites}
        return [by_place[stack_of(place.site), place.number] for place in self.attention.layers]


@final
class ChangedSource(AttentionSource):
    """The attention layers of a source with changed weights.

    Layers with shared weights keep sharing them if all changes have the same effect on them.
    """

    def __init__(self, source: AttentionSource, changes: Sequence[Change]) -> None:
        self._source = source
        self._changes = changes
        self.name = source.name
        self.written_as = source.written_as
        self.known_by = source.known_by
        self.num_tensors = source.num_tensors
        self.left_over = source.left_over
        self.unread = source.unread
        self.absent = source.absent
        self.warnings = source.warnings
        self.others = source.others
        self._places = dict[Site, tuple[Site, int]]()  # site of the source, and number in model order
        self._site_of_layer = dict[int, Site]()
        # Split the layers of a site into groups with equal changes; each group becomes a site.
        for site in source.sites:
            for layers in _still_together(source, site, changes):
                first, *others = (source.layers[layer].number for layer in layers)
                own = replace(site, layer=first, also=tuple(others))
                self._places[own] = site, layers[0]
                self._site_of_layer |= dict.fromkeys(layers, own)
        self.sites = tuple(self._places)

    @cached_property
    def layers(self) -> tuple[LayerPlace, ...]:
        return tuple(
            LayerPlace(self._site_of_layer[layer], place.number)
            for layer, place in enumerate(self._source.layers)
        )

    @property
    def source(self) -> Source | None:
        return self._source.source

    def read(self, site: Site) -> AttentionLayer:
        stored, number = self._places[site]
        layer = replace(self._source.read(stored), site=site)
        for change in self._changes:
            if number in change.layers:
                layer = replace(layer, weights=change.of_weights(number, layer.weights))
        lender = self.lender(site)
        if lender is not None and self._is_changed(lender):
            lent = self.read(lender).weights
            layer = replace(layer, weights=replace(layer.weights, k=lent.k, v=lent.v))
        return layer

    def outline(self, site: Site) -> AttentionLayer:
        return self.read(site) if self._is_changed(site) else self._source.outline(self._stored(site))

    def lender(self, site: Site) -> Site | None:
        lender = self._source.lender(self._stored(site))
        return None if lender is None else next(own for own in self.sites if self._stored(own) == lender)

    def read_map(self, site: Site, side: Side, head: int) -> Link | None:
        return None if self._is_changed(site) else self._source.read_map(self._stored(site), side, head)

    def _stored(self, site: Site) -> Site:
        return self._places[site][0]

    def _is_changed(self, site: Site) -> bool:
        lender = self.lender(site)
        number = self._places[site][1]
        return any(number in change.layers for change in self._changes) or (
            lender is not None and self._is_changed(lender)
        )

    def bytes_of(self, site: Site) -> int:
        return self._source.bytes_of(self._stored(site))

    def longest_text(self, site: Site) -> int:
        return self._source.longest_text(self._stored(site))

    def input_modules(self, site: Site) -> tuple[str, str]:
        return self._source.input_modules(self._stored(site))

    def broken(self, layer: AttentionLayer) -> Mapping[str, int]:
        return self._source.broken(layer)


def _still_together(source: AttentionSource, site: Site, changes: Sequence[Change]) -> list[list[int]]:
    """Group the layers of a site by their changes; each group lists layer numbers in model order."""
    found: dict[tuple[object, ...], list[int]] = {}
    for layer, place in enumerate(source.layers):
        if place.site == site:
            found.setdefault(tuple(change.layers.get(layer) for change in changes), []).append(layer)
    return list(found.values())


def why_not_saved(change: Change, source: AttentionSource) -> str:
    """Return the reason why a change cannot be written into the weights of a source; "" if it can."""
    if change.unsayable:
        return change.unsayable
    # Files store shared weights once, so a change has to be the same for all layers with these weights.
    for site in source.sites:
        shared = f"layers {in_ranges(site.numbers)} share their weights"
        if len(parts := _still_together(source, site, [change])) > 1:
            changed = [layer for part in parts for layer in part if layer in change.layers]
            some = in_ranges(sorted(source.layers[layer].number for layer in changed))
            if len(changed) == len(site.numbers):
                return f"{shared}, and it makes something else of each of them"
            return f"{shared}, and it changes {'layer' if len(changed) == 1 else 'layers'} {some} alone"
        last = change.block - 1 if isinstance(change, Steering) and change.stack == site.stack else None
        if site.also and last in site.numbers:
            return f"{shared}, and with them the bias that would take the direction in after layer {last}"
    return ""


def stack_of(site: Site) -> str:
    """Return the stack in the name of a layer: "cross" for cross-attention."""
    return "cross" if site.kind == "cross" else site.stack


def summary_of(opened: Opened, layers: Sequence[Layer], places: PlaceNames) -> str:
    """Describe a model in a line: family, layers, heads, widths, parameters."""
    # Cross-attention is not listed: it is part of every decoder layer.
    source = opened.attention
    stacks = dict[str, list[Layer]]()
    for layer, place in zip(layers, source.layers, strict=True):
        stacks.setdefault(stack_of(place.site), []).append(layer)
    parts = []
    for stack, own in stacks.items():
        if stack != "cross":
            name = stack if len(places.stacks) > 1 else ""
            weights = len([layer for layer in own if layer.shares is None])
            of = "" if weights == len(own) else f" with the weights of {weights}"
            parts.append(f"{name} {len(own)} layers{of} × {own[0].num_heads} heads".strip())
    first = layers[0]
    dtype = str(next(first.outline.tensors()).dtype).removeprefix("torch.")
    kind = "" if len(stacks) > 1 else f" {next(iter(stacks))}"
    millions = opened.num_parameters / 1e6
    size = f"{millions:,.1f} M" if millions >= 0.1 else f"{opened.num_parameters:,}"
    return (
        f"{source.written_as}{kind}, {', '.join(parts)}, d_model {first.d_model}, "
        f"d_k {first.outline.multiplied('q').d_out}, {size} parameters ({dtype})"
    )
