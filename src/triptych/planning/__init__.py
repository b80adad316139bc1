"""What a run would need on devices that are not here: memory, time, communication."""

from triptych.planning.cluster import Cluster, read_quantity
from triptych.planning.plans import LayoutSettings, Plan, PlannedLayout, plan
from triptych.planning.tables import advice, plan_table, setting

__all__ = [
    "Cluster",
    "LayoutSettings",
    "Plan",
    "PlannedLayout",
    "advice",
    "plan",
    "plan_table",
    "read_quantity",
    "setting",
]
