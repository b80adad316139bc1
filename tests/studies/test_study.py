"""Studies are read, and what is wrong with one is said in a line."""

import tomllib
from pathlib import Path

import pytest

from studying import CUT, STUDY
from triptych.core.models import LanguageModelConfig
from triptych.errors import UsageError
from triptych.rewriting.functions.registry import read_rewrite
from triptych.training.corpora.tasks import TASKS
from triptych.training.studies import read_study
from triptych.training.studies.study import recipes_of, rewrites_of

STUDIES = Path(__file__).parents[2] / "docs" / "results" / "studies"
TESTED = '[test]\nsource = "s"\ntarget = "t"'
LAST = """['qk'])"]\n"""  # of the variant that is cut
# The others are recipes, which studies change.
OF_DOCUMENTATION = {path.stem: tomllib.loads(path.read_text()) for path in sorted(STUDIES.glob("*.toml"))}


def test_a_variant_is_the_base_with_its_changes(place: Path) -> None:
    base, made = recipes_of(read_study(place / "study.toml"), place)
    assert made["factored"] == base
    assert made["shared"].model.attention.projections == "shared"
    assert made["shared"].training == base.training


def test_set_changes_every_variant(place: Path) -> None:
    (place / "study.toml").write_text(STUDY + "[set]\ntraining.max_steps = 7\n")
    _, made = recipes_of(read_study(place / "study.toml"), place)
    assert {recipe.training.max_steps for recipe in made.values()} == {7}


def test_a_study_that_is_like_another_has_its_keys_where_it_gives_none(place: Path) -> None:
    (place / "other.toml").write_text("""
like = "study.toml"
name = "other"
seeds = 4
[set]
training.max_steps = 7
[variants.shared]
model.d_k = 4
""")
    (place / "third.toml").write_text('like = "other.toml"\nname = "third"\n')
    study, other, third = (read_study(place / f"{name}.toml") for name in ("study", "other", "third"))
    assert (other.name, other.seeds, other.budget) == ("other", 4, study.budget)
    assert list(other.variants) == ["factored", "shared"]
    _, made = recipes_of(other, place)
    assert made["shared"].model.attention.projections == "shared"
    assert made["shared"].model.d_k == 4
    assert third.model_dump(exclude={"name"}) == other.model_dump(exclude={"name"})


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ('"gone.toml"', r"there is no study .*gone\.toml"),
        ('"sub/study.toml"', "like is 'sub/study.toml': name the file of a study in the same folder"),
        ("3", "like is 3: name the file"),
        ('"study.toml"', r"like leads back to it: study\.toml → study\.toml"),
        ('"back.toml"', r"like leads back to it: study\.toml → back\.toml → study\.toml"),
    ],
)
def test_a_study_that_it_cannot_be_like_is_said_in_a_line(place: Path, like: str, message: str) -> None:
    (place / "back.toml").write_text('like = "study.toml"\n')
    (place / "study.toml").write_text(f"like = {like}\n{STUDY}")
    with pytest.raises(UsageError, match=message) as caught:
        read_study(place / "study.toml")
    assert "\n" not in str(caught.value)


def test_the_studies_of_the_suite_differ_in_their_tasks_and_in_training_alone() -> None:
    studies = {task: read_study(STUDIES / f"suite-{task}.toml") for task in TASKS}
    for study in studies.values():
        study.set.pop("training", None)
    texts = {study.model_dump_json().replace(task, "TASK") for task, study in studies.items()}
    assert texts == {studies["copy"].model_dump_json().replace("copy", "TASK")}


@pytest.mark.parametrize(
    "name", [name for name, keys in OF_DOCUMENTATION.items() if {"base", "like"} & keys.keys()]
)
def test_the_studies_of_the_documentation_can_be_planned(name: str) -> None:
    study = read_study(STUDIES / f"{name}.toml")
    assert study.name == name
    _, trained = recipes_of(study, STUDIES)
    assert trained.keys() == study.trained.keys()


