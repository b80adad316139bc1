"""The comparison of checkpoints whose attention can be read, and that cannot be run.

Attention layers are compared as in other models, and norms together with the known maps after them. All
else, the configuration included, has to be equal, since its effect is unknown.
"""

import copy
from collections.abc import Mapping
from typing import Any, Literal, final

import torch

from triptych.core.algebra.weights import Norm
from triptych.core.checkpoints.fitted_weights import resizing
from triptych.core.checkpoints.norm_readers import NormReader, NormSite, norm_sites
from triptych.core.checkpoints.stored_layers import AttentionLayer, Site
from triptych.core.storage import set_entry
from triptych.progress import Progress
from triptych.rewriting.differences.affine_maps import (
    PLAIN,
    AffineMap,
    Reading,
    rounded_rows,
    unfolded_rows,
)
from triptych.rewriting.differences.attention_pairs import (
    LayerView,
    compare_attention,
    same_numbers,
)
from triptych.rewriting.differences.difference_records import SettingDifference
from triptych.rewriting.differences.field_differences import different_fields
from triptych.rewriting.differences.parts import Part
from triptych.rewriting.differences.rounded import (
    Rounded,
    equal_numbers,
    finer,
    is_same,
)
from triptych.rewriting.differences.sides import CheckpointSide, Pair, ReadSide

# Entries of a configuration without an effect on the computation.
OF_NO_EFFECT = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
)
# A layer of the model: its stack, its kind and the numbers of its uses.
_Where = tuple[str, Literal["self", "causal", "cross"], tuple[int, ...]]


def compare_read(
    pair: Pair, progress: Progress
) -> tuple[list[Part], list[SettingDifference], list[str]]:
    """Return the parts, differing settings and further reasons of two readable checkpoints, not runnable."""
    one, other = pair
    if not isinstance(one, ReadSide) or not isinstance(other, ReadSide):
        only = one if isinstance(one, ReadSide) else other
        return [], [], [f"one can be run and the other not: {only.why_no_architecture}"]
    if one.checkpoint.written_as != other.checkpoint.written_as:
        return (
            [],
            [],
            [
                f"families are {one.checkpoint.written_as} and {other.checkpoint.written_as}"
            ],
        )
    comparison = ReadComparison(one, other)
    if comparison.sites[0].keys() != comparison.sites[1].keys():
        return [], [], ["attention layers are others"]
    parts = []
    for number, where in enumerate(comparison.sites[0]):
        part = comparison.attention(where)
        progress(part.name, number, len(comparison.sites[0]))
        parts.append(part)
    return [*parts, comparison.norms(), comparison.rest()], comparison.settings(), []


def compare_beside(pair: Pair) -> tuple[list[Part], frozenset[str]]:
    """Return the parts of two runnable checkpoints outside the models that run, and their tensors.

    Such parts are towers for pictures and sound next to a model of texts.
    """
    one, other = pair
    if not isinstance(one, CheckpointSide) or not isinstance(other, CheckpointSide):
        return [], frozenset()
    comparison = ReadComparison(one, other)
    shared = [where for where in comparison.sites[0] if where in comparison.sites[1]]
    parts = [comparison.attention(where) for where in shared]
    if comparison.norm_sites[0].keys() & comparison.norm_sites[1].keys():
        parts.append(comparison.norms())
    return parts, frozenset(comparison.compared)


