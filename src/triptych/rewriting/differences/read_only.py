"""The comparison of checkpoints whose attention can be read, and that cannot be run.

Attention layers are compared as in other models. Everything else, norms and the configuration included, has
to be equal, since it is not known what it does.
"""

import torch

from triptych.progress import Progress
from triptych.rewriting.differences.attention import LayerView, compare_attention, same_numbers
from triptych.rewriting.differences.fields import different_fields
from triptych.rewriting.differences.parts import Part
from triptych.rewriting.differences.records import SettingDifference
from triptych.rewriting.differences.sides import Pair, ReadSide

# Entries of a configuration that say nothing about what a model computes.
OF_NO_EFFECT = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


def compare_read(pair: Pair, progress: Progress) -> tuple[list[Part], list[SettingDifference], list[str]]:
    """Return the parts, differing settings and further reasons of two checkpoints that are only read."""
    one, other = pair
    if not isinstance(one, ReadSide) or not isinstance(other, ReadSide):
        only = one if isinstance(one, ReadSide) else other
        return [], [], [f"one can be run and the other not: {only.why_no_architecture}"]
    if one.source.written_as != other.source.written_as:
        return [], [], [f"families are {one.source.written_as} and {other.source.written_as}"]
    sites = [{(site.stack, site.kind, site.numbers): site for site in own.source.sites} for own in pair]
    if sites[0].keys() != sites[1].keys():
        return [], [], ["attention layers are others"]
    parts = []
    stacks = {site.named_stack for site in one.source.sites}
    for number, (place, site) in enumerate(sites[0].items()):
        progress(site.name, number, len(sites[0]))
        name = f"{site.named_stack}.{site.layer}" if len(stacks) > 1 else str(site.layer)
        part = Part(f"{name} attention", "attention", name)
        views = [
            LayerView(own.source.read(mine[place]).weights.without_norms())
            for own, mine in zip(pair, sites, strict=True)
        ]
        part.has_same_numbers = same_numbers(views[0], views[1])
        if not part.has_same_numbers:
            part.found = compare_attention(views[0], views[1], name)
        parts.append(part)
    return [*parts, _rest(one, other)], _settings(one, other), []


def _rest(one: ReadSide, other: ReadSide) -> Part:
    """Compare all tensors outside attention."""
    part = Part("all other tensors", "other")
    names = dict.fromkeys((*one.not_of_attention, *other.not_of_attention))
    there = {*one.not_of_attention} & {*other.not_of_attention}
    for name in names:
        if name not in there or not torch.equal(one.read_stored(name), other.read_stored(name)):
            part.found.reasons.append(f"{name} differs")
    part.has_same_numbers = not part.found.reasons
    return part


def _settings(one: ReadSide, other: ReadSide) -> list[SettingDifference]:
    names = dict.fromkeys((*one.record, *other.record))
    found = list[SettingDifference]()
    for name in names:
        if name not in OF_NO_EFFECT:
            found += different_fields(one.record.get(name), other.record.get(name), name)
    return found
