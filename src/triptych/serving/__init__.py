"""Serving models over HTTP: LibreTranslate's and OpenAI's interfaces, and our own records.

A request becomes a `QueuedJob` and its items (a line, a prompt), which wait in the queue of their
`ServedModel` (`models.py`). One `Worker` per model (`worker.py`) decodes them together. The interfaces are in
`translation.py` (LibreTranslate), `completions.py` and `embeddings.py` (OpenAI) and `records.py` (attend,
inspect, steps); the page at `/` is in `page.py`, and what it asks of a model in `exploring.py`. What all
requests share is in `server.py` (limits, keys, figures), `fields.py` (what a body holds) and `application.py`
(routes, errors, the log). `serve.py` is the way in, `running.py` runs uvicorn. Start with `worker.py`.
"""
