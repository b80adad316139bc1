"""A call of the library leaves threads and environment as they were; training, random numbers too."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import triptych
from tiny_recipe import tiny_recipe
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.running.opening import open_translator
from triptych.seeing.inspection import inspect
from triptych.training import Recipe, resolve
from triptych.training.progress import Display, LineDisplay, Moment

THREADS = 2


def variables() -> dict[str, str]:
    """But for those that pytest and torch itself set."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TORCH"))}


@pytest.fixture(autouse=True)
def nothing_of_the_process_changes() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    environment = variables()
    try:
        yield
        assert torch.get_num_threads() == THREADS
        assert variables() == environment
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained with the threads of the process; random numbers stay as they were, too."""
    folder, random = tmp_path_factory.mktemp("process") / "run", torch.get_rng_state()
    triptych.train(recipe(), folder)
    assert torch.equal(torch.get_rng_state(), random)
    return folder


def recipe(**training: object) -> Recipe:
    training = {"max_steps": 3, "batch_tokens": 500, "precision": "bf16", **training}
    return resolve(tiny_recipe(tokenizer={"vocab_size": 400}, training=training))


class ThreadsSeen(LineDisplay):
    """Notes with how many threads each step was made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def update(self, moment: Moment) -> None:
        self.seen.add(torch.get_num_threads())
        super().update(moment)


def test_training_and_resuming_with_threads_of_its_own(tmp_path: Path) -> None:
    display = ThreadsSeen()
    triptych.train(recipe(threads=1), tmp_path / "run", display)
    assert display.seen == {1}
    resumed = triptych.resume(tmp_path / "run", ["training.max_steps=4"])
    assert resumed.outcome.counters.step == 4


def test_training_that_fails(tmp_path: Path) -> None:
    class Failing(LineDisplay):
        def update(self, moment: Moment) -> None:
            raise RuntimeError("stop")

    display: Display = Failing()
    with pytest.raises(RuntimeError, match="stop"):
        triptych.train(recipe(threads=1), tmp_path / "run", display)


def test_translating(run: Path) -> None:
    assert len(triptych.load(run).translate(["ein", "zwei"])) == 2


def test_translating_with_workers_even_between_two_lines(run: Path) -> None:
    with open_translator(run).translator(workers=2) as translator:
        for _ in translator.translate_stream([["ein"], ["zwei"]]):
            assert torch.get_num_threads() == THREADS


def test_inspecting(run: Path) -> None:
    assert inspect(open_checkpoint(str(run))).layers
