"""What a difference between variants is worth: intervals, paired tests, how many seeds it would need.

Runs are paired by seed: two variants of a seed saw the same text in the same order from the same initial
values wherever they have the same parameters, so the difference of a pair varies less than either figure.

Two tests are made. Student's t assumes normal differences. The sign-flip test assumes only that a difference
is as likely to be d as −d if the variants are equal; it decides whether a difference is seen. It is exact
for at most 40 pairs.
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
# The power with which a difference would be found again.
_POWER = 0.8
_MOST_SEEDS = 10_000
# All sign flips of at most this many differences are counted; of more, some are drawn.
MOST_EXACT = 40
_DRAWN_FLIPS = 1 << 16
# Up to this many seeds the power of the sign-flip test is simulated; with more it is close to Student's.
_SIMULATED_SEEDS = 12
_SIMULATIONS = 2000

Range = tuple[float, float]
ANYTHING: Range = (-math.inf, math.inf)


@final
@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float  # of the seeds
    low: float  # lower end of its 95 % interval (Student's t); NaN for one seed
    high: float  # upper end of it
    deviation: float  # standard deviation of the seeds; NaN for one
    count: int  # number of seeds


@final
@dataclass(frozen=True)
class Comparison:
    """A variant against the baseline, paired by seed."""

    difference: Estimate  # mean of variant − baseline, with its interval
    p_value: float  # of the paired t-test, two-sided; NaN where no test is possible
    corrected: float  # the same, corrected for the number of variants (Holm)
    # p-value of the sign-flip test, two-sided; NaN where no test is possible. Of over 40 pairs it is drawn.
    exact: float
    exact_corrected: float  # the same, corrected for the number of variants (Holm)
    num_tests: int  # that number
    differences: dict[int, float]  # of each pair, by seed

    @property
    def effect(self) -> float:
        """Mean difference over the standard deviation of the differences (Cohen's d_z)."""
        return effect_size(list(self.differences.values()))

    @property
    def is_drawn(self) -> bool:
        """True if `exact` is computed from drawn sign flips, not from all."""
        return len(self.differences) > MOST_EXACT

    @property
    def seeds_needed(self) -> int | None:
        """Seeds that show this difference in four of five studies; None for 0, one pair, or over 10,000."""
        return seeds_needed(list(self.differences.values()), self.num_tests)

    @property
    def is_seen(self) -> bool:
        """Whether the exact test, after correction, says that the difference is more than chance explains."""
        return self.exact_corrected < 1 - CONFIDENCE


def estimate(values: Sequence[float], possible: Range = ANYTHING) -> Estimate:
    """The mean of independent values, with its 95 % interval."""
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
    return Estimate(mean, max(mean - reach, least), min(mean + reach, most), deviation, count)


def compare(
    variants: Mapping[str, Mapping[int, float]], baseline: Mapping[int, float], possible: Range = ANYTHING
) -> dict[str, Comparison]:
    """Each variant against the baseline, on the seeds that both have."""
    pairs = {
        name: {seed: values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())}
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
            estimate(list(found.values()), (-span, span)), t, t_holm, e, e_holm, len(pairs), found
        )
        for (name, found), t, t_holm, e, e_holm in rows
    }


def paired_p_value(differences: Sequence[float]) -> float:
    """The p of a two-sided t-test of a mean of 0; NaN for fewer than two, 0 for equal ones that are not 0."""
    from scipy.stats import t

    found = estimate(differences)
    if found.count < 2:
        return math.nan
    if found.deviation == 0:
        return 1.0 if found.mean == 0 else 0.0
    statistic = found.mean / found.deviation * math.sqrt(found.count)
    return float(2 * t.sf(abs(statistic), found.count - 1))


def exact_p_value(differences: Sequence[float]) -> float:
    """The p of a two-sided sign-flip test that differences are symmetric about 0; NaN for fewer than two.

    p is the share of all 2ⁿ ways to flip their signs that give a sum at least as far from 0. It is at least
    2/2ⁿ. For more than 40 differences p is not exact: 65,536 ways are drawn, the same ones every time.

    Source: Fisher 1935, The Design of Experiments, section 21.
    """
    if len(differences) < 2:
        return math.nan
    sample = np.asarray(differences, dtype=float)
    if len(sample) > MOST_EXACT:
        return float(_share_as_far(sample[:, None], _drawn_flips(len(sample)))[0])
    return _exact_share(sample)


