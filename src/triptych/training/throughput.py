"""What each of several processes gets done, and what it waits for."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar, final

from triptych.training.parallel import World

T = TypeVar("T")


@final
class Throughput:
    """Tokens and times of this process since the last line of metrics."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._forget()

    def _forget(self) -> None:
        self._tokens = 0
        self._seconds = self._for_data = self._for_others = 0.0

    def taken(self, items: Iterable[T]) -> Iterator[T]:
        """The items; the time until each comes is that of waiting for data."""
        iterator, end = iter(items), object()
        while True:
            started = time.monotonic()
            item = next(iterator, end)
            waited = time.monotonic() - started
            if item is end:
                return
            self._for_data += waited
            self._seconds += waited
            yield item  # type: ignore[misc]

    def add(self, own_tokens: int, seconds: float, for_others: float) -> None:
        """Count an update."""
        self._tokens += own_tokens
        self._seconds += seconds
        self._for_others += for_others

    def figures(self) -> dict[str, list[float]]:
        """A figure of each process by its rank, since the last call; nothing of one process.

        `ranks_tokens_per_second` is of its own part of the batches; `ranks_waiting_for_data` and
        `ranks_waiting_for_others` are shares of its time. Gradients are exchanged while others are computed,
        which counts as computing. All processes must call it.
        """
        if self._world.size == 1:
            return {}
        seconds = max(self._seconds, 1e-9)
        own = [self._tokens / seconds, self._for_data / seconds, self._for_others / seconds]
        self._forget()
        of_ranks = self._world.gathered(own)
        names = "ranks_tokens_per_second", "ranks_waiting_for_data", "ranks_waiting_for_others"
        return {name: [round(of[i], 4) for of in of_ranks] for i, name in enumerate(names)}
