"""Costs of the parameterisations, counted and timed.

`cost` (`counting.py`) counts parameters, FLOPs and cache bytes of a `CostSpec`; `measure_times` (`timing.py`)
runs the layers; `cost_pages.py` makes the page. Start with `counting.py`.
"""

from triptych.seeing.costing.counting import CostReport, CostSpec, cost
from triptych.seeing.costing.timing import TimingReport, measure_times

__all__ = ["CostReport", "CostSpec", "TimingReport", "cost", "measure_times"]
