"""Calls that take turns within one process, where all contenders may share threads and allocator."""

import time
from collections.abc import Callable, Mapping

from benchmarks.harness.turns import turn_order
from benchmarks.workers.protocol import seconds_of

_MIN_ROUNDS, _MAX_ROUNDS = 5, 200
_WARM_UP_ROUNDS = 2


def in_turns(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of every call, round by round.

    Args:
        calls: by name.
        seconds: to spend on each of them, about; there are at least 5 rounds.
    """
    names = [*calls]
    for _ in range(_WARM_UP_ROUNDS):
        for call in calls.values():
            call()
    samples: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for number in range(_MAX_ROUNDS):
        for place in turn_order(len(names), number):
            samples[names[place]].append(seconds_of(calls[names[place]]))
        enough = time.perf_counter() - started > seconds * len(names)
        if enough and number + 1 >= _MIN_ROUNDS:
            break
    return samples
