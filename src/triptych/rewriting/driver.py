"""The driver of rewrites: applies steps to the layers of a source, layer by layer and in float64.

A source is a reading function per layer. The results become a model in memory (`in_memory`), a plan
(`planning`) or a folder (`whole_checkpoint`), or are compared with a certificate (`checking`).
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
    """Outcome of a step at a layer."""

    step: str  # name of the step
    record: RewriteRecord | None = None  # record of the step; None if refused
    refused: str = ""  # reason of a refusal; "" if the step was done


@final
@dataclass(frozen=True, eq=False)
class RewrittenLayer:
    """A layer after the steps."""

    weights: AttentionWeights  # float64
    kept: (
        tuple[int, ...] | None
    )  # remaining heads, in order; None if all heads remain unchanged
    outcomes: tuple[StepOutcome, ...]  # outcomes of all steps applicable to the layer


@final
class Driver:
    """Steps prepared for the layers of a source.

    Attributes:
        steps: steps with the values determined by all layers together, or by a text.
        moments: moments of the layers before each step, by layer name, if the step uses them.
    """

    def __init__(
        self,
        # indices of layers sharing weights, and the function reading them
        layers: Sequence[tuple[Collection[int], Callable[[], LayerToRewrite]]],
        steps: Sequence[Rewrite],
        *,
        skip_refused: bool = False,
        look: Callable[["Driver", Rewrite], tuple[Rewrite, Mapping[str, Moments]]]
        | None = None,
    ) -> None:
        self.steps: tuple[Rewrite, ...] = ()
        self.moments: list[Mapping[str, Moments]] = []
        # Each step is prepared on the layers after all previous steps.
        self._skip_refused = skip_refused
        for step in steps:
            found: Mapping[str, Moments] = {}
            if step.needs_text:
                if look is None:
                    raise RewriteRefusedError(
                        step.name, "it looks at a text", "rewrite a checkpoint"
                    )
                step, found = look(self, step)
            step = step.prepare(
                self._before(step, layers, found), skip_refused=skip_refused
            )
            self.steps = (*self.steps, step)
            self.moments.append(found)

    def _before(
        self,
        step: Rewrite,
        layers: Sequence[tuple[Collection[int], Callable[[], LayerToRewrite]]],
        moments: Mapping[str, Moments],
    ) -> Iterator[LayerToRewrite]:
        """Yield the layers of a step, after the previous steps."""
        for numbers, read in layers:
            if applies_to(step, numbers):
                layer = read()
                yield replace(
                    layer,
                    weights=self.rewritten(layer).weights,
                    moments=moments.get(layer.name),
                )

    def rewritten(
        self, layer: LayerToRewrite, upto: int | None = None
    ) -> RewrittenLayer:
        """Return a layer after all steps, or after the first `upto`."""
        kept: tuple[int, ...] | None = None
        outcomes: list[StepOutcome] = []
        for step, moments in [*zip(self.steps, self.moments, strict=True)][:upto]:
            if not isinstance(step, LayerRewrite) or not applies_to(
                step, layer.numbers
            ):
                continue
            try:
                done = step.apply(replace(layer, moments=moments.get(layer.name)))
            except RewriteRefusedError as refused:
                if not self._skip_refused:
                    raise (refused.at(layer.name) if layer.name else refused) from None
                outcomes.append(StepOutcome(step.name, refused=refused.reason))
                continue
            layer = replace(layer, weights=done.weights)
            # `kept` refers to the heads of the original layer.
            if (left := done.record.kept) is not None:
                kept = left if kept is None else tuple(kept[head] for head in left)
            outcomes.append(StepOutcome(step.name, done.record))
        return RewrittenLayer(layer.weights, kept, tuple(outcomes))


def applies_to(step: Rewrite, layers: Collection[int]) -> bool:
    """Return True if a rewrite applies to the weights of the given layers."""
    return step.layers is None or not {*layers}.isdisjoint(step.layers)


def give_back_memory() -> None:
    """Return free memory to the system with glibc, which seldom reuses freed blocks for torch."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it can release free memory."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None
