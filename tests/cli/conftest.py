"""The command, called in this process, and a small trained run to call it on."""

import io
import sys
from pathlib import Path

import pytest

from command import Answer, Command
from small_checkpoints import gpt2_that_runs
from studying import place, stand_in  # noqa: F401 - fixtures
from tiny_recipe import FAST_DEMO, tiny_recipe
from triptych import demonstration
from triptych.cli.main import run as run_command
from triptych.face import Model, load
from triptych.training import resolve, runs
from triptych.training.progress import LineDisplay


@pytest.fixture
def triptych(
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> Command:
    """Calls `triptych` with arguments and, if given, bytes on standard input; None closes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))

    def call(*arguments: object, stdin: bytes | None = b"") -> Answer:
        monkeypatch.setattr(sys, "argv", ["triptych", *map(str, arguments)])
        opened = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", opened)
        capsysbinary.readouterr()
        try:
            run_command()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsysbinary.readouterr()
        return Answer(code, captured.out.decode(), captured.err.decode())

    return call


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned a little: enough to give some output for any input."""
    folder = tmp_path_factory.mktemp("small") / "run"
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
def shown(tmp_path_factory: pytest.TempPathFactory) -> demonstration.Demonstration:
    """A demo that ended, with its whole report."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    result = demonstration.demo(folder, LineDisplay(), FAST_DEMO, num_tested=20)
    assert isinstance(result, demonstration.Demonstration)
    return result


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A small GPT-2."""
    return load(gpt2_that_runs(tmp_path_factory.mktemp("model") / "gpt2"))


@pytest.fixture(scope="module")
def translator(small_run: Path) -> Model:
    return load(small_run)
