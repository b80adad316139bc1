"""Measures of the attention heads of a checkpoint, from its weights alone.

`inspect` reads layer by layer (`inspecting.py`), measures each layer (`layer_records.py`; definitions in
`measures.py`) and returns an `Inspection` (`record.py`), with rows, tables, files and a page.
"""

from triptych.seeing.inspection.inspecting import inspect
from triptych.seeing.inspection.layer_records import InspectedLayer
from triptych.seeing.inspection.measures import MEASURES, Measure
from triptych.seeing.inspection.record import NEAR, Inspection, NearCopy

__all__ = ["MEASURES", "NEAR", "InspectedLayer", "Inspection", "Measure", "NearCopy", "inspect"]
