"""What each of several processes tells of its speed and of what it waits for."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from triptych.processes import World
from triptych.training.machine import Throughput


def of_two() -> Throughput:
    """Of a process of two, of which the other does half as much."""
    world: Any = SimpleNamespace(size=2, gathered=lambda own: [own, [number / 2 for number in own]])
    throughput = object.__new__(Throughput)
    throughput._world = world
    throughput._forget()
    return throughput


def slow_items() -> Iterator[int]:
    time.sleep(0.05)
    yield 1
    yield 2


def test_each_process_has_its_own_speed_and_what_it_waited_for() -> None:
    throughput = of_two()
    throughput.add(300, 2.0, 0.5)
    throughput.add(100, 2.0, 0.5)
    found = throughput.figures()
    assert found == {
        "ranks_tokens_per_second": [100.0, 50.0],
        "ranks_waiting_for_data": [0.0, 0.0],
        "ranks_waiting_for_others": [0.25, 0.125],
    }
    throughput.add(7, 1.0, 0.0)
    assert throughput.figures()["ranks_tokens_per_second"][0] == 7.0, "each line counts from the one before"


def test_time_until_a_batch_is_there_is_that_of_waiting_for_data() -> None:
    throughput = of_two()
    assert list(throughput.taken(slow_items())) == [1, 2]
    throughput.add(1, 0.05, 0.0)
    assert 0.3 < throughput.figures()["ranks_waiting_for_data"][0] < 0.9


def test_one_process_says_nothing_of_ranks() -> None:
    throughput = Throughput(World())
    throughput.add(300, 2.0, 0.0)
    assert throughput.figures() == {}
