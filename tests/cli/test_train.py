from pathlib import Path

import pytest

from command import Command
from triptych.running.opening import open_translator
from triptych.training import read_recipe

SMALL = [
    "data.train={generated=100, generated_part='train'}",
    "data.valid={generated=5, generated_part='valid'}",
    "data.cache=''",
    "tokenizer.vocab_size=300",
    "model.d_model=16",
    "model.d_ff=16",
    "model.num_heads=2",
    "model.encoder.num_layers=1",
    "model.decoder.num_layers=1",
    "training.max_steps=4",
    "training.batch_tokens=500",
    "validation.every_steps=2",
    "validation.max_sentences=2",
]


def _sets(values: list[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def test_a_run_folder_holds_all_that_is_promised(triptych: Command, cwd: Path) -> None:
    answer = triptych("train", "demo", *_sets(SMALL), "--json").done()
    record = answer.record()
    folder = Path(record["run"])
    assert folder == Path("runs/triptych-demo")
    assert record["steps"] == 4
    names = [
        "config.json", "model.safetensors", "tokenizer.json", "recipe.toml", "metrics.jsonl", "summary.json",
    ]  # fmt: skip
    for name in (*names, "README.md", "state/last.safetensors", "state/best.safetensors"):
        assert (folder / name).stat().st_size > 0
    stored = read_recipe(folder / "recipe.toml")
    assert stored.model.d_model == 16
    assert stored.training.max_steps == 4
    assert stored.training.adam_beta2 == 0.98
    assert open_translator(folder).translator().translate(["Vier."])[0].source == "Vier."
    assert "padding" in answer.err


def test_text_without_a_joint_vocabulary_trains_with_two(triptych: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    separate = _sets([*SMALL, "tokenizer.joint=false", "model.tie_embeddings='target'"])
    triptych("train", "demo", "--out", out, *separate).done()
    opened = open_translator(out)
    assert not opened.tokenizers.joint
    assert opened.translator().translate(["Vier."])[0].candidates


def test_a_quiet_run_says_nothing_but_its_result(triptych: Command, tmp_path: Path) -> None:
    answer = triptych("train", "demo", *_sets(SMALL), "--out", tmp_path / "run", "-q")
    assert (answer.code, answer.out) == (0, "")
    (line,) = answer.err.splitlines()
    assert line.startswith("done: 4 steps, ")


def test_a_recipe_that_is_not_there_names_those_that_are(triptych: Command, cwd: Path) -> None:
    Path("demo").mkdir()  # as the demo leaves it
    triptych("train", "dmo").refused("there is no recipe dmo: did you mean demo?")
    assert (
        "there is no recipe xyz: give a TOML file, or one of demo, multi30k, multi30k-best, "
        "multi30k-student, paper-base, paper-big, shakespeare-char, shakespeare-char-cpu, tatoeba, "
        "tatoeba-lm, tatoeba-mlm, tatoeba-student"
    ) in triptych("train", "xyz").err


def test_a_run_folder_without_resume_is_explained(triptych: Command, small_run: Path) -> None:
    triptych("train", small_run).refused("add --resume")


MISSING = """
[data]
cache = ""
train = { source = "no.de", target = "no.en" }
valid = { source = "no.de", target = "no.en" }
"""


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("missing.toml", [], "no.de"),
        ("demo", ["training.device='abacus'"], "'abacus'"),
        ("demo", ["training.batch_tokens=8"], "is past max_tokens = 8 per batch"),
    ],
)
def test_what_cannot_be_trained_is_named_and_leaves_no_run_behind(
    triptych: Command, cwd: Path, recipe: str, settings: list[str], message: str
) -> None:
    Path("missing.toml").write_text(MISSING)
    answer = triptych("train", recipe, "--out", "run", *_sets([*SMALL, *settings] if settings else []))
    assert answer.code == 2
    assert message in answer.err.splitlines()[-1]
    assert not (cwd / "run").exists()
