"""Measurement of the attention heads of a checkpoint: `inspect(path)`.

One layer is in memory at a time. The model is not run: all measures follow from the weights.
"""

import time
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from triptych.core.algebra.weights import AttentionWeights, Side
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.family import Family
from triptych.core.checkpoints.stored_layers import (
    AttentionLayer,
    AttentionSource,
    Site,
)
from triptych.errors import UsageError
from triptych.progress import Progress, untold
from triptych.seeing.inspection.layer_records import (
    InspectedLayer,
    as_read,
    inspect_layer,
)
from triptych.seeing.inspection.record import NEAR, Inspection, NearCopy
from triptych.seeing.similarity import cosine_of_forms, similar, sketches

# Maximum number of exactly computed pairs per form: each pair reads two layers again.
_MOST_PAIRS = 200


@torch.no_grad()
def inspect(
    checkpoint: AttentionSource | str | Path,
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    family: Family | None = None,
    ignore_rotary: bool = False,
    progress: Progress = untold,
) -> Inspection:
    """Measure the heads of a checkpoint."""
    if not isinstance(checkpoint, AttentionSource):
        checkpoint = open_checkpoint(str(checkpoint), family)
    started = time.monotonic()
    if heads is not None and not heads:
        raise UsageError(
            f"{checkpoint.name}: no heads are chosen; name one, or leave heads out for all"
        )
    sites = _chosen_sites(checkpoint, layers)
    total = sum(checkpoint.bytes_of(site) for site in sites)
    done = 0
    found = []
    sketched = _Sketches(checkpoint, ignore_rotary)
    # One layer is in memory at a time; sketches of its forms are kept.
    for site in sites:
        progress(site.name, done, total)
        layer = checkpoint.read(site)
        maps = layer.weights.with_single_links()
        found.append(inspect_layer(checkpoint, layer, maps, heads, ignore_rotary))
        sketched.add(layer, as_read(layer).with_single_links(), found[-1])
        done += found[-1].num_bytes
        del layer, maps
    most = max(layer.num_heads for layer in found) - 1
    if heads is not None and max(heads, default=-1) > most:
        raise UsageError(
            f"{checkpoint.name}: head {max(heads)} does not exist; heads are 0 to {most}"
        )
    progress("heads that are nearly the same", done, total)
    copies, more_copies = sketched.near_copies()
    progress("", total, total)
    return Inspection(
        name=checkpoint.name,
        family=checkpoint.written_as,
        known_by=checkpoint.known_by,
        layers=tuple(found),
        ignores_rotary=ignore_rotary,
        num_tensors=checkpoint.num_tensors,
        left_over=checkpoint.left_over,
        copies=tuple(copies),
        more_copies=more_copies,
        unread=dict(checkpoint.unread),
        others=checkpoint.others,
        absent=checkpoint.absent,
        warnings=checkpoint.warnings,
        seconds=time.monotonic() - started,
    )


def _chosen_sites(
    checkpoint: AttentionSource, layers: Collection[int] | None
) -> list[Site]:
    """Return the layers selected by number, in every stack."""
    if layers is None:
        return [*checkpoint.sites]
    if not layers:
        raise UsageError(
            f"{checkpoint.name}: no layers are chosen; name one, or leave layers out for all"
        )
    checkpoint.require_layers(layers)
    return [site for site in checkpoint.sites if not {*site.numbers}.isdisjoint(layers)]


class _Sketches:
    """Sketches of the forms of all heads, for finding candidates of nearly equal heads."""

    def __init__(self, checkpoint: AttentionSource, ignore_rotary: bool) -> None:
        self._checkpoint = checkpoint
        self._ignore_rotary = ignore_rotary
        # Keys: form and input sizes; values: sketches with their layer, layer name and head.
        self._found: dict[
            tuple[str, int, int], list[tuple[Tensor, Site, str, int]]
        ] = {}
        self._kept: dict[Site, dict[str, tuple[Tensor, Tensor]]] = {}

    def add(
        self, layer: AttentionLayer, maps: AttentionWeights, inspected: InspectedLayer
    ) -> None:
        if not inspected.heads:
            return
        for form, (left, right) in self._factors(layer, maps).items():
            size = form, left.shape[1], right.shape[1]
            rows = sketches(left, right)
            self._found.setdefault(size, []).extend(
                (rows[head], layer.site, inspected.name, head)
                for head in _first_of_each(form, maps, inspected.heads)
                if bool(rows[head].isfinite().all())
            )

    def near_copies(self) -> tuple[list[NearCopy], bool]:
        """Return pairs of heads with an absolute cosine of at least `NEAR`, in descending order."""
        found = []
        # Sketches select candidates; the cosine of each candidate is then computed exactly.
        more = False
        for (form, *_), heads in self._found.items():
            pairs = (
                similar(torch.stack([row for row, *_ in heads]), NEAR, _MOST_PAIRS + 1)
                if heads
                else []
            )
            more |= len(pairs) > _MOST_PAIRS
            # Sorted by layer, so that each pair of layers is read once.
            for i, j in sorted(
                pairs[:_MOST_PAIRS],
                key=lambda pair: (heads[pair[0]][2], heads[pair[1]][2]),
            ):
                (_, one_site, one_name, one), (_, other_site, other_name, other) = (
                    heads[i],
                    heads[j],
                )
                left, right = self._read(one_site)[form]
                other_left, other_right = self._read(other_site)[form]
                cosine = cosine_of_forms(
                    left[one], right[one], other_left[other], other_right[other]
                )
                if abs(cosine) >= NEAR:
                    names = f"{one_name}, head {one}", f"{other_name}, head {other}"
                    found.append(NearCopy(form, *names, cosine))
        return sorted(found, key=lambda pair: -abs(pair.cosine)), more

    def _factors(
        self, layer: AttentionLayer, maps: AttentionWeights
    ) -> dict[str, tuple[Tensor, Tensor]]:
        found = {"ov": (maps.W_V, maps.W_O.mT)}
        if layer.weights.semantics.rotary is None or self._ignore_rotary:
            found["qk"] = maps.W_Q, maps.W_K
        return found

    def _read(self, site: Site) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the factors of a layer; the last two layers are cached."""
        if site not in self._kept:
            layer = self._checkpoint.read(site)
            self._kept[site] = self._factors(layer, as_read(layer).with_single_links())
            while len(self._kept) > 2:
                self._kept.pop(next(iter(self._kept)))
        else:
            self._kept[site] = self._kept.pop(site)
        return self._kept[site]


def _first_of_each(
    form: str, maps: AttentionWeights, heads: Collection[int]
) -> Iterator[int]:
    """Yield the heads without repetition: the first of all heads sharing both maps of a form."""
    sides: tuple[Side, Side] = ("q", "k") if form == "qk" else ("v", "o")
    seen = set[tuple[int, ...]]()
    for head in heads:
        copies = tuple(
            head * maps.chain(side)[0].copies // maps.num_heads for side in sides
        )
        if copies not in seen:
            seen.add(copies)
            yield head
