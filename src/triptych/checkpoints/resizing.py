"""Which sizes of an attention layer a checkpoint's configuration can change, and the entries that say so.

Number and width of heads are fields of a configuration in some formats, and follow from others in the rest.
Only where a field of its own decides a size, and nothing else hangs on it, can a file hold another one.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, final

from triptych.algebra.weights import AttentionWeights
from triptych.checkpoints.checkpoint import Checkpoint
from triptych.checkpoints.layer import Site
from triptych.checkpoints.place import MapSizes, Place
from triptych.errors import DataError
from triptych.storage.settings import Settings
from triptych.storage.tensors import Tensors


@final
@dataclass(frozen=True)
class Resizing:
    """How a configuration says other sizes."""

    settings: dict[str, Any]  # the entries it must have, by dotted path
    sites: tuple[Site, ...]  # the layers that get these sizes with them: all that share the configuration


def sizes_of(weights: AttentionWeights) -> MapSizes:
    """The sizes of a layer with one map a side."""
    q, k, v = (weights.chain(side)[-1] for side in ("q", "k", "v"))
    return MapSizes(weights.num_heads, k.copies, q.d_out, v.d_out)


def resizing(checkpoint: Checkpoint, site: Site, wanted: MapSizes) -> Resizing | None:
    """The entries with which a layer would have other sizes; None if its format cannot say them.

    A planner can tell by it what `write_layer` will do: with None, narrower heads are padded with zeros,
    heads that are gone become zero maps, fewer key-value heads are repeated and more of them refused.
    All of `sites` must be rewritten to the same sizes; where they are not, `write_layer(…, same_sizes=True)`
    does as for None.

    A size is free where one plain field of the configuration decides it (T5's `d_kv`, `num_key_value_heads`;
    the number of heads where `head_dim` is given) and
        heads: no position has numbers for each (ALiBi, distance tables), no norm of queries and keys has
            gains for each, and they divide the width of the model, which `transformers` wants;
        groups: no norm of keys has gains for each;
        width: no rotary or disentangled positions, no norm of queries and keys; values have the same.
    """
    place = checkpoint.place(site)
    if place.spec.why_kept:
        return None
    here = place.sizes
    entries = _entries(place, here, wanted)
    if entries is None:
        return None
    changed = Settings({**place.settings.record, **entries}, place.settings.where)
    if _sizes_or_none(place, changed) != wanted:
        return None
    resized = []
    path = path_of_record(checkpoint, place)
    for other in checkpoint.sites:
        at = checkpoint.place(other)
        if path_of_record(checkpoint, at) != path or at.spec.why_kept:
            continue
        old, new = at.sizes, _sizes_or_none(at, changed)
        if old == new:
            continue
        if new is None or not (
            _follows(old, new, here, wanted) and _is_free(at, old, new, checkpoint.tensors)
        ):
            return None
        resized.append(other)
    return Resizing({f"{path}{name}": value for name, value in entries.items()}, tuple(resized))


def _sizes_or_none(place: Place, settings: Settings) -> MapSizes | None:
    """None for a configuration that gives none: a width that heads do not divide, say."""
    try:
        return replace(place, settings=settings).sizes
    except DataError:
        return None


def _entries(place: Place, here: MapSizes, wanted: MapSizes) -> dict[str, int] | None:
    """Fields to set; None where a size has none."""
    spec, settings = place.spec, place.settings
    found: dict[str, int] = {}
    for old, new, expression in (
        (here.heads, wanted.heads, spec.heads),
        (here.width, wanted.width, spec.width),
    ):
        if old != new:
            field = _field_read(expression, settings, place.layer)
            if field is None:
                return None
            found[field] = new
    groups = place.chosen(spec.groups) or spec.heads
    after = Settings({**settings.record, **found}, settings.where)
    if after.value(groups, place.layer) != wanted.groups:
        field = _own_field(groups, spec.heads, settings, place.layer)
        if field is None:
            return None
        found[field] = wanted.groups
    return found


def _alternatives(expression: str) -> list[str]:
    return [alternative.strip() for alternative in expression.split("|")]


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*", name) is not None


def _field_read(expression: str, settings: Settings, layer: int) -> str | None:
    """The field that gives the value now; None if something else does."""
    read = next((a for a in _alternatives(expression) if settings.value(a, layer) is not None), "")
    return read if _is_plain(read) else None


def _own_field(expression: str, of_heads: str, settings: Settings, layer: int) -> str | None:
    """A field that would give the value, and not the number of heads at once; one that gives it now first."""
    own = [a for a in _alternatives(expression) if _is_plain(a) and a not in _alternatives(of_heads)]
    read = _field_read(expression, settings, layer)
    return read if read in own else next(iter(own), None)


def _follows(old: MapSizes, new: MapSizes, here: MapSizes, wanted: MapSizes) -> bool:
    """Whether another layer changes in nothing but what was wanted."""
    return all(
        now == before or now == asked != first
        for now, before, asked, first in zip(new, old, wanted, here, strict=True)
    )


def _is_free(place: Place, old: MapSizes, new: MapSizes, tensors: Tensors) -> bool:
    spec, settings, layer = place.spec, place.settings, place.layer
    position, norm = place.position.kind, place.head_norm
    gains_of_heads = norm is not None and (
        norm.over == "all heads"
        or any("{head}" in name for name in (norm.q, norm.k))
        or (bool(norm.k) and len(tensors.infos[f"{place.site.module}.{norm.k}.weight"].shape) > 1)
    )
    if old.heads != new.heads:
        size = settings.value(spec.size, layer) if spec.size else None
        if isinstance(size, int) and size % new.heads:
            return False
        if gains_of_heads or position in ("alibi", "distance table", "disentangled"):
            return False
    if old.groups != new.groups and gains_of_heads:
        return False
    return old.width == new.width or (norm is None and position not in ("rotary", "disentangled"))


def path_of_record(checkpoint: Checkpoint, place: Place) -> str:
    """What stands before the fields of a layer's configuration: "text_config." or nothing."""
    for path in _alternatives(place.spec.settings):
        try:
            checkpoint.settings.below(path)
        except DataError:
            continue
        return f"{path}." if path else ""
    raise AssertionError(f"the record of {place.site.name} is not in its configuration")
