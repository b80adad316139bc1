"""Statistics of differences between variants: intervals, paired tests, and the number of seeds needed.

Runs are paired by seed: two variants of a seed train on the same text in the same order, and parameters of
the same name and shape begin with the same values. The difference of a pair therefore varies less than either
figure.

Two tests are made. Student's t assumes normal differences. The sign-flip test assumes only that d and −d are
equally likely if the variants are equal; this test decides if a difference is seen. It is exact for at most
40 pairs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np
from jaxtyping import Float

# The confidence of every interval, and of every test after correction.
CONFIDENCE = 0.95
# The power of the test for `seeds_needed`.
_POWER = 0.8
_MOST_SEEDS = 10_000
# Number of differences up to which all sign flips are counted; above it, flips are drawn.
MOST_EXACT = 40
_DRAWN_FLIPS = 1 << 16
# Number of seeds up to which the power of the sign-flip test is simulated; above it, Student's is close.
_SIMULATED_SEEDS = 12
_SIMULATIONS = 2000

Range = tuple[float, float]
ANYTHING: Range = (-math.inf, math.inf)


@final
@dataclass(frozen=True)
class Estimate:
    """Mean over seeds."""

    mean: float  # mean of the seeds
    low: float  # lower end of the mean's 95 % interval (Student's t); NaN for one seed
    high: float  # upper end of the interval; NaN for one seed
    deviation: float  # standard deviation of the seeds; NaN for one seed
    count: int  # number of seeds


@final
@dataclass(frozen=True)
class Comparison:
    """Comparison of a variant with the baseline on the same seeds."""

    difference: Estimate  # mean of variant − baseline, with its interval
    p_value: (
        float  # p-value of the two-sided paired t-test; NaN for fewer than two pairs
    )
    corrected: float  # `p_value` corrected for the number of variants (Holm)
    # p-value of the two-sided sign-flip test, from drawn flips for over 40 pairs; NaN for less than two.
    exact: float
    exact_corrected: float  # `exact` corrected for the number of variants (Holm)
    num_tests: int  # number of variants compared
    differences: dict[int, float]  # differences of the pairs, by seed

    @property
    def effect(self) -> float:
        """Mean difference over the standard deviation of the differences (Cohen's d_z)."""
        return effect_size(list(self.differences.values()))

    @property
    def is_drawn(self) -> bool:
        """True if `exact` is computed from drawn sign flips instead of all flips."""
        return len(self.differences) > MOST_EXACT

    @property
    def seeds_needed(self) -> int | None:
        """Number of seeds that show this difference in four of five studies.

        None for a difference of 0, for one pair, and for more than 10,000 seeds.
        """
        return seeds_needed(list(self.differences.values()), self.num_tests)

    @property
    def is_seen(self) -> bool:
        """True if the difference is significant by the exact test after correction."""
        return self.exact_corrected < 1 - CONFIDENCE


def estimate(values: Sequence[float], possible: Range = ANYTHING) -> Estimate:
    """Return the mean of independent values with its 95 % interval, cut to the `possible` values."""
    # mean ± t · deviation / √count, with Student's quantile t.
    from scipy.stats import t

    if not values:
        raise ValueError("there is nothing to take the mean of")
    sample = np.asarray(values, dtype=float)
    count = len(values)
    mean = float(sample.mean())
    if count == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, 1)
    deviation = float(sample.std(ddof=1))
    reach = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * deviation / math.sqrt(count)
    least, most = possible
    return Estimate(
        mean, max(mean - reach, least), min(mean + reach, most), deviation, count
    )


def compare(
    variants: Mapping[str, Mapping[int, float]],
    baseline: Mapping[int, float],
    possible: Range = ANYTHING,
) -> dict[str, Comparison]:
    """Compare each variant with the baseline, on their common seeds."""
    # Holm's correction covers all variants with a pair.
    pairs = {
        name: {
            seed: values[seed] - baseline[seed]
            for seed in sorted(values.keys() & baseline.keys())
        }
        for name, values in variants.items()
    }
    pairs = {name: found for name, found in pairs.items() if found}
    differences = [list(found.values()) for found in pairs.values()]
    span = possible[1] - possible[0]
    student = [paired_p_value(d) for d in differences]
    exact = [exact_p_value(d) for d in differences]
    rows = zip(pairs.items(), student, holm(student), exact, holm(exact), strict=True)
    return {
        name: Comparison(
            estimate(list(found.values()), (-span, span)),
            t,
            t_holm,
            e,
            e_holm,
            len(pairs),
            found,
        )
        for (name, found), t, t_holm, e, e_holm in rows
    }


def paired_p_value(differences: Sequence[float]) -> float:
    """Return p of a two-sided t-test that the mean is 0.

    NaN for fewer than two differences. Equal differences have p = 1 if they are 0, and p = 0 otherwise.
    """
    from scipy.stats import t

    found = estimate(differences)
    if found.count < 2:
        return math.nan
    if found.deviation == 0:
        return 1.0 if found.mean == 0 else 0.0
    statistic = found.mean / found.deviation * math.sqrt(found.count)
    return float(2 * t.sf(abs(statistic), found.count - 1))


