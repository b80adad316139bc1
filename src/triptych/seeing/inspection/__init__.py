"""Measures of the attention heads of a checkpoint, from its weights alone.

`inspect` reads layer by layer (`inspecting.py`), measures each (`layer_records.py`; `measures.py` says what)
and gives an `Inspection` (`record.py`), which has rows, tables, files and a page.
"""

from triptych.seeing.inspection.inspecting import inspect
from triptych.seeing.inspection.layer_records import InspectedLayer
from triptych.seeing.inspection.measures import MEASURES, Measure
from triptych.seeing.inspection.record import NEAR, Inspection, NearCopy

__all__ = ["MEASURES", "NEAR", "InspectedLayer", "Inspection", "Measure", "NearCopy", "inspect"]