def least_seeds(num_tests: int) -> int:
    """The fewest seeds with which the exact test can see a difference after Holm's correction."""
    return math.floor(math.log2(2 * num_tests / (1 - CONFIDENCE))) + 1


def too_few(seeds: int, num_tests: int) -> str:
    """A warning that no difference can be seen with these seeds; empty if one can."""
    needed = least_seeds(num_tests)
    if seeds >= needed:
        return ""
    return (
        f"{seeds} seeds cannot show a difference: before correction the exact p is at least "
        f"{2 / 2**seeds:.2g}. With {num_tests} comparison{'s' * (num_tests > 1)} it takes {needed} seeds."
    )


def _exact_share(sample: Float[np.ndarray, " count"]) -> float:
    """Compute the share of all sign flips whose sum is at least as far from 0 as the sample's.

    The sums of both halves of the sample are added in pairs: for 40 differences each half has 2²⁰.
    """
    middle = len(sample) // 2
    one, other = (_all_flips(len(half)) @ half for half in (sample[:middle], sample[middle:]))
    far = _far_enough(sample)
    other.sort()
    above = len(other) - np.searchsorted(other, far - one, side="left")
    below = np.searchsorted(other, -far - one, side="right")
    ways = len(one) * len(other)
    return min(int(above.sum() + below.sum()), ways) / ways  # all are both where the sum is 0


def _share_as_far(
    samples: Float[np.ndarray, "count studies"], flips: Float[np.ndarray, "flips count"]
) -> Float[np.ndarray, " studies"]:
    """Compute, for each column, the share of the given flips whose sum is at least as far from 0."""
    shares: Float[np.ndarray, " studies"] = (np.abs(flips @ samples) >= _far_enough(samples)).mean(axis=0)
    return shares


def _far_enough(samples: Float[np.ndarray, "count *studies"]) -> Any:
    """Return the least distance from 0 that counts; sums that are equal on paper differ by rounding."""
    return np.maximum(np.abs(samples.sum(axis=0)) - 1e-12 * np.abs(samples).sum(axis=0), 0.0)


@lru_cache(maxsize=4)
def _all_flips(count: int) -> Float[np.ndarray, "flips count"]:
    """Make all ways to flip signs; the first changes none."""
    ways = np.arange(2**count)[:, None]
    return 1.0 - 2.0 * (ways >> np.arange(count) & 1)


@lru_cache(maxsize=4)
def _drawn_flips(count: int) -> Float[np.ndarray, "flips count"]:
    """Draw ways to flip signs; the first changes none."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(_DRAWN_FLIPS, count))
    signs[0] = 1.0
    return signs


def effect_size(differences: Sequence[float]) -> float:
    """Their mean over their standard deviation (Cohen's d_z); NaN where that is not defined."""
    found = estimate(differences)
    if found.count < 2 or (found.deviation == 0 and found.mean == 0):
        return math.nan
    return math.inf * found.mean if found.deviation == 0 else found.mean / found.deviation


def seeds_needed(differences: Sequence[float], num_tests: int = 1) -> int | None:
    """The fewest seeds with which the exact test finds their mean in four of five studies."""
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
    """The chance that a test on this number of pairs finds a normal effect of this size at a level."""
    from scipy.stats import nct, t

    if count <= _SIMULATED_SEEDS:
        studies = np.random.default_rng(count).normal(effect, size=(count, _SIMULATIONS))
        return float((_share_as_far(studies, _all_flips(count)) < level).mean())
    critical = float(t.isf(level / 2, count - 1))
    shift = effect * math.sqrt(count)
    if shift > 30:  # far past certainty, where the distribution is slow to work out
        return 1.0
    other_side = float(nct.cdf(-critical, count - 1, shift))  # NaN where it is too small for a number
    return float(nct.sf(critical, count - 1, shift)) + (0.0 if math.isnan(other_side) else other_side)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected so that the chance of any false finding stays what it is for one test."""
    # Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    tested = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    corrected = list(p_values)
    highest = 0.0
    for before, (p, place) in enumerate(tested):
        highest = max(highest, min(p * (len(tested) - before), 1.0))
        corrected[place] = highest
    return corrected
