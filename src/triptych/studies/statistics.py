"""What a difference between variants is worth: intervals, paired tests, how many seeds it would need.

Runs are paired by seed: two variants of a seed saw the same text in the same order from the same initial
values wherever they have the same parameters, so the difference of a pair varies less than either figure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from triptych.algebra.significance import holm

# Of every interval, and of every test after correction.
CONFIDENCE = 0.95
# With which a difference would be found again.
_POWER = 0.8
_MOST_SEEDS = 10_000


@final
@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: of the seeds.
        low: lower end of its 95 % interval (Student's t); NaN for one seed. Likewise `high`.
        high: upper end.
        deviation: standard deviation of the seeds; NaN for one.
        count: number of seeds.
    """

    mean: float
    low: float
    high: float
    deviation: float
    count: int


@final
@dataclass(frozen=True)
class Comparison:
    """A variant against the baseline, paired by seed.

    Attributes:
        difference: mean of variant − baseline, with its interval.
        p_value: of the paired t-test, two-sided; NaN where no test is possible.
        corrected: the same, corrected for the number of variants (Holm).
        num_tests: that number.
        differences: of each pair, by seed.
    """

    difference: Estimate
    p_value: float
    corrected: float
    num_tests: int
    differences: dict[int, float]

    @property
    def effect(self) -> float:
        """Mean difference over the standard deviation of the differences (Cohen's d_z)."""
        return effect_size(list(self.differences.values()))

    @property
    def seeds_needed(self) -> int | None:
        """Seeds with which this difference would be seen in four of five studies of as many variants.

        None if it is 0, if there is one pair, or if it takes more than 10,000.
        """
        return seeds_needed(list(self.differences.values()), self.num_tests)

    @property
    def is_seen(self) -> bool:
        """Whether the difference is more than chance explains, after correction."""
        return self.corrected < 1 - CONFIDENCE


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values, with its 95 % interval.

    Raises:
        ValueError: there are none.
    """
    from scipy.stats import t

    if not values:
        raise ValueError("there is nothing to take the mean of")
    sample, count = np.asarray(values, dtype=float), len(values)
    mean = float(sample.mean())
    if count == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, 1)
    deviation = float(sample.std(ddof=1))
    reach = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * deviation / math.sqrt(count)
    return Estimate(mean, mean - reach, mean + reach, deviation, count)


def compare(
    variants: Mapping[str, Mapping[int, float]], baseline: Mapping[int, float]
) -> dict[str, Comparison]:
    """Each variant against the baseline, on the seeds that both have.

    Args:
        variants: the values of each variant by seed.
        baseline: those of the baseline.

    Returns:
        By variant; one without a seed in common with the baseline is left out.
    """
    pairs = {
        name: {seed: values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())}
        for name, values in variants.items()
    }
    pairs = {name: found for name, found in pairs.items() if found}
    p_values = [paired_p_value(list(found.values())) for found in pairs.values()]
    return {
        name: Comparison(estimate(list(found.values())), p_value, corrected, len(pairs), found)
        for (name, found), p_value, corrected in zip(pairs.items(), p_values, holm(p_values), strict=True)
    }


def paired_p_value(differences: Sequence[float]) -> float:
    """Of a t-test that their mean is 0, two-sided; NaN for fewer than two of them.

    Differences that are all equal give 1 if they are 0, and 0 otherwise: such pairs are not random.
    """
    from scipy.stats import t

    found = estimate(differences)
    if found.count < 2:
        return math.nan
    if found.deviation == 0:
        return 1.0 if found.mean == 0 else 0.0
    statistic = found.mean / found.deviation * math.sqrt(found.count)
    return float(2 * t.sf(abs(statistic), found.count - 1))


def effect_size(differences: Sequence[float]) -> float:
    """Their mean over their standard deviation (Cohen's d_z); NaN where that is not defined."""
    found = estimate(differences)
    if found.count < 2 or (found.deviation == 0 and found.mean == 0):
        return math.nan
    return math.inf * found.mean if found.deviation == 0 else found.mean / found.deviation


def seeds_needed(differences: Sequence[float], num_tests: int = 1) -> int | None:
    """The fewest seeds with which a paired t-test finds their mean in four of five studies.

    Args:
        differences: of pairs; their mean and standard deviation are taken as true.
        num_tests: comparisons that p-values are corrected for. The difference is found at 0.05 / `num_tests`
            (Bonferroni): as Holm's correction finds it if none of the others is there.

    Returns:
        The number; None if it cannot be said, or is more than 10,000.
    """
    level = (1 - CONFIDENCE) / num_tests
    effect = abs(effect_size(differences))
    if math.isnan(effect):
        return None
    if math.isinf(effect):
        return 2
    low, high = 2, _MOST_SEEDS
    if _power(effect, high, level) < _POWER:
        return None
    while low < high:
        middle = (low + high) // 2
        if _power(effect, middle, level) >= _POWER:
            high = middle
        else:
            low = middle + 1
    return low


def _power(effect: float, count: int, level: float) -> float:
    """The chance that a two-sided paired t-test on so many pairs finds an effect of this size at a level."""
    from scipy.stats import nct, t

    critical = float(t.isf(level / 2, count - 1))
    shift = effect * math.sqrt(count)
    if shift > 30:  # far past certainty, where the distribution is slow to work out
        return 1.0
    other_side = float(nct.cdf(-critical, count - 1, shift))  # NaN where it is too small for a number
    return float(nct.sf(critical, count - 1, shift)) + (0.0 if math.isnan(other_side) else other_side)