@final
class ReadComparison:
    """The comparison of two checkpoints of one family, without the models that run."""

    def __init__(
        self, one: ReadSide | CheckpointSide, other: ReadSide | CheckpointSide
    ) -> None:
        self.pair = one, other
        self.sites = tuple(
            {(site.stack, site.kind, site.numbers): site for site in own.sites_beside}
            for own in self.pair
        )
        self.norm_sites = _foldable(one), _foldable(other)
        self.compared = set[str]()
        self._folded = set[Site]()  # attention layers of A compared with their norms

    def attention(self, where: _Where) -> Part:
        site = self.sites[0][where]
        stacks = {own.named_stack for own in self.pair[0].checkpoint.sites}
        name = (
            f"{site.named_stack}.{site.layer}" if len(stacks) > 1 else str(site.layer)
        )
        part = Part(f"{name} attention", "attention", name)
        layers = [
            own.checkpoint.read(sites[where])
            for own, sites in zip(self.pair, self.sites, strict=True)
        ]
        folds = all(
            self._folds(number, layer, sites[where])
            for number, (layer, sites) in enumerate(
                zip(layers, self.sites, strict=True)
            )
        )
        if folds:
            self._folded.add(site)
        views = [
            LayerView(
                layer.weights.without_norms(),
                _reading(layer.weights.norm) if folds else PLAIN,
            )
            for layer in layers
        ]
        for own, sites in zip(self.pair, self.sites, strict=True):
            self.compared |= own.checkpoint.used_names(sites[where])
            if not folds:
                self.compared -= own.checkpoint.norm_names(sites[where])
        part.has_same_numbers = same_numbers(views[0], views[1])
        if not part.has_same_numbers:
            part.found = compare_attention(views[0], views[1], name)
        return part

    def _folds(self, number: int, layer: AttentionLayer, site: Site) -> bool:
        """Return True if all readers of a layer's norm are known."""
        weights = layer.weights
        if weights.norm is None or weights.norm_place != "pre":
            return False
        known = any(norm.attention == site for norm in self.norm_sites[number].values())
        return not weights.other_norm_readers or known

    def norms(self) -> Part:
        """Compare norms with the maps outside attention that read them."""
        part = Part("norms and maps that read them", "other")
        found = part.found
        tensors = [own.checkpoint.tensors for own in self.pair]
        part.has_same_numbers = True
        for module, site in self.norm_sites[0].items():
            other = self.norm_sites[1].get(module)
            if other is None or len(site.readers) != len(other.readers):
                continue
            readings = [
                _reading(own.read(stored))
                for own, stored in zip((site, other), tensors, strict=True)
            ]
            self.compared |= {*site.all_tensors, *other.all_tensors}
            part.has_same_numbers &= readings[0].same_as(readings[1])
            if not readings[0].same_as(readings[1]):
                found.steps["fold_other_norms"] = True
                if site.attention is not None and site.attention not in self._folded:
                    found.reasons.append(f"{module} differs, which attention reads")
            for mine, theirs in zip(site.readers, other.readers, strict=True):
                if not self._is_same_map(mine, theirs, readings):
                    found.reasons.append(f"{mine.module} differs")
        part.has_same_numbers &= not found.reasons
        return part

    def _is_same_map(
        self, mine: NormReader, theirs: NormReader, readings: list[Reading]
    ) -> bool:
        """Compare a map of a norm's output, or several maps of it."""
        stored = [
            own.read(side.checkpoint.tensors)
            for own, side in zip((mine, theirs), self.pair, strict=True)
        ]
        (weight_a, bias_a), (weight_b, bias_b) = stored
        if weight_a.shape != weight_b.shape:
            return False
        dtype = finer(weight_a.dtype, weight_b.dtype)
        maps = []
        for weight, bias in ((weight_a, bias_a), (weight_b, bias_b)):
            copies = weight.reshape(-1, *weight.shape[-2:])
            zeros = torch.zeros(copies.shape[0], copies.shape[1])
            of_bias = (
                Rounded.exact(zeros)
                if bias is None
                else Rounded.stored(bias.reshape(zeros.shape), dtype)
            )
            maps.append(AffineMap(Rounded.stored(copies, dtype).mT, of_bias))
        rounded = rounded_rows(readings[0], readings[1], weight_a.shape[-1])
        if bool(unfolded_rows(maps[0], maps[1], (readings[0], readings[1])).any()):
            return False
        read = [
            own.reading(reading).rows()
            for own, reading in zip(maps, readings, strict=True)
        ]
        return is_same(read[0], read[1], rounded[:, None])

    def rest(self) -> Part:
        """Compare all tensors outside the parts compared before."""
        part = Part("all other tensors", "other")
        one, other = self.pair
        names = [
            [name for name in own.stored_infos if name not in self.compared]
            for own in self.pair
        ]
        there = {*names[0]} & {*names[1]}
        for name in dict.fromkeys((*names[0], *names[1])):
            if name not in there or not equal_numbers(
                one.read_stored(name), other.read_stored(name)
            ):
                part.found.reasons.append(f"{name} differs")
        part.has_same_numbers = not part.found.reasons
        return part

    def settings(self) -> list[SettingDifference]:
        other = self.pair[1]
        record = self._resized_record()
        found = list[SettingDifference]()
        for name in dict.fromkeys((*record, *other.record)):
            if name not in OF_NO_EFFECT:
                found += different_fields(
                    record.get(name), other.record.get(name), name
                )
        return found

    def _resized_record(self) -> Mapping[str, Any]:
        """Return the configuration of A with the sizes of attention layers in B, where fields have them."""
        one, other = self.pair
        record: dict[str, Any] = copy.deepcopy(dict(one.record))
        for where, site in self.sites[0].items():
            if where not in self.sites[1]:
                continue
            sizes = other.checkpoint.place(self.sites[1][where]).sizes
            if one.checkpoint.place(site).sizes != sizes:
                found = resizing(one.checkpoint, site, sizes)
                for name, value in ({} if found is None else found.settings).items():
                    set_entry(record, name, value)
        return record


def _foldable(side: ReadSide | CheckpointSide) -> dict[str, NormSite]:
    """Return the norms before known maps only, by module, except norms of a runnable model."""
    beside = {*side.beside} if isinstance(side, CheckpointSide) else None
    return {
        site.module: site
        for site in norm_sites(side.checkpoint)
        if site.readers
        and not site.refused
        and site.spec.place == "pre"
        and (beside is None or site.own_tensors[0] in beside)
    }


def _reading(norm: Norm | None) -> Reading:
    if norm is None:
        return PLAIN
    shift = (
        None if norm.bias is None or not bool(norm.bias.any()) else norm.bias.double()
    )
    return Reading(norm.offset + norm.weight.double(), shift, centred=norm.centred)
