"""Medians with their spread, and ratios within a round."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    """What several rounds gave.

    Attributes:
        median: of the samples; `low` and `high` are the smallest and the largest.
        samples: one a round, in their order.
    """

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    @property
    def spread(self) -> float:
        """(high − low) / median."""
        return (self.high - self.low) / self.median if self.median else math.nan

    def record(self) -> dict[str, Any]:
        """For a machine to read."""
        return asdict(self)


def summarise(samples: Sequence[float]) -> Summary:
    """The median of at least one sample, with its range."""
    if not samples:
        raise ValueError("there is no sample to summarise")
    return Summary(statistics.median(samples), min(samples), max(samples), tuple(samples))


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Summary | None:
    """Ours / theirs in the rounds that both took part in; None if there is none.

    What slows the machine for a while slows both sides of a round.
    """
    common = [number for number in ours if number in theirs]
    return summarise([ours[number] / theirs[number] for number in common]) if common else None


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Least-squares slope of log cost over log size: cost ~ size^slope."""
    if len(sizes) < 2:
        raise ValueError(f"a slope needs two points, not {len(sizes)}")
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    return statistics.linear_regression(x, y).slope
