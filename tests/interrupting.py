"""Runs that are stopped, killed or out of room, and whether two runs are the same to the last bit."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from triptych.training.metrics import read_metrics
from triptych.training.progress import Display, Moment


def assert_same_run(actual: Path, expected: Path) -> None:
    for name in ("model.safetensors", "state/last.safetensors"):
        ours, theirs = load_file(actual / name), load_file(expected / name)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), f"{name}: {key} differs"
    timed = {"seconds", "tokens_per_second", "peak_share"}
    for ours, theirs in zip(
        read_metrics(actual / "metrics.jsonl"), read_metrics(expected / "metrics.jsonl"), strict=True
    ):
        assert {k: v for k, v in ours.items() if k not in timed} == {
            k: v for k, v in theirs.items() if k not in timed
        }


class SignalAt(Display):
    """Sends this process a signal at a step."""

    def __init__(self, step: int, number: signal.Signals) -> None:
        self.step, self.number = step, number

    def update(self, moment: Moment) -> None:
        if moment.step == self.step:
            os.kill(os.getpid(), self.number)

    def say(self, message: str) -> None: ...


class KillError(Exception):
    pass


class KillAt(SignalAt):
    """Ends the run without a word, as a kill would."""

    def __init__(self, step: int) -> None:
        super().__init__(step, signal.SIGKILL)

    def update(self, moment: Moment) -> None:
        if moment.step == self.step:
            raise KillError


class WaitAt(SignalAt):
    """Says that a step is reached, and waits there until it may go on."""

    def __init__(self, step: int, reached: threading.Event, go_on: threading.Event) -> None:
        super().__init__(step, signal.SIGTERM)
        self._reached, self._go_on = reached, go_on

    def update(self, moment: Moment) -> None:
        if moment.step == self.step:
            self._reached.set()
            assert self._go_on.wait(60)


def wait_until(happened: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def full_disk(limit: int = 0) -> Iterator[None]:
    """Files can be made, and no byte be written into them past a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
