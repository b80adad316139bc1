"""The scripts of `docs/examples` are as short as the table says, and run on every kind of model."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import triptych
from checkpoints.tiny_marian import write_marian
from small_checkpoints import gpt2, gpt2_that_runs, llama
from triptych.errors import TriptychError, UsageError

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
CHECKPOINTS = ROOT.parent / "shared" / "checkpoints"
# "Shortest scripts": lines after `import triptych`.
LINES = {
    "head_matrix": 2,
    "pattern": 2,
    "ov_singular_values": 2,
    "composition": 2,
    "ablate": 2,
    "patch": 4,
    "steer": 2,
    "write": 3,
}
READING = ("head_matrix", "ov_singular_values")
RUNNING = ("pattern", "ablate", "patch")
TRAINED = ("gpt2", "llama-gqa", "marian-multi30k")


def _run(name: str, *arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    return capsys.readouterr().out


def _trained(name: str) -> Path:
    folder = CHECKPOINTS / name
    if not folder.is_dir():
        pytest.skip(f"no trained {name} here")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    return gpt2_that_runs(tmp_path_factory.mktemp("models") / "gpt2")


def test_every_script_is_counted() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_scripts_are_as_short_as_said(name: str) -> None:
    _, rest = (EXAMPLES / f"{name}.py").read_text().split("import triptych\n")
    lines = [line for line in rest.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= LINES[name]
    assert all(len(line) <= 110 and ";" not in line for line in lines)


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_models_that_are_only_read(
    name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = {"gpt2": gpt2, "llama": llama}[model](tmp_path / model)
    assert "tensor(" in _run(name, folder, "2.1", capsys=capsys)


@pytest.mark.parametrize("name", [*READING, *RUNNING])
def test_a_tiny_model(name: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tensor(" in _run(name, tiny, "2.1", capsys=capsys)


def test_a_tiny_model_is_steered_and_composed(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tensor(" in _run("steer", tiny, "residual.2", capsys=capsys)
    for into in ("Q", "K", "V"):
        assert f"Composition into {into}" in _run("composition", tiny, into, capsys=capsys)


def test_a_changed_tiny_model_is_written_for_other_programs(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(tmp_path / "out") in _run("write", tiny, tmp_path / "out", "1.2", capsys=capsys)
    written = triptych.load(tmp_path / "out")
    assert not written[1, 2].W_O.any()
    text = "Speak, speak."
    assert float(written.run(text).loss) == pytest.approx(
        float(triptych.load(tiny).ablate("1.2").run(text).loss), abs=1e-5
    )


def test_a_tiny_translator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_marian(tmp_path)
    for name in READING:
        assert "tensor(" in _run(name, tmp_path, "cross.0.1", capsys=capsys)


@pytest.mark.parametrize("name", [*READING, *RUNNING, "steer", "write"])
@pytest.mark.parametrize("model", TRAINED)
def test_trained_models(name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _trained(model)
    places = ["3.2"] if model != "marian-multi30k" else ["decoder.1.2", "cross.1.2"]
    if name == "steer":
        places = [] if model != "marian-multi30k" else ["residual.decoder.2"]
    for number, place in enumerate(places or [None]):
        first = [folder, tmp_path / str(number)] if name == "write" else [folder]
        printed = _run(name, *first, *([] if place is None else [place]), capsys=capsys)
        assert (str(tmp_path) if name == "write" else "tensor(") in printed


@pytest.mark.parametrize(
    ("model", "arguments", "answer"),
    [
        ("gpt2", ["Q"], "Composition into Q"),
        ("gpt2", ["K"], "Composition into K"),
        ("gpt2", [], "Composition into V"),
        ("llama-gqa", [], "Composition into V"),
    ],
)
def test_composition_of_trained_models(
    model: str, arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in _run("composition", _trained(model), *arguments, capsys=capsys)


ROTARY = (
    "head 0.0: rotary positions make W_QK another form at every distance, so there is no composition into "
    '"Q" or "K"; into "V" there is'
)


@pytest.mark.parametrize("into", ["Q", "K"])
def test_composition_under_rotary_positions_is_refused(
    into: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(ROTARY)}$"):
        _run("composition", llama(tmp_path / "llama"), into, capsys=capsys)
    with pytest.raises(UsageError, match=f"^{re.escape(ROTARY)}$"):
        _run("composition", _trained("llama-gqa"), into, capsys=capsys)


def test_composition_past_a_post_norm_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = _trained("marian-multi30k")
    with pytest.raises(UsageError, match=r"stack=…\) is of one$"):
        _run("composition", folder, "V", capsys=capsys)
    with pytest.raises(UsageError, match="composition scores would be wrong: a post-norm scales"):
        _run("composition", folder, "V", "decoder", capsys=capsys)


def test_a_model_that_is_only_read_says_why_it_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TriptychError, match=r"triptych inspect can read its heads$") as refused:
        _run("ablate", llama(tmp_path / "llama"), "1.1", capsys=capsys)
    assert "\n" not in str(refused.value)
