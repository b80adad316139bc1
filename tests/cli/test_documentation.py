"""What README.md shows works as shown."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import small_checkpoints
from command import Command
from small_checkpoints import gpt2_that_runs
from tolerances import assert_same
from triptych.attention import PARAMETERISATIONS
from triptych.text import generate_pairs
from triptych.training import read_recipe

README = Path(__file__).parent.parent.parent / "README.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def _block(language: str, containing: str) -> str:
    (found,) = [block for block in _blocks(language) if containing in block]
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the text and the recipe that README speaks of, the recipe made short."""
    for part, count in (("train", 200), ("valid", 6), ("test", 6)):
        pairs = generate_pairs(count, part, seed=1)
        (tmp_path / f"{part}.de").write_text("".join(f"{german}\n" for german, _ in pairs))
        (tmp_path / f"{part}.en").write_text("".join(f"{english}\n" for _, english in pairs))
    (tmp_path / "in.txt").write_text("A little girl climbs.\n")
    recipe = _block("toml", 'name = "mine"')
    short = recipe.replace('preset = "small"', 'preset = "tiny"').replace("max_steps = 2300", "max_steps = 2")
    assert short.count("max_steps = 2\n") == 1
    (tmp_path / "mine.toml").write_text(short + "warmup_steps = 1\n[tokenizer]\nvocab_size = 400\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_shown_is_valid(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(_block("toml", 'name = "mine"'))
    assert read_recipe(tmp_path / "mine.toml").model.d_model == 256


def test_the_commands_shown_run_in_their_order(folder: Path, triptych: Command) -> None:
    lines = [line for line in _block("sh", "triptych train mine.toml").splitlines() if line]
    assert len(lines) == 5
    for line in lines:
        before, piped, command = line.rpartition(" | ")
        words = shlex.split(command, comments=True)
        assert words[0] == "triptych"
        typed = shlex.split(before)[1].encode() + b"\n" if piped else b""
        answer = triptych(*words[1:], stdin=typed)
        assert answer.code == 0, f"{line}: {answer.err}"
    # The Python example goes on with the same run.
    exec(compile(_block("python", 'triptych.load("runs/mine")'), "README.md", "exec"), {})


def test_the_layers_shown_run() -> None:
    names: dict[str, object] = {}
    exec(compile(_block("python", "MultiHeadAttention(d_model=32"), "README.md", "exec"), names)
    assert list(names["output"].shape) == [2, 4, 5, 12]  # type: ignore[attr-defined]
    assert list(names["weights"].shape) == [2, 4, 5, 7]  # type: ignore[attr-defined]
    assert list(names["cross_attention"].shape) == [2, 5, 32]  # type: ignore[attr-defined]


def test_the_rewrites_shown_do_what_is_said_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    block = _block("python", "folded = fold(layer)")
    exec(compile(block, "README.md", "exec"), names)
    sizes = [sum(p.numel() for p in names[name].parameters()) for name in ("layer", "folded")]
    assert f"{sizes[0]:,} → {sizes[1]:,} parameters" in block
    x = names["x"]
    assert_same(names["folded"](x).output, names["layer"](x).output, kind="output")
    assert "drop_key_bias refused: under rotary positions" in capsys.readouterr().out


def test_the_ways_to_write_a_head_are_those_there_are() -> None:
    named = re.findall(r"^\| `(\w+)`", README.read_text(), flags=re.MULTILINE)
    assert named == list(PARAMETERISATIONS)


def test_the_checkpoint_shown_is_rewritten_and_verified(
    triptych: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    monkeypatch.chdir(tmp_path)
    gpt2_that_runs(tmp_path / "gpt2")
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text("What a piece of work is a man!\n" * 8)
    lines = [line for line in _block("sh", "triptych rewrite").splitlines() if line]
    assert len(lines) == 3
    for line in lines:
        answer = triptych(*shlex.split(line, comments=True)[1:])
        assert answer.code == 0, f"{line}: {answer.err}"


def test_the_costs_shown_can_be_asked_for(triptych: Command) -> None:
    plain, measured = (line for line in _block("sh", "triptych cost").splitlines() if line)
    answer = triptych(*shlex.split(plain, comments=True)[1:])
    assert answer.code == 0
    assert all(name in answer.out for name in PARAMETERISATIONS)
    assert "--measure" in measured  # timed in the tests of the command


def test_the_python_example_of_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    monkeypatch.setattr(small_checkpoints, "LAYERS", 4)
    gpt2_that_runs(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    exec(compile(_block("python", 'triptych.load("gpt2")'), "README.md", "exec"), {})
    assert (tmp_path / "smaller" / "certificate.json").is_file()
