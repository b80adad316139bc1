"""Intervals and tests against scipy and against simulated studies."""

import math

import numpy as np
import pytest
from scipy import stats

from triptych.studies.statistics import compare, effect_size, estimate, paired_p_value, seeds_needed


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
        found += any(one.is_seen for one in compared.values())
    # Four standard deviations of a proportion of 0.05 in 400 studies are 0.044.
    assert abs(holds / studies - 0.95) < 0.044
    # Any false finding among the three: at most 5 %.
    assert found / studies < 0.05 + 0.044


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
    assert seeds_needed([0.3, 0.3]) == 2


def test_effect_size_is_in_deviations_of_the_differences() -> None:
    assert effect_size([1.0, 2.0, 3.0]) == pytest.approx(2.0)


def test_only_seeds_that_both_have_are_compared() -> None:
    found = compare({"v": {1: 2.0, 2: 3.0, 9: 100.0}, "other": {7: 1.0}}, {1: 1.0, 2: 1.0, 3: 0.0})
    assert found.keys() == {"v"}
    assert found["v"].difference.mean == pytest.approx(1.5)