def test_a_study_cuts_trained_runs_to_the_ranks_that_it_trains_too() -> None:
    study = read_study(STUDIES / "low-rank.toml")
    _, trained = recipes_of(study, STUDIES)
    for rank in (2, 4, 8):
        model = trained[f"d_k-{rank}"].model
        assert isinstance(model, LanguageModelConfig)
        assert (model.d_k, model.d_v) == (rank, None)
        for name in (f"cut-{rank}", f"cut-data-{rank}"):
            assert study.parent_of(name) == "factored"
            (call,) = study.rewritten[name]["rewrite"]["do"]
            assert read_rewrite(call).options()["rank"] == rank
            assert read_rewrite(call).options()["forms"] == ["qk"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 3", "seed = 3", "unknown key seed: did you mean seeds"),
        ("seeds = 3", "seeds = 2", "2 seeds are too few"),
        ("seeds = 3", "seeds = [1, 1, 2]", "2 seeds are too few"),
        ("seeds = 3", 'seeds = 3\nmetrics = ["bleu"]', r"bleu needs \[test\]"),
        ("seeds = 3", 'seeds = 3\nmetrics = ["test_loss"]', r"test_loss needs \[test_text\]"),
        ("seeds = 3", 'seeds = 3\nmetrics = ["memory"]', "memory cannot decide"),
        (
            "seeds = 3",
            f'seeds = 3\nmetrics = ["chrf"]\n{TESTED}',
            "chrf is of translation, not of a language-",
        ),
        ("seeds = 3", 'seeds = 3\nmetrics = ["loss", "loss"]', "each once"),
        ("seeds = 3", 'seeds = 3\nbaseline = "none"', "which there is not: it is one of factored, shared"),
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
        ("[variants.factored]", f"{TESTED}\n[variants.factored]", None),
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


def test_a_rewritten_variant_is_read_as_a_recipe_of_rewriting(place: Path) -> None:
    calibrated = """
[variants.on-text]
rewrite_of = "shared"
[variants.on-text.rewrite]
calibration = "text.txt"
[[variants.on-text.rewrite.step]]
rewrite = "truncate"
rank = 2
criterion = "centred"
layers = [0]
"""
    (place / "study.toml").write_text(STUDY + CUT + calibrated)
    study = read_study(place / "study.toml")
    _, trained = recipes_of(study, place)
    assert trained.keys() == {"factored", "shared"}
    rewrites = rewrites_of(study, place)
    assert [step.options()["rank"] for step in rewrites["cut"].step] == [2]
    assert rewrites["cut"].calibration is None
    assert [step.layers for step in rewrites["on-text"].step] == [(0,)]
    assert rewrites["on-text"].calibration == place / "text.txt"
    assert study.parent_of("on-text") == "shared"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('rewrite_of = "factored"', "", "variants.cut: rewrite_of is missing"),
        ("rewrite.do", "# rewrite.do", "variants.cut: rewrite is missing"),
        (
            '"factored"',
            '"narrow"',
            "rewrite_of is 'narrow', which is none of those trained: factored, shared",
        ),
        ('"factored"', '"cut"', "rewrite_of is 'cut', which is none of those trained"),
        ('"factored"', '["factored"]', r"rewrite_of is \['factored'\], which is none of those trained"),
        ("rewrite.do", "model.d_k = 2\nrewrite.do", "model is a key of training"),
        ("rewrite.do = [", "rewrite = [", "rewrite is a table"),
        ("rewrite.do", "rewrite.rank = 2\nrewrite.do", "variant cut: rewrite: rank: there is no such key"),
        ("truncate", "truncat", "variant cut: rewrite: there is no rewrite truncat"),
        ("['qk']", "['qk'], criterion='centred'", "variant cut: rewrite: truncate needs a text"),
        ("rewrite.do", 'rewrite.calibration = "text.txt"\nrewrite.do', "no step uses the calibration text"),
        ("rank=2", "ranks=2", "truncate has no option ranks"),
        (LAST, LAST + CUT.replace("variants.cut", "variants.again"), "variants cut and again are equal"),
        (
            "seeds = 3",
            'seeds = 3\nbaseline = "cut"',
            "baseline is 'cut', which is rewritten from another: it is one of factored, shared",
        ),
        (
            "[variants.factored]",
            'free_of = { cut = "model.d_k" }\n[variants.factored]',
            "free_of names 'cut', which is no trained variant",
        ),
        (
            LAST,
            LAST.replace("]", "], criterion='centred'", 1) + 'rewrite.calibration = "gone.txt"\n',
            r"variant cut: rewrite: .*gone\.txt does not exist",
        ),
    ],
)
def test_what_is_wrong_with_a_rewritten_variant_is_said_in_a_line(
    place: Path, old: str, new: str, message: str
) -> None:
    text = STUDY + CUT
    assert old in text
    (place / "study.toml").write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=message) as caught:
        rewrites_of(read_study(place / "study.toml"), place)
    assert "\n" not in str(caught.value)
