"""Counted costs of the parameterisations.

`cost` (`counting.py`) counts parameters, FLOPs and cache bytes of a `CostSpec`; `cost_pages.py` makes the
page. Start with `counting.py`.
"""

from triptych.seeing.costing.counting import CostReport, CostSpec, cost

__all__ = ["CostReport", "CostSpec", "cost"]
