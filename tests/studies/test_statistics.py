"""Intervals and tests against scipy and against simulated studies."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from triptych.training.studies.statistics import (
    compare,
    effect_size,
    estimate,
    exact_p_value,
    holm,
    least_seeds,
    paired_p_value,
    seeds_needed,
)


def test_the_interval_is_students() -> None:
    values = [1.0, 1.5, 0.7, 2.0, 1.1]
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    found = estimate(values)
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_one_seed_has_no_interval() -> None:
    found = estimate([3.0])
    assert found.mean == 3.0
    assert math.isnan(found.low)
    assert math.isnan(found.deviation)


def test_the_p_value_is_that_of_scipys_paired_test() -> None:
    one, other = [1.0, 1.5, 0.7, 2.0, 1.1], [1.2, 1.4, 1.0, 2.4, 1.3]
    expected = stats.ttest_rel(one, other).pvalue
    assert paired_p_value([a - b for a, b in zip(one, other, strict=True)]) == pytest.approx(expected)


def test_pairs_that_do_not_vary_are_equal_or_different_for_certain() -> None:
    assert paired_p_value([0.0, 0.0, 0.0]) == 1.0
    assert paired_p_value([0.5, 0.5, 0.5]) == 0.0
    assert math.isnan(paired_p_value([0.5]))


@pytest.mark.parametrize("count", [2, 5, 8, 13])
def test_the_exact_p_value_is_that_of_scipys_permutation_test(count: int) -> None:
    differences = np.random.default_rng(count).normal(0.5, size=count)
    expected = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    assert exact_p_value([*differences]) == pytest.approx(expected)


@pytest.mark.parametrize("count", [17, 18])
def test_the_exact_p_value_counts_every_way_of_more_pairs_too(count: int) -> None:
    differences = np.random.default_rng(count).normal(0.3, size=count).round(2)  # with ties
    ways = np.arange(2**count)[:, None] >> np.arange(count) & 1
    sums = np.abs((1 - 2 * ways) @ differences).round(9)
    assert exact_p_value([*differences]) == (sums >= abs(differences.sum()).round(9)).mean()


def test_the_exact_p_value_of_more_than_40_pairs_is_drawn_and_is_never_0() -> None:
    assert exact_p_value([1.0] * 40) == 2 / 2**40
    assert exact_p_value([1.0] * 41) == 2**-16
    differences = np.random.default_rng(3).normal(0.3, size=41)
    drawn, students = exact_p_value([*differences]), paired_p_value([*differences])
    assert drawn == pytest.approx(students, rel=0.3)
    pairs = {seed: float(one) for seed, one in enumerate(differences)}
    assert [
        compare({"v": {seed: pairs[seed] for seed in range(count)}}, dict.fromkeys(pairs, 0.0))["v"].is_drawn
        for count in (40, 41)
    ] == [False, True]


def test_the_pooled_figures_of_one_matrix_are_those_of_its_runs() -> None:
    results = Path(__file__).parents[2] / "docs" / "results" / "studies" / "results"
    pooled: dict[int, float] = {}
    for study, count in (("one-matrix-again", 10), ("one-matrix-third", 16), ("one-matrix", 21)):
        with (results / study / "runs.csv").open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["variant"] in ("factored", "bilinear")]
        losses = {(row["variant"], int(row["seed"])): float(row["loss"]) for row in rows}
        seeds = {seed for _, seed in losses}
        pooled |= {seed: losses["bilinear", seed] - losses["factored", seed] for seed in seeds}
        assert len(pooled) == count
        if count == 16:
            assert f"{exact_p_value([*pooled.values()]):.2g}" == "0.0037"
    assert f"{exact_p_value([*pooled.values()]):.2g}" == "0.00017"


def test_differences_that_cancel_exactly_are_no_evidence() -> None:
    assert exact_p_value([0.0, 0.0, 0.0]) == 1.0
    assert exact_p_value([0.1, 0.2, -0.3]) == 1.0


def test_what_students_test_finds_with_five_seeds_is_not_seen() -> None:
    one = compare({"v": dict(enumerate([0.5, 0.51, 0.52, 0.53, 0.54]))}, dict.fromkeys(range(5), 0.0))["v"]
    assert one.corrected < 1e-4
    assert one.exact == one.exact_corrected == 1 / 16
    assert not one.is_seen
    assert (least_seeds(1), least_seeds(2), least_seeds(6), least_seeds(7)) == (6, 7, 8, 9)


def test_intervals_of_shares_end_where_shares_end() -> None:
    near_one = [1.0, 1.0, 0.7]
    assert estimate(near_one).high > 1
    assert estimate(near_one, (0.0, 1.0)).high == 1
    different = compare({"v": {1: 1.0, 2: 1.0, 3: 0.1}}, {1: 0.0, 2: 0.0, 3: 0.0}, (0.0, 1.0))["v"].difference
    assert (different.low < 0, different.high) == (True, 1.0)


def test_identical_variants_differ_by_an_interval_that_holds_0_at_the_stated_rate() -> None:
    draws = np.random.default_rng(1)
    holds = found = 0
    studies = 400
    for _ in range(studies):
        seeds = draws.normal(size=5)
        baseline = {i: seeds[i] + draws.normal() for i in range(5)}
        variants = {name: {i: seeds[i] + draws.normal() for i in range(5)} for name in "abc"}
        compared = compare(variants, baseline)
        holds += compared["a"].difference.low <= 0 <= compared["a"].difference.high
        found += any(one.corrected < 0.05 for one in compared.values())
    # Four standard deviations of a proportion of 0.05 in 400 studies are 0.044.
    assert abs(holds / studies - 0.95) < 0.044
    # Any false finding among the three: at most 5 %.
    assert found / studies < 0.05 + 0.044


def test_identical_variants_are_seen_to_differ_in_at_most_one_of_twenty_studies() -> None:
    draws = np.random.default_rng(4)
    found = 0
    for _ in range(400):
        baseline, *variants = ({i: draws.exponential() for i in range(8)} for _ in range(4))
        compared = compare({str(i): values for i, values in enumerate(variants)}, baseline)
        found += any(one.is_seen for one in compared.values())
    assert found / 400 < 0.05 + 0.044


@pytest.mark.parametrize("num_variants", [1, 6])
def test_a_planted_difference_is_found_with_the_seeds_that_it_needs(num_variants: int) -> None:
    draws = np.random.default_rng(2)
    deviation, planted = 1.0, 1.5
    needed = seeds_needed([planted - deviation, planted, planted + deviation], num_variants)
    assert needed is not None
    means = [planted, *[0.0] * (num_variants - 1)]
    found = [
        compare(
            {
                str(i): dict(enumerate(draws.normal(mean, deviation, size=needed)))
                for i, mean in enumerate(means)
            },
            dict.fromkeys(range(needed), 0.0),
        )["0"].is_seen
        for _ in range(400)
    ]
    # Four of five, to five standard deviations; one seed fewer has less.
    assert 0.70 < np.mean(found) < 0.95


def test_no_number_of_seeds_finds_what_is_not_there() -> None:
    assert seeds_needed([0.0, 0.0]) is None
    assert seeds_needed([1e-6, -1e-6, 1.1e-6, -1e-6]) is None
    assert seeds_needed([0.3, 0.3]) == 6
    assert seeds_needed([0.3, 0.3], 6) == 8


def test_effect_size_is_in_deviations_of_the_differences() -> None:
    assert effect_size([1.0, 2.0, 3.0]) == pytest.approx(2.0)


def test_only_seeds_that_both_have_are_compared() -> None:
    found = compare({"v": {1: 2.0, 2: 3.0, 9: 100.0}, "other": {7: 1.0}}, {1: 1.0, 2: 1.0, 3: 0.0})
    assert found.keys() == {"v"}
    assert found["v"].difference.mean == pytest.approx(1.5)


def test_holm_multiplies_by_the_tests_left_and_keeps_the_order() -> None:
    a, b, c, d, e = holm([0.01, 0.04, 0.03, math.nan, 0.9])
    assert (a, c) == pytest.approx((0.04, 0.09))
    assert b == pytest.approx(0.09)  # 0.08 alone, but no less than the one before
    assert e == pytest.approx(0.9)
    assert math.isnan(d)


def test_holm_gives_no_p_value_above_1() -> None:
    assert holm([0.6, 0.7]) == [1.0, 1.0]
