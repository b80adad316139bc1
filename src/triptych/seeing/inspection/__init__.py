"""Measures of the attention heads of a checkpoint, from its weights alone.

`inspect` reads layer by layer (`inspecting.py`), measures each layer (`layer_records.py`; definitions in
`measures.py`) and returns an `Inspection` (`record.py`), with rows, tables, files and a page.
"""

from triptych.seeing.chance import random_spectra as random_spectra
from triptych.seeing.inspection.inspecting import inspect as inspect
from triptych.seeing.inspection.layer_records import InspectedLayer as InspectedLayer
from triptych.seeing.inspection.measures import MEASURES as MEASURES
from triptych.seeing.inspection.measures import Measure as Measure
from triptych.seeing.inspection.record import NEAR as NEAR
from triptych.seeing.inspection.record import Inspection as Inspection
from triptych.seeing.inspection.record import NearCopy as NearCopy
from triptych.seeing.inspection.record import averages as averages
from triptych.seeing.inspection.record import findings as findings
from triptych.seeing.inspection.record import heads_page as heads_page
from triptych.seeing.inspection.record import side_by_side as side_by_side
from triptych.seeing.inspection.record import telling_heads as telling_heads
