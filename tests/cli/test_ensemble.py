"""Several translators that translate together: `load(model, ensemble=[…])`, and the commands that take it."""

import json
from pathlib import Path

import pytest

from command import Command
from tiny_recipe import tiny_recipe
from triptych import load
from triptych.errors import EngineNote, UsageError
from triptych.running.opening.run_folder import RECIPE
from triptych.training import read_recipe, require_translation, resolve, runs
from triptych.training.progress import LineDisplay

LINES = ["Zwei.", "Der Hund ist alt.", "Das Haus war klein, und es ist neu."]


@pytest.fixture(scope="module")
def other_run(small_run: Path) -> Path:
    """A run of the same recipe with another seed."""
    tree = require_translation(read_recipe(small_run / RECIPE), small_run).model_dump(mode="json")
    runs.train(resolve(tree | {"seed": 2}), small_run.parent / "other", LineDisplay())
    return small_run.parent / "other"


def test_commands_translate_with_all_models(triptych: Command, small_run: Path, other_run: Path) -> None:
    both = load(small_run, ensemble=[other_run])
    found = both.translate(LINES)
    assert found == load(other_run, ensemble=[small_run]).translate(LINES)
    alone = [load(run).translate(LINES) for run in (small_run, other_run)]
    assert found not in alone
    # A mean of probabilities lies between them.
    scored = [[load(run).score(line.source, line.text) for run in (small_run, other_run)] for line in found]
    for line, of_models in zip(found, scored, strict=True):
        totals = [sum(log_prob for _, log_prob in tokens) for tokens in of_models]
        assert min(totals) - 1e-4 < line.candidates[0].log_prob < max(totals) + 1e-4
    text = "\n".join(LINES).encode()
    answer = triptych("translate", small_run, "--ensemble", other_run, stdin=text)
    assert answer.out.splitlines() == [line.text for line in found]
    assert triptych("translate", small_run, "--ensemble", other_run, "--workers", "2", stdin=text) == answer


@pytest.mark.slow
def test_a_teacher_of_several_is_known_by_all_of_them(
    triptych: Command, small_run: Path, other_run: Path
) -> None:
    given = "distil", small_run, small_run / RECIPE, "--no-train", "--out", small_run.parent / "student"
    triptych(*given, "--ensemble", other_run).done()
    record = json.loads((small_run.parent / "student" / "distillation.json").read_text())
    load(other_run).distil(small_run / RECIPE, other_run.parent / "its-student")
    others = json.loads((other_run.parent / "its-student" / "distillation.json").read_text())
    assert record["teacher"]["ensemble"] == [others["teacher"]["sha256"]]
    triptych(*given, "--ensemble", other_run).done()
    triptych(*given).refused("begun with another teacher")


def test_what_does_not_go_with_an_ensemble_is_refused(
    small_run: Path, other_run: Path, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger"
    runs.train(resolve(tiny_recipe(20, 2, training={"max_steps": 1})), stranger, LineDisplay())
    with pytest.raises(UsageError, match="stranger has other tokens than"):
        load(small_run, ensemble=[stranger]).translate(LINES)
    load(small_run).shortlist(tmp_path / "list.txt")
    with pytest.raises(UsageError, match="an ensemble runs without a shortlist"):
        load(small_run, ensemble=[other_run], shortlist=tmp_path / "list.txt").translate(LINES)
    with pytest.warns(EngineNote, match="triptych translates"):
        load(small_run, ensemble=[other_run], engine="auto").translate(LINES)
