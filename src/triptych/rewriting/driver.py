"""The driver of rewrites: steps taken through the layers of a source, each layer by itself and in float64.

A source is a function for each layer that reads it. What comes out goes into a model in memory (`models`), a
plan (`planning`), a folder (`checkpoint`), or is compared with what is there (`checking`).
"""

import ctypes
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, final

from triptych.core.algebra.rewritten import RewriteRecord, RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights
from triptych.rewriting.functions.moments import Moments
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite, Rewrite


class StepOutcome(NamedTuple):
    """What became of a step at a layer."""

    step: str  # its name
    record: RewriteRecord | None = None  # None if it was refused
    refused: str = ""  # why; "" if it was done


@final
@dataclass(frozen=True, eq=False)
class RewrittenLayer:
    """A layer after the steps."""

    weights: AttentionWeights  # in float64
    kept: tuple[int, ...] | None  # the heads that are left, in order; None if all are, unchanged
    outcomes: tuple[StepOutcome, ...]  # of every step that applies to the layer


@final
class Driver:
    """Steps, made ready for the layers of a source.

    Attributes:
        steps: with what only all layers together, or a text, could tell.
        moments: of the layers before each step, by name, where it looks at them.
    """

    def __init__(
        self,
        # numbers of the layers with some weights, and what reads these
        layers: Sequence[tuple[Collection[int], Callable[[], LayerToRewrite]]],
        steps: Sequence[Rewrite],
        *,
        skip_refused: bool = False,
        look: Callable[["Driver", Rewrite], tuple[Rewrite, Mapping[str, Moments]]] | None = None,
    ) -> None:
        self.steps: tuple[Rewrite, ...] = ()
        self.moments: list[Mapping[str, Moments]] = []
        self._skip_refused = skip_refused
        for step in steps:
            found: Mapping[str, Moments] = {}
            if step.needs_text:
                if look is None:
                    raise RewriteRefusedError(step.name, "it looks at a text", "rewrite a checkpoint")
                step, found = look(self, step)
            step = step.prepare(self._before(step, layers, found), skip_refused=skip_refused)
            self.steps = (*self.steps, step)
            self.moments.append(found)

    def _before(
        self,
        step: Rewrite,
        layers: Sequence[tuple[Collection[int], Callable[[], LayerToRewrite]]],
        moments: Mapping[str, Moments],
    ) -> Iterator[LayerToRewrite]:
        """The layers that a step applies to, after the steps before it."""
        for numbers, read in layers:
            if applies_to(step, numbers):
                layer = read()
                yield replace(layer, weights=self.rewritten(layer).weights, moments=moments.get(layer.name))

    def rewritten(self, layer: LayerToRewrite, upto: int | None = None) -> RewrittenLayer:
        """A layer after all steps, or the first `upto`."""
        kept: tuple[int, ...] | None = None
        outcomes: list[StepOutcome] = []
        for step, moments in [*zip(self.steps, self.moments, strict=True)][:upto]:
            if not isinstance(step, LayerRewrite) or not applies_to(step, layer.numbers):
                continue
            try:
                done = step.apply(replace(layer, moments=moments.get(layer.name)))
            except RewriteRefusedError as refused:
                if not self._skip_refused:
                    raise (refused.at(layer.name) if layer.name else refused) from None
                outcomes.append(StepOutcome(step.name, refused=refused.reason))
                continue
            layer = replace(layer, weights=done.weights)
            if (left := done.record.kept) is not None:
                kept = left if kept is None else tuple(kept[head] for head in left)
            outcomes.append(StepOutcome(step.name, done.record))
        return RewrittenLayer(layer.weights, kept, tuple(outcomes))


def applies_to(step: Rewrite, layers: Collection[int]) -> bool:
    """Return True if a rewrite applies to the weights that the layers with these numbers have."""
    return step.layers is None or not {*layers}.isdisjoint(step.layers)


def give_back_memory() -> None:
    """Return free memory to the system with glibc, which seldom uses a freed piece again for torch."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it can return free memory."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None
