"""What README.md, the first pages, the tutorials and the pages about training and attention show works."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from blocks import assert_shown, run_blocks
from command import Command
from tiny_recipe import write_sides
from tolerances import assert_same
from triptych.attention import PARAMETERISATIONS
from triptych.training import read_recipe

ROOT = Path(__file__).parent.parent.parent
README, TRAINING, ATTENTION = (
    ROOT / "README.md",
    ROOT / "docs/how-to/training.md",
    ROOT / "docs/reference/parameterisations.md",
)

# Pages of the small GPT-2 of ../shared, whose outputs are compared; and those that train, whose outputs vary.
OF_GPT2 = (
    *("start/your-checkpoint", "start/exact", "tutorials/inside-gpt2", "tutorials/smaller"),
    *("how-to/ablate", "how-to/rank"),
)
THAT_TRAIN = ("start/your-text", "tutorials/translator", "tutorials/own-attention")
SHARED = ROOT.parent / "shared"


def _block(page: Path, language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if containing in block]
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the text and the recipe that README speaks of, the recipe made short."""
    for part, count in (("train", 200), ("valid", 6), ("test", 6)):
        write_sides(tmp_path, part, count)
    (tmp_path / "in.txt").write_text("A little girl climbs.\n")
    recipe = _block(TRAINING, "toml", 'name = "mine"')
    short = recipe.replace('preset = "small"', 'preset = "tiny"').replace("max_steps = 2300", "max_steps = 2")
    assert short.count("max_steps = 2\n") == 1
    (tmp_path / "mine.toml").write_text(short + "warmup_steps = 1\n[tokenizer]\nvocab_size = 400\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_shown_is_valid(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(_block(TRAINING, "toml", 'name = "mine"'))
    assert read_recipe(tmp_path / "mine.toml").model.d_model == 256


def test_the_commands_shown_run_in_their_order(folder: Path, triptych: Command) -> None:
    lines = [line for line in _block(TRAINING, "sh", "triptych train mine.toml").splitlines() if line]
    assert len(lines) == 5
    for line in lines:
        before, piped, command = line.rpartition(" | ")
        words = shlex.split(command, comments=True)
        assert words[0] == "triptych"
        typed = shlex.split(before)[1].encode() + b"\n" if piped else b""
        answer = triptych(*words[1:], stdin=typed)
        assert answer.code == 0, f"{line}: {answer.err}"
    # The Python example goes on with the same run.
    exec(compile(_block(TRAINING, "python", 'triptych.load("runs/mine")'), "README.md", "exec"), {})


def test_the_layers_shown_run() -> None:
    names: dict[str, object] = {}
    exec(compile(_block(ATTENTION, "python", "MultiHeadAttention(d_model=32"), "README.md", "exec"), names)
    assert list(names["output"].shape) == [2, 4, 5, 12]  # type: ignore[attr-defined]
    assert list(names["weights"].shape) == [2, 4, 5, 7]  # type: ignore[attr-defined]
    assert list(names["cross_attention"].shape) == [2, 5, 32]  # type: ignore[attr-defined]


def test_the_rewrites_shown_do_what_is_said_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    block = _block(ATTENTION, "python", 'rewrite(layer, "fold")')
    exec(compile(block, "README.md", "exec"), names)
    sizes = [sum(p.numel() for p in names[name].parameters()) for name in ("layer", "folded")]
    assert f"{sizes[0]:,} → {sizes[1]:,} parameters" in block
    x = names["x"]
    assert_same(names["folded"](x).output, names["layer"](x).output, kind="output")
    assert "drop_key_bias refused: under rotary positions" in capsys.readouterr().out


def test_the_ways_to_write_a_head_are_those_there_are() -> None:
    named = re.findall(r"^\| `(\w+)`", ATTENTION.read_text(), flags=re.MULTILINE)
    assert named == list(PARAMETERISATIONS)


def test_the_python_example_of_readme_runs(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_run, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    exec(compile(_block(README, "python", 'triptych.load("demo")'), "README.md", "exec"), {})


def test_readme_has_at_most_130_lines_and_names_pages_that_are_there() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    linked = re.findall(r"\]\(((?!https?:)[^)#]+)", text)
    assert len(linked) > 20
    assert [name for name in linked if not (ROOT / name).exists()] == []


@pytest.fixture
def reader(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader who made the demo."""
    shutil.copytree(small_run, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.mark.usefixtures("reader")
def test_a_head_by_hand_is_what_the_page_shows() -> None:
    for ran in run_blocks(ROOT / "docs/tutorials/by-hand.md"):
        assert_shown(ran, "by-hand.md")


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("name", ["start/translate", "start/head"])
def test_the_pages_that_use_the_demo_run(name: str) -> None:
    assert len(list(run_blocks(ROOT / f"docs/{name}.md"))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_GPT2)
def test_the_pages_about_a_gpt2_print_what_they_show(name: str, reader: Path) -> None:
    if not (SHARED / "checkpoints" / "gpt2").is_dir():
        pytest.skip("needs ../shared/checkpoints/gpt2")
    shutil.copytree(SHARED / "checkpoints" / "gpt2", reader / "gpt2")
    text = (SHARED / "data" / "tinyshakespeare" / "input.txt").read_bytes()
    (reader / "text.txt").write_bytes(text[-55770:])
    (reader / "train.txt").write_bytes(text[:60000])
    for ran in run_blocks(ROOT / f"docs/{name}.md"):
        assert_shown(ran, name)


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("name", THAT_TRAIN)
def test_the_pages_that_train_run_with_fewer_steps(name: str) -> None:
    def shorter(line: str) -> str:
        return f"{line} --set training.max_steps=4" if line.startswith("triptych train") else line

    page = ROOT / f"docs/{name}.md"
    ran = [one for one in run_blocks(page, typed=shorter) if one.block.language == "console"]
    assert len(ran) == page.read_text().count("\n$ triptych") + page.read_text().count("\n$ echo") > 1
