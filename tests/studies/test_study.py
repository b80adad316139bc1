"""Studies are read, and what is wrong with one is said in a line."""

from pathlib import Path

import pytest

from studying import STUDY
from triptych.errors import UsageError
from triptych.studies import read_study
from triptych.studies.study import recipes_of


def test_a_variant_is_the_base_with_its_changes(place: Path) -> None:
    base, made = recipes_of(read_study(place / "study.toml"), place)
    assert made["factored"] == base
    assert made["shared"].model.attention.projections == "shared"
    assert made["shared"].training == base.training


def test_set_changes_every_variant(place: Path) -> None:
    (place / "study.toml").write_text(STUDY + "[set]\ntraining.max_steps = 7\n")
    _, made = recipes_of(read_study(place / "study.toml"), place)
    assert {recipe.training.max_steps for recipe in made.values()} == {7}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 3", "seed = 3", "unknown key seed: did you mean seeds"),
        ("seeds = 3", "seeds = 2", "2 seeds are too few"),
        ("seeds = 3", "seeds = [1, 1, 2]", "2 seeds are too few"),
        ("seeds = 3", 'seeds = 3\nmetrics = ["bleu"]', r"bleu needs \[test\]"),
        ("seeds = 3", 'seeds = 3\nmetrics = ["memory"]', "memory cannot decide"),
        ("seeds = 3", 'seeds = 3\nmetrics = ["loss", "loss"]', "each once"),
        ("seeds = 3", 'seeds = 3\nbaseline = "none"', "none of factored, shared"),
        ('free = "model.d_ff"', "", "needs free"),
        ('hold = "parameters"', "", "say what is held"),
        ('hold = "parameters"', 'hold = "seconds"', "leave free out"),
        ("[variants.shared]", '[variants."a/b"]', "names a folder"),
        ('base = "base.toml"', 'base = "nowhere.toml"', "there is no recipe nowhere.toml"),
        (
            "model.attention.projections",
            "model.attenton.projections",
            "variant shared: unknown key model.attenton",
        ),
        ('model.attention.projections = "shared"', "", "variants factored and shared are equal"),
        ('model.attention.projections = "shared"', "seeds = 1", "variant shared: unknown key seeds"),
        ("[variants.factored]", '[test]\nsource = "s"\ntarget = "t"\n[variants.factored]', None),
    ],
)
def test_what_is_wrong_is_said_in_a_line(place: Path, old: str, new: str, message: str | None) -> None:
    (place / "study.toml").write_text(STUDY.replace(old, new))
    if message is None:
        recipes_of(read_study(place / "study.toml"), place)
        return
    with pytest.raises(UsageError, match=message) as caught:
        recipes_of(read_study(place / "study.toml"), place)
    assert "\n" not in str(caught.value)


def test_a_metric_must_be_one_of_the_task(place: Path) -> None:
    text = (
        STUDY.replace("seeds = 3", 'seeds = 3\nmetrics = ["chrf"]') + '[test]\nsource = "s"\ntarget = "t"\n'
    )
    (place / "study.toml").write_text(text)
    with pytest.raises(UsageError, match="chrf is of translation, not of a language-model"):
        recipes_of(read_study(place / "study.toml"), place)
