"""Pieces of work that processes take. Processes that were launched: `cli/test_several_processes.py`."""

from typing import Any

import pytest
import torch

from triptych.errors import ElsewhereError, UsageError
from triptych.launch import environment_alone, num_launched
from triptych.processes import Turns, World, do_each, launched


def both(count: int) -> tuple[Turns, Turns]:
    """The turns of two processes."""
    one = World().turns(count)
    return one, Turns(one._add, count)


def test_each_number_is_taken_once_by_whoever_asks() -> None:
    one, other = both(5)
    took = [one.take(), other.take(), other.take(), one.take(), other.take()]
    assert took == [0, 1, 2, 3, 4]
    assert one.take() is other.take() is None


def test_turns_of_another_work_begin_anew() -> None:
    world = World()
    assert list(world.turns(2).taken()) == list(world.turns(2).taken()) == [0, 1]


def test_turns_are_over_when_the_work_of_every_number_has_ended() -> None:
    one, other = both(2)
    assert one.take() == 0
    assert other.take() == 1
    one.end_one()
    assert not one.are_over
    other.end_one()
    assert one.are_over
    assert other.are_over


def test_after_an_error_in_one_process_no_other_takes_a_number() -> None:
    one, other = both(9)
    assert one.take() == 0
    with pytest.raises(ElsewhereError), one.given_up_on_error():
        raise ElsewhereError("no", 3)
    assert other.take() is None
    assert other.are_over


def test_results_of_all_processes_are_in_the_order_of_the_items() -> None:
    # The first of two processes; the other has taken all numbers that are odd.
    world: Any = World()
    world.size = 2
    turns = world.turns(5)
    turns.taken = lambda: iter(range(0, 5, 2))
    world.turns = lambda count: turns
    world.gathered = lambda value: [value, {1: 2, 3: 4} if isinstance(value, dict) and 0 in value else value]
    items = ["a", "bb", "ccc", "dddd", "eeeee"]
    assert do_each(items, len, world) == [1, 2, 3, 4, 5]


def test_a_process_alone_does_each_in_order_and_stops_at_the_first_error() -> None:
    done = list[str]()

    def work(item: str) -> None:
        done.append(item)
        if item == "b":
            raise ElsewhereError("no", 3)

    with pytest.raises(ElsewhereError):
        do_each(["a", "b", "c"], work, World())
    assert done == ["a", "b"]


def test_a_process_of_its_own_does_not_know_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "MINE"):
        monkeypatch.setenv(name, "2")
    assert num_launched() == 2
    found = environment_alone()
    assert "MINE" in found
    assert not found.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}


def test_a_machine_has_gpus_for_its_own_processes_where_others_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT are not set"), launched("cuda"):
        pass
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UsageError, match="8 processes on a machine of 4 GPUs"), launched("cuda"):
        pass
