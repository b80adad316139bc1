"""The first sentence of the page of a run: how its training ended."""

import math

import pytest

from triptych.run_page import how_it_learned
from triptych.seeing.reports import MetricPoint

BEST = {"chosen": "best"}


def metrics(training: list[float], validation: list[float]) -> list[MetricPoint]:
    return [
        MetricPoint(100 * number, train_loss=train, valid_loss=valid)
        for number, (train, valid) in enumerate(zip(training, validation, strict=True), start=1)
    ]


def test_a_run_that_overfits_says_so_with_its_figures() -> None:
    found = metrics([3.0, 2.0, 1.0, 0.2], [3.0, 2.5, 2.75, 3.25])
    assert how_it_learned(found, BEST) == (
        "It overfits: after step 200 the validation loss rises from 2.500 to 3.250 (step 400), while the "
        "training loss falls from 2.500 to 1.550. The stored weights are from the best validation."
    )


@pytest.mark.parametrize(
    ("training", "validation", "said"),
    [
        # A rise below 2 % is noise.
        ([3.0, 2.0, 1.9], [3.0, 2.5, 2.51], "2.500 at its lowest, after 200 steps, and 2.510 at the end"),
        # Without a falling training loss a rising validation loss has another reason.
        ([1.0, 2.0, 4.0], [3.0, 2.5, 3.5], "2.500 at its lowest, after 200 steps, and 3.500 at the end"),
        ([3.0, 2.0, 1.0], [3.0, 2.5, 2.0], "2.000 after 300 steps. It was still falling"),
        ([3.0], [2.0], "2.000 after 100 steps. It is the only validation"),
        ([3.0, 2.0], [2.0, math.nan], "diverged: the validation loss is not finite at step 200"),
    ],
)
def test_other_runs_are_not_said_to_overfit(
    training: list[float], validation: list[float], said: str
) -> None:
    found = how_it_learned(metrics(training, validation), BEST)
    assert said in found
    assert "overfits" not in found
    assert ("does not overfit" in found) == (said.endswith("2.510 at the end"))


def test_a_run_in_progress_is_not_finished() -> None:
    found = how_it_learned([*metrics([3.0], [2.0]), MetricPoint(150, train_loss=2.0)], None)
    assert found.endswith("The training is at step 150 and not finished.")
    assert how_it_learned([], None).startswith(
        "The run has not been validated yet. The training is at step 0"
    )
