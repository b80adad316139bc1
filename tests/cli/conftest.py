"""The command, called in this process, and a small trained run to call it on."""

import io
import sys
from pathlib import Path

import pytest

from command import Answer, Command
from small_models import checkpoint, language_model, small_run, translator  # noqa: F401 - fixtures
from studying import place, stand_in  # noqa: F401 - fixtures
from tiny_recipe import FAST_DEMO
from triptych import demonstration
from triptych.cli.main import run as run_command
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


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, where the command is called."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory) -> demonstration.Demonstration:
    """A demo that ended, with its whole report."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    result = demonstration.demo(folder, LineDisplay(), FAST_DEMO, num_tested=20)
    assert isinstance(result, demonstration.Demonstration)
    return result
