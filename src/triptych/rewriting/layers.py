"""Apply rewrites to one attention layer, as a whole and in float64."""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import final

import torch

from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import Layer, LayerRewrite, OtherReaders, Rewrite, RewriteRefusedError
from triptych.algebra.weights import AttentionWeights
from triptych.checkpoints.layer import AttentionLayer
from triptych.rewriting.certificate import StepRecord


@final
@dataclass(frozen=True, eq=False)
class RewrittenLayer:
    """A layer after the rewrites."""

    weights: AttentionWeights  # the new weights, in float64
    kept: tuple[int, ...] | None  # the heads that are left, in order; None if all are, unchanged
    records: tuple[StepRecord, ...]  # the records of all rewrites, done or refused

    @property
    def changed(self) -> bool:
        return any(not record.refused for record in self.records)

    @property
    def took_up_norm(self) -> bool:
        """Whether the maps have taken up the norm before the layer."""
        return any(record.rewrite == "fold_norm" and not record.refused for record in self.records)

    @property
    def bounded(self) -> bool:
        """Whether the function changed by more than rounding."""
        return any(record.tier == "bounded" for record in self.records)


def rewrite_layer(
    read: AttentionLayer,
    steps: Sequence[Rewrite],
    *,
    skip_refused: bool,
    longest_text: int = 2048,
    moments: Mapping[int, Moments] | None = None,
    others: OtherReaders | None = None,
) -> RewrittenLayer:
    """Rewrite a layer in float64. The moments are those before a step, by its number."""
    layer = Layer(read.site.name, read.weights.to(torch.float64), longest_text, others=others)
    kept: tuple[int, ...] | None = None
    records: list[StepRecord] = []
    for number, step in enumerate(steps):
        if not isinstance(step, LayerRewrite) or not applies_to(step, read.site.layer):
            continue
        try:
            done = step.apply(replace(layer, moments=(moments or {}).get(number)))
        except RewriteRefusedError as refused:
            if not skip_refused:
                raise refused.at(read.site.name) from None
            records.append(StepRecord(rewrite=step.name, refused=refused.reason))
            continue
        layer = replace(layer, weights=done.weights)
        if (left := done.record.kept) is not None:
            kept = left if kept is None else tuple(kept[head] for head in left)
        records.append(StepRecord.of(step.name, done.record, read.cache_bytes))
    return RewrittenLayer(layer.weights, kept, tuple(records))


def applies_to(step: Rewrite, layer: int) -> bool:
    """Whether a rewrite is of the layers with a number."""
    return step.layers is None or layer in step.layers


def shape_of(weights: AttentionWeights) -> AttentionWeights:
    """The weights on the "meta" device, for costs."""
    return weights.mapped(lambda tensor: tensor.to("meta"))


def give_back_memory() -> None:
    """Return free memory to the system with glibc, which seldom uses a freed piece again for torch."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it can return free memory."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None
