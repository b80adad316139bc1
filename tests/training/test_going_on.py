"""Runs that go on with a translator."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tiny_recipe import tiny_recipe
from triptych.errors import UsageError
from triptych.model import load
from triptych.training import Recipe, read_recipe, resolve, runs
from triptych.training.progress import LineDisplay
from triptych.training.recipe import merge

MARIAN = Path(__file__).parents[2].parent / "shared/checkpoints/marian-multi30k"
LINES = ["Vier.", "Heute ist Montag.", "Das Buch kostet zehn Euro."]


def recipe_of(checkpoint: Path, **training: object) -> Recipe:
    tree = tiny_recipe(40, 5, training={"max_steps": 2, "batch_tokens": 200, **training})
    del tree["model"], tree["tokenizer"]
    recipe = resolve(merge(tree, {"training": {"checkpoint": str(checkpoint)}}))
    assert isinstance(recipe, Recipe)
    return recipe


def test_a_run_begins_as_the_translator_that_it_goes_on_with_and_resumes(
    small_run: Path, tmp_path: Path
) -> None:
    before = read_recipe(small_run / "recipe.toml")
    assert isinstance(before, Recipe)
    runs.train(recipe_of(small_run, learning_rate=1e-12, warmup_steps=1), tmp_path / "run", LineDisplay())
    after = read_recipe(tmp_path / "run" / "recipe.toml")
    assert isinstance(after, Recipe)
    assert after.decoding == before.decoding
    for name in ("d_model", "d_ff", "dropout", "norm", "tie_embeddings", "max_source_tokens"):
        assert getattr(after.model, name) == getattr(before.model, name)
    assert (tmp_path / "run/tokenizer.json").read_bytes() == (small_run / "tokenizer.json").read_bytes()
    expected = load_file(small_run / "model.safetensors")
    for name, value in load_file(tmp_path / "run/model.safetensors").items():
        assert (value - expected[name]).abs().max() < 1e-9
    runs.resume(tmp_path / "run", ["training.max_steps=3"], LineDisplay())
    texts = [found.text for found in load(tmp_path / "run").translate(LINES)]
    assert texts == [found.text for found in load(small_run).translate(LINES)]


def test_its_learning_rate_is_a_tenth_of_that_for_fresh_weights(small_run: Path, tmp_path: Path) -> None:
    runs.train(recipe_of(small_run), tmp_path / "run", LineDisplay())
    fresh = tiny_recipe(40, 5, model={"d_model": 32, "d_ff": 64}, training={"max_steps": 2})
    runs.train(resolve(fresh), tmp_path / "fresh", LineDisplay())
    rates = [read_recipe(tmp_path / name / "recipe.toml").training.learning_rate for name in ("run", "fresh")]
    assert None not in rates
    assert rates[0] == pytest.approx(rates[1] / 10)


def test_the_command_line_takes_model_and_tokenizer_out_of_the_recipe(small_run: Path) -> None:
    recipe = read_recipe(small_run / "recipe.toml", [], "runs/other")
    assert isinstance(recipe, Recipe)
    assert recipe.training.checkpoint == "runs/other"
    assert not {"model", "tokenizer"} & recipe.model_fields_set


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training": {"teacher": "runs/big"}},
            "training.checkpoint and training.teacher do not go together",
        ),
        ({"initial_values": "by_name"}, "initial_values is for fresh weights"),
    ],
)
def test_what_does_not_go_with_a_checkpoint_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve(merge(tiny_recipe(training={"checkpoint": "runs/mine"}), changes))


@pytest.mark.slow  # the shared checkpoint has 7.6 million parameters
@pytest.mark.skipif(not MARIAN.is_dir(), reason="needs ../shared/checkpoints/marian-multi30k")
def test_a_marian_checkpoint_goes_on_with_its_own_pieces(tmp_path: Path) -> None:
    runs.train(recipe_of(MARIAN, learning_rate=1e-12, warmup_steps=1), tmp_path / "run", LineDisplay())
    lines = ["A man in a blue shirt is standing on a ladder.", "Two dogs play."]
    texts = [found.text for found in load(tmp_path / "run").translate(lines, stop="full")]
    assert texts == [found.text for found in load(MARIAN).translate(lines, stop="full")]
