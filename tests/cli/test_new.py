"""`triptych new`, `triptych recipes`, and a text without a validation part."""

import json
import os
import tomllib
from pathlib import Path

import pytest

import triptych as package
from command import Command
from triptych.training import LanguageRecipe, Recipe, read_recipe
from triptych.training.corpora.corpora import CorpusSpec, read_parallel
from triptych.training.corpora.generated import generate_pairs
from triptych.training.progress import SilentDisplay
from triptych.training.recipe import shipped_recipes
from triptych.training.runs import prepare

FEW_STEPS = ("--set", "training.max_steps=2", "--set", "validation.max_sentences=2")


@pytest.fixture(autouse=True)
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A folder with 400 pairs, in two files and in one; it is where the command is called."""
    found = generate_pairs(400, "train", seed=1)
    for side, name in enumerate(("a.de", "a.en")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in found))
    (tmp_path / "pairs.tsv").write_text("".join("\t".join(pair) + "\n" for pair in found))
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("text", [["--source", "a.de", "--target", "a.en"], ["--tsv", "pairs.tsv"]])
def test_a_recipe_for_pairs_is_trained_as_it_is_and_its_run_has_its_name(
    text: list[str], triptych: Command
) -> None:
    answer = triptych("new", "my mine.toml", *text).done()
    assert "20 pairs are held out to validate, 380 train" in answer.err
    answer = triptych("train", "my mine.toml", *FEW_STEPS).done()
    assert "left out of the recipe" not in answer.err  # every size is written down
    assert package.load("runs/my mine").translate("Vier.").source == "Vier."


def test_a_recipe_for_a_text_is_one_of_a_language_model(triptych: Command) -> None:
    triptych("new", "lm.toml", "--text", "a.en").done()
    triptych("train", "lm.toml", "--set", "training.max_steps=1").done()
    assert package.load("runs/lm").generate("The", max_new_tokens=2).text


@pytest.mark.parametrize("text", [{"tsv": Path("pairs.tsv")}, {"text": Path("a.en")}])
def test_what_is_written_is_what_training_would_have_chosen(text: dict[str, Path]) -> None:
    written = package.new_recipe("mine.toml", **text, display=SilentDisplay())
    assert isinstance(written, LanguageRecipe if "text" in text else Recipe)
    data = written.data.train.model_dump(mode="json", exclude_unset=True)
    bare = {"task": written.task, "data": {"train": data}, "name": "mine", "training": {"precision": "auto"}}
    if "text" in text:
        bare["validation"] = {"sample_tokens": 50}
    (Path("bare.toml")).write_text(json_as_toml(bare))
    for recipe in (written, read_recipe("bare.toml")):
        assert (
            prepare(recipe, Path(), SilentDisplay()).recipe
            == prepare(written, Path(), SilentDisplay()).recipe
        )


def json_as_toml(tree: dict[str, object], path: str = "") -> str:
    """Each value by its whole path."""
    lines = (
        json_as_toml(value, f"{path}{key}.")
        if isinstance(value, dict)
        else f"{path}{key} = {json.dumps(value)}\n"
        for key, value in tree.items()
    )
    return "".join(lines)


def test_every_key_of_a_new_recipe_has_a_comment() -> None:
    package.new_recipe("mine.toml", tsv=Path("pairs.tsv"), display=SilentDisplay())
    lines = Path("mine.toml").read_text().splitlines()
    keys = [i for i, line in enumerate(lines) if " = " in line and not line.startswith(("#", "file"))]
    assert len(keys) > 15
    assert all(lines[i - 1].startswith("#") for i in keys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["new.toml"], "give --source and --target"),
        (["new.toml", "--source", "a.de"], "give --source and --target"),
        (["new.toml", "--tsv", "pairs.tsv", "--text", "a.en"], "give --source and --target"),
        (["new.txt", "--tsv", "pairs.tsv"], "ends in .toml"),
        (["new.toml", "--tsv", "none.tsv"], "none.tsv"),
        (["old.toml", "--tsv", "pairs.tsv"], "--force"),
        (["none/new.toml", "--tsv", "pairs.tsv"], "the folder of none/new.toml does not exist"),
    ],
)
def test_what_cannot_be_a_recipe_is_refused_and_nothing_is_written(
    options: list[str], said: str, triptych: Command
) -> None:
    Path("old.toml").write_text("mine")
    triptych("new", *options).refused(said)
    assert not Path("new.toml").exists()
    assert Path("old.toml").read_text() == "mine"


def test_a_pipe_is_no_text_of_a_recipe(triptych: Command) -> None:
    os.mkfifo("pipe")
    os.mkfifo("pipe.tsv")
    for options in (["--text", "pipe"], ["--tsv", "pipe.tsv"], ["--target", "a.en", "--source", "pipe"]):
        answer = triptych("new", "mine.toml", *options)
        assert (answer.code, Path("mine.toml").exists()) == (2, False)
        assert answer.err.endswith("is not a file, and its text is read more than once: write it to a file\n")


@pytest.mark.parametrize(
    ("text", "command"),
    [("pairs.tsv", "triptych new pairs.toml --tsv pairs.tsv"), ("a.de", "triptych new a.toml --text a.de")],
)
def test_to_train_a_text_is_told_how_to_make_a_recipe_of_it(
    text: str, command: str, triptych: Command
) -> None:
    triptych("train", text).refused(command)


def test_held_out_pairs_do_not_depend_on_the_order_and_share_no_source_with_the_others(
    pairs: list[tuple[str, str]],
) -> None:
    Path("twice.tsv").write_text("".join(f"{de}\t{en}\n{de}\t{en}!\n" for de, en in reversed(pairs)))
    train, valid = read_parallel(CorpusSpec(file=Path("pairs.tsv"))).split(0.05)
    assert (len(train), len(valid)) == (380, 20)
    assert not set(train.source) & set(valid.source)
    twice, held = read_parallel(CorpusSpec(file=Path("twice.tsv"))).split(0.05)
    assert set(held.source) == set(valid.source)
    assert len(twice) + len(held) == 800
    assert [pairs[number - 1] for number in valid.line_numbers] == list(
        zip(valid.source, valid.target, strict=True)
    )


def test_a_text_of_one_source_is_not_split(triptych: Command) -> None:
    Path("pairs.tsv").write_text("Ja.\tYes.\n" * 3)
    answer = triptych("new", "mine.toml", "--tsv", "pairs.tsv")
    assert (answer.code, "data.valid" in answer.err) == (1, True)


def test_recipes_are_listed_and_shown(triptych: Command) -> None:
    listed = triptych("recipes").out.splitlines()
    assert [line.split()[0] for line in listed] == shipped_recipes()
    assert all(len(line.split()) > 4 for line in listed)
    assert triptych("recipes", "--json").record().keys() == set(shipped_recipes())
    assert tomllib.loads(triptych("recipes", "show", "demo").out)["name"] == "triptych-demo"
    triptych("recipes", "show", "dmo").refused("did you mean demo?")
    assert triptych("recipes", "show").code == 2
