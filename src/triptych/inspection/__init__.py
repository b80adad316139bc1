"""Measures of the attention heads of a checkpoint."""

from triptych.inspection.checkpoint import NEAR, Inspection, NearCopy, inspect
from triptych.inspection.layers import InspectedLayer
from triptych.inspection.measures import MEASURES, Measure

__all__ = ["MEASURES", "NEAR", "InspectedLayer", "Inspection", "Measure", "NearCopy", "inspect"]
