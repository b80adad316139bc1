"""Attention layers of a source with changed weights, and the changes that fit into files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import final

from triptych.core.algebra.weights import Link, Side
from triptych.core.checkpoints.source import Source
from triptych.core.checkpoints.stored_layers import (
    AttentionLayer,
    AttentionSource,
    LayerPlace,
    Site,
    in_ranges,
)
from triptych.running.changes import Change, Steering


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
        self._places = dict[
            Site, tuple[Site, int]
        ]()  # site of the source, and number in model order
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
    def num_parameters(self) -> int:
        return self._source.num_parameters

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
        return (
            self.read(site)
            if self._is_changed(site)
            else self._source.outline(self._stored(site))
        )

    def lender(self, site: Site) -> Site | None:
        lender = self._source.lender(self._stored(site))
        return (
            None
            if lender is None
            else next(own for own in self.sites if self._stored(own) == lender)
        )

    def read_map(self, site: Site, side: Side, head: int) -> Link | None:
        return (
            None
            if self._is_changed(site)
            else self._source.read_map(self._stored(site), side, head)
        )

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


def _still_together(
    source: AttentionSource, site: Site, changes: Sequence[Change]
) -> list[list[int]]:
    """Group the layers of a site by their changes; each group lists layer numbers in model order."""
    found: dict[tuple[object, ...], list[int]] = {}
    for layer, place in enumerate(source.layers):
        if place.site == site:
            found.setdefault(
                tuple(change.layers.get(layer) for change in changes), []
            ).append(layer)
    return list(found.values())


def why_not_saved(change: Change, source: AttentionSource) -> str:
    """Return the reason why a change cannot be written into the weights of a source; "" if it can."""
    if change.unsayable:
        return change.unsayable
    # Files store shared weights once, so a change has to be the same for all layers with these weights.
    for site in source.sites:
        shared = f"layers {in_ranges(site.numbers)} share their weights"
        if len(parts := _still_together(source, site, [change])) > 1:
            changed = [
                layer for layer in chain.from_iterable(parts) if layer in change.layers
            ]
            some = in_ranges(sorted(source.layers[layer].number for layer in changed))
            if len(changed) == len(site.numbers):
                return f"{shared}, and it makes something else of each of them"
            return f"{shared}, and it changes {'layer' if len(changed) == 1 else 'layers'} {some} alone"
        last = (
            change.block - 1
            if isinstance(change, Steering) and change.stack == site.stack
            else None
        )
        if site.also and last in site.numbers:
            return f"{shared}, and with them the bias that would take the direction in after layer {last}"
    return ""
