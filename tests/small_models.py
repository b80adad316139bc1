"""Fixtures: a small trained run, and small models to serve and to call the command on."""

from pathlib import Path

import pytest

from small_checkpoints import gpt2_that_runs
from tiny_recipe import tiny_recipe
from triptych.model import Model, load
from triptych.training import resolve, runs
from triptych.training.progress import LineDisplay


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small_run(tmp_path_factory.mktemp("small") / "run")


def train_small_run(folder: Path) -> Path:
    """A run that has learned a little: enough to give some output for any input."""
    tree = tiny_recipe(
        300,
        10,
        tokenizer={"vocab_size": 400},
        model={
            "d_model": 32,
            "d_ff": 64,
            "dropout": 0.0,
            "max_source_tokens": 40,
            "decoder": {"num_layers": 2},
        },
        training={"max_steps": 40, "batch_tokens": 500, "learning_rate": 0.01, "warmup_steps": 10},
        validation={"every_steps": 40},
        decoding={"beam_size": 2, "max_extra_tokens": 8},
    )
    runs.train(resolve(tree), folder, LineDisplay())
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 in the format of `transformers`, which runs on text; no test changes it."""
    return gpt2_that_runs(tmp_path_factory.mktemp("checkpoint") / "gpt2")


@pytest.fixture(scope="module")
def language_model(checkpoint: Path) -> Model:
    """That GPT-2, opened."""
    return load(checkpoint)


@pytest.fixture(scope="module")
def translator(small_run: Path) -> Model:
    return load(small_run)
