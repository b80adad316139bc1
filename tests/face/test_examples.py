"""The scripts of `docs/examples` are as short as the table says, and run on every kind of model."""

import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from face.tiny import write_checkpoint, write_run
from small_checkpoints import llama
from triptych.errors import TriptychError, UsageError

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
CHECKPOINTS = ROOT.parent / "shared" / "checkpoints"
# "Shortest scripts": lines after `import triptych`.
LINES = {
    "head_matrix": 2, "pattern": 2, "ov_singular_values": 2, "composition": 2, "ablate": 2, "patch": 4,
    "steer": 2, "write": 3,
}  # fmt: skip
READING = ("head_matrix", "ov_singular_values")
RUNNING = ("pattern", "ablate", "patch")
RUNS = ("run of an encoder-decoder", "run of a language model", "run of an encoder")
TRANSLATORS = (RUNS[0], "marian", "t5")
_COMPOSITION = tuple(f"composition {into}" for into in "QKV")
_NO_LOSS = dict.fromkeys(("ablate", "patch", "steer"), "predicts no next token, so its run has no loss")
_POST_NORM = dict.fromkeys(_COMPOSITION, "composition scores would be wrong: a post-norm scales")
_ROTARY = dict.fromkeys(_COMPOSITION[:2], "rotary positions make W_QK another form at every distance")
# Kinds of models, and the scripts that do not apply to them: why.
KINDS: dict[str, dict[str, str]] = {
    RUNS[0]: _POST_NORM,
    RUNS[1]: _ROTARY,
    RUNS[2]: {**_NO_LOSS, **_ROTARY},
    "gpt2": {},
    "llama": _ROTARY,
    "bert": {**_NO_LOSS, **_POST_NORM},
    "t5": {},
    "marian": _POST_NORM,
    "deepseek_v3": dict.fromkeys(("ov_singular_values", *_COMPOSITION), "a norm within the map of values"),
    "falcon, groups": _ROTARY,
}
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


def test_every_script_is_counted() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_scripts_are_as_short_as_said(name: str) -> None:
    _, rest = (EXAMPLES / f"{name}.py").read_text().split("import triptych\n")
    lines = [line for line in rest.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= LINES[name]
    assert all(len(line) <= 110 and ";" not in line for line in lines)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a kind, made once."""

    @cache
    def folder(kind: str) -> Path:
        made = tmp_path_factory.mktemp("models") / "model"
        (write_run if kind in RUNS else write_checkpoint)(kind, made)
        return made

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scripts_run_on_every_kind_of_model_or_say_in_one_line_why_not(
    kind: str, folder_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, refusals, two = folder_of(kind), KINDS[kind], kind in TRANSLATORS
    places = [["cross.1.1"]] if two else [["1.2"]]
    if kind == RUNS[0]:
        places += [["encoder.1.2"], ["decoder.1.1"]]
    given: dict[str, list[list[object]]] = {
        name: [[folder, *place] for place in places] for name in (*READING, *RUNNING)
    }
    given["steer"] = [[folder, "residual.decoder.1" if two else "residual.1"]]
    given["write"] = [[folder, tmp_path / place, place] for (place,) in places]
    given["composition"] = [[folder, into, *(["decoder"] if two else [])] for into in ("Q", "K", "V")]
    assert set(given) == set(LINES)
    for name, several in given.items():
        for arguments in several:
            script = f"{name} {arguments[1]}" if name == "composition" else name
            if (why := refusals.get(script)) is None:
                expected = {"write": str(tmp_path), "composition": "Composition into"}.get(name, "tensor(")
                assert expected in _run(name, *arguments, capsys=capsys)
                continue
            with pytest.raises(TriptychError, match=why) as refused:
                _run(name, *arguments, capsys=capsys)
            assert "\n" not in str(refused.value)


@pytest.mark.slow
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


@pytest.mark.slow
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
