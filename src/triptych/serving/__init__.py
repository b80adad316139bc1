"""Serving models over HTTP: LibreTranslate's and OpenAI's interfaces, and our own records.

`application` makes an ASGI application of models (`models.py`: `ServedModel`). A request becomes a `Job` and
its items (a line, a prompt), which wait in the queue of its model. One `Worker` per model (`worker.py`)
computes the items of equal jobs together. The interfaces are in `translation.py` (LibreTranslate),
`completions.py` (OpenAI) and `records.py` (attend, inspect, steps); what all requests share (keys, limits,
errors, metrics, the log) is in `application.py`. Start with `worker.py`.
"""

from triptych.serving.application import application
from triptych.serving.limits import Limits
from triptych.serving.models import ServedModel
from triptych.serving.running import serve

__all__ = ["Limits", "ServedModel", "application", "serve"]
