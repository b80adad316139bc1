"""Two passes that should agree, in the loop. Their loss against the formula: `test_losses.py`."""

from pathlib import Path

import pytest

from training.test_resuming import recipe_tree
from triptych.errors import UsageError
from triptych.training import Recipe, resolve, runs
from triptych.training.metrics import read_metrics
from triptych.training.progress import LineDisplay


def recipe(rdrop: float, dropout: float, after: int = 0) -> Recipe:
    tree = recipe_tree(
        **{"max_steps": 20, "accumulate_batches": 1, "clip_norm": 0.0, "log_every_steps": 5},
        **{"rdrop": rdrop, "rdrop_after": after},
    )
    tree["model"] = {**tree["model"], "dropout": dropout, "encoder": {"num_layers": 1}}  # type: ignore[dict-item]
    tree["validation"] = {"every_steps": 20, "bleu": False, "metric": "loss"}
    return resolve(tree)


def losses(folder: Path, rdrop: float, after: int = 0) -> list[float]:
    runs.train(recipe(rdrop, dropout=0.3, after=after), folder, LineDisplay())
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def test_the_loop_pays_for_disagreement_from_its_step_on_and_learns_all_the_same(tmp_path: Path) -> None:
    without, much = losses(tmp_path / "without", 0.0), losses(tmp_path / "much", 30.0)
    late = losses(tmp_path / "late", 30.0, after=10)
    assert much[0] > without[0]
    assert much[-1] < much[0]
    assert late[:2] == without[:2]  # steps 1 to 10
    assert late[2] > without[2]


def test_without_dropout_there_is_nothing_to_agree_on() -> None:
    with pytest.raises(UsageError, match=r"training\.rdrop is 5\.0 but the model has no dropout"):
        recipe(5.0, dropout=0.0)


def test_when_it_begins_says_nothing_without_it() -> None:
    with pytest.raises(UsageError, match=r"training\.rdrop_after says when R-Drop begins"):
        recipe(0.0, dropout=0.3, after=10)
