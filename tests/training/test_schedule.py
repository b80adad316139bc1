"""The learning rate."""

import itertools

import pytest

from triptych.training import TrainingConfig, learning_rate


def rates(config: TrainingConfig, steps: int, d_model: int = 512) -> list[float]:
    return [learning_rate(step, config, d_model) for step in range(1, steps + 1)]


@pytest.mark.parametrize("d_model", [128, 512])
@pytest.mark.parametrize("step", [1, 17, 3999, 4000, 4001, 20_000, 100_000])
def test_the_default_is_the_papers_formula(step: int, d_model: int) -> None:
    expected = d_model**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert learning_rate(step, TrainingConfig(), d_model) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "linear"])
def test_the_peak_stands_at_the_end_of_the_warm_up(schedule: str) -> None:
    config = TrainingConfig(learning_rate=0.003, warmup_steps=40, max_steps=200, schedule=schedule)
    series = rates(config, 200)
    assert max(range(200), key=lambda i: series[i]) == 39
    assert series[39] == pytest.approx(0.003, rel=1e-12)
    assert series[:40] == pytest.approx([0.003 * step / 40 for step in range(1, 41)], rel=1e-12)
    assert all(later < earlier for earlier, later in itertools.pairwise(series[39:]))


def test_the_line_falls_evenly_to_near_zero_and_never_reaches_it() -> None:
    config = TrainingConfig(learning_rate=0.01, warmup_steps=10, max_steps=1010, schedule="linear")
    series = rates(config, 1010)
    falls = [earlier - later for earlier, later in itertools.pairwise(series[9:])]
    assert falls == pytest.approx([0.01 / 1001] * 1000, rel=1e-6)
    assert 0 < series[-1] < 0.01 / 1000


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "linear"])
def test_a_run_shorter_than_its_warm_up_only_rises(schedule: str) -> None:
    config = TrainingConfig(learning_rate=0.01, warmup_steps=100, max_steps=20, schedule=schedule)
    assert rates(config, 20) == pytest.approx([0.0001 * step for step in range(1, 21)])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_schedule_with_a_minimum_ends_near_it_and_stays_above(schedule: str) -> None:
    config = TrainingConfig(
        learning_rate=0.01, min_learning_rate=0.001, warmup_steps=10, max_steps=1010, schedule=schedule
    )
    series = rates(config, 1010)
    assert max(series) == pytest.approx(0.01)
    assert min(series[9:]) == series[-1] == pytest.approx(0.001, rel=0.05)
    assert all(later <= earlier for earlier, later in itertools.pairwise(series[9:]))


def test_the_cosine_is_half_way_down_in_the_middle_and_flat_at_both_ends() -> None:
    config = TrainingConfig(learning_rate=0.01, warmup_steps=10, max_steps=1010, schedule="cosine")
    series = rates(config, 1010)
    assert series[509] == pytest.approx(0.005, rel=0.01)
    assert series[59] > 0.0099
    assert series[959] < 0.0001


def test_the_stable_part_lasts_until_its_share_of_decay() -> None:
    config = TrainingConfig(learning_rate=0.01, warmup_steps=10, max_steps=1000, schedule="wsd")
    series = rates(config, 1000)
    assert series[9:800] == pytest.approx([0.01] * 791)
    falls = [earlier - later for earlier, later in itertools.pairwise(series[800:])]
    assert falls == pytest.approx([0.01 / 201] * 199)
    assert series[800] < 0.01


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight_decay": 0.1}, "weight_decay is given"),
        ({"min_learning_rate": 0.1}, "has no minimum"),
        ({"min_learning_rate": 0.1, "learning_rate": 0.01, "schedule": "cosine"}, "is above learning_rate"),
    ],
)
def test_options_that_would_do_nothing_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainingConfig.model_validate(given)
