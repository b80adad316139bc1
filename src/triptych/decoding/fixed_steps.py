"""Decoding steps that are recorded once and replayed.

On a GPU a step is hundreds of small kernels, and starting them one by one takes longer than they run.
With a `FixedBeamCache` every step is the same kernels on the same memory, so that they can be recorded as one
graph: `torch.cuda.CUDAGraph`. On other devices the same step simply runs.
"""

from typing import cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.decoding.engine import Engine, FixedBeamCache

# Runs before a recording, in which libraries set themselves up.
_WARM_UPS = 2


@final
class FixedSteps:
    """The steps of one batch."""

    def __init__(self, engine: Engine, cache: FixedBeamCache) -> None:
        self.cache = cache
        self._engine = engine
        self._tokens: Tensor | None = None
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """As `Engine.step`; the logits are overwritten by the next call."""
        cache = self.cache
        if cache.is_full:
            cache.double()
            self._graph = None
        if self._tokens is None:
            self._tokens = tokens.clone()
        else:
            self._tokens.copy_(tokens)
        if self._engine.device.type != "cuda":
            self._run()
        else:
            if self._graph is None:
                self._record()
            cast(torch.cuda.CUDAGraph, self._graph).replay()
        cache.length += 1
        return cast(Tensor, self._logits)

    def _run(self) -> None:
        self._logits = self._engine.step(cast(Tensor, self._tokens), self.cache)

    def _record(self) -> None:
        """Record a step; it is not taken by that."""
        before = self.cache.position.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._run()  # writes the slot that the step itself will write again
                self.cache.position.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()
