"""Costs of the parameterisations, counted and timed."""

from triptych.costing.counting import CostReport, CostSpec, cost
from triptych.costing.timing import TimingReport, measure_times

__all__ = ["CostReport", "CostSpec", "TimingReport", "cost", "measure_times"]