def exact_p_value(differences: Sequence[float]) -> float:
    """Return p of a two-sided sign-flip test of symmetry about 0; NaN for fewer than two differences.

    p is the share of all 2ⁿ sign flips with a sum at least as far from 0. It is at least 2/2ⁿ. For more than
    40 differences p is approximate: 65,536 flips are drawn, the same flips in every call.

    Source: Fisher 1935, The Design of Experiments, section 21.
    """
    if len(differences) < 2:
        return math.nan
    sample = np.asarray(differences, dtype=float)
    if len(sample) > MOST_EXACT:
        return float(_share_as_far(sample[:, None], _drawn_flips(len(sample)))[0])
    return _exact_share(sample)


def least_seeds(num_tests: int) -> int:
    """Return the least number of seeds for a significant exact test after Holm's correction."""
    return math.floor(math.log2(2 * num_tests / (1 - CONFIDENCE))) + 1


def too_few(seeds: int, num_tests: int) -> str:
    """Return a warning if the seeds are too few for a significant difference, else ""."""
    needed = least_seeds(num_tests)
    if seeds >= needed:
        return ""
    return (
        f"{seeds} seeds cannot show a difference: before correction the exact p is at least "
        f"{2 / 2**seeds:.2g}. With {num_tests} comparison{'s' * (num_tests > 1)} it takes {needed} seeds."
    )


def _exact_share(sample: Float[np.ndarray, " count"]) -> float:
    """Compute the share of all sign flips with a sum at least as far from 0 as the sample's sum.

    A sum of the whole sample is a sum of its first half plus a sum of its second half. For 40 differences
    each half has 2²⁰ sums; sorting one half counts pairs without making them.
    """
    middle = len(sample) // 2
    one, other = (
        _all_flips(len(half)) @ half for half in (sample[:middle], sample[middle:])
    )
    far = _far_enough(sample)
    other.sort()
    above = len(other) - np.searchsorted(other, far - one, side="left")
    below = np.searchsorted(other, -far - one, side="right")
    ways = len(one) * len(other)
    return (
        min(int(above.sum() + below.sum()), ways) / ways
    )  # a sum of 0 counts in both tails


def _share_as_far(
    samples: Float[np.ndarray, "count studies"], flips: Float[np.ndarray, "flips count"]
) -> Float[np.ndarray, " studies"]:
    """Compute, for each column, the share of the given flips with a sum at least as far from 0."""
    shares: Float[np.ndarray, " studies"] = (
        np.abs(flips @ samples) >= _far_enough(samples)
    ).mean(axis=0)
    return shares


def _far_enough(samples: Float[np.ndarray, "count *studies"]) -> Any:
    """Return the least distance from 0 that counts, with a tolerance for rounding errors of equal sums."""
    return np.maximum(
        np.abs(samples.sum(axis=0)) - 1e-12 * np.abs(samples).sum(axis=0), 0.0
    )


@lru_cache(maxsize=4)
def _all_flips(count: int) -> Float[np.ndarray, "flips count"]:
    """Return all sign flips of `count` values as rows of ±1; the first row is +1."""
    ways = np.arange(2**count)[:, None]
    return 1.0 - 2.0 * (ways >> np.arange(count) & 1)


@lru_cache(maxsize=4)
def _drawn_flips(count: int) -> Float[np.ndarray, "flips count"]:
    """Draw sign flips of `count` values as rows of ±1; the first row is +1."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(_DRAWN_FLIPS, count))
    signs[0] = 1.0
    return signs


def effect_size(differences: Sequence[float]) -> float:
    """Return the mean over the standard deviation (Cohen's d_z); NaN if it is undefined."""
    found = estimate(differences)
    if found.count < 2 or (found.deviation == 0 and found.mean == 0):
        return math.nan
    return (
        math.inf * found.mean if found.deviation == 0 else found.mean / found.deviation
    )


def seeds_needed(differences: Sequence[float], num_tests: int = 1) -> int | None:
    """Return the least number of seeds for which the exact test finds this effect in four of five studies.

    None if the effect is undefined, or more than 10,000 seeds are needed.
    """
    # Power rises with the number of seeds: bisect. The level is Bonferroni's, the strictest of Holm's.
    level = (1 - CONFIDENCE) / num_tests
    effect = abs(effect_size(differences))
    low = least_seeds(num_tests)
    high = _MOST_SEEDS
    if math.isnan(effect):
        return None
    if math.isinf(effect):
        return low
    if _power(effect, high, level) < _POWER:
        return None
    while low < high:
        middle = (low + high) // 2
        if _power(effect, middle, level) >= _POWER:
            high = middle
        else:
            low = middle + 1
    return low


@lru_cache(maxsize=256)
def _power(effect: float, count: int, level: float) -> float:
    """Return the probability that a test on `count` pairs finds a normal effect of this size at a level."""
    from scipy.stats import nct, t

    if count <= _SIMULATED_SEEDS:
        studies = np.random.default_rng(count).normal(
            effect, size=(count, _SIMULATIONS)
        )
        return float((_share_as_far(studies, _all_flips(count)) < level).mean())
    critical = float(t.isf(level / 2, count - 1))
    shift = effect * math.sqrt(count)
    if (
        shift > 30
    ):  # the power is 1 up to rounding, and the distribution is slow to compute
        return 1.0
    other_side = float(nct.cdf(-critical, count - 1, shift))  # NaN on underflow
    return float(nct.sf(critical, count - 1, shift)) + (
        0.0 if math.isnan(other_side) else other_side
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests: the probability of any false finding stays that of one test."""
    # Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    tested = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    corrected = list(p_values)
    highest = 0.0
    for before, (p, place) in enumerate(tested):
        highest = max(highest, min(p * (len(tested) - before), 1.0))
        corrected[place] = highest
    return corrected
