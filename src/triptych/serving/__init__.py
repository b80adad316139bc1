"""Serving models over HTTP: LibreTranslate's and OpenAI's interfaces, and our own records.

A request becomes a `QueuedJob` and its items (a line, a prompt), which wait in the queue of their
`ServedModel` (`served_models.py`). One `Worker` per model (`worker.py`) decodes them together, and a second
one answers what looks at the model itself. A `Fleet` (`fleet.py`) has all models and the other processes
(`worker_processes.py`); a reload makes a new one. The interfaces are in `translation_api.py`
(LibreTranslate), `completions.py` and `embeddings.py` (OpenAI) and `attention_records.py` (attend, inspect,
steps); the page at `/` is in `translation_page.py`, and what it asks of a model in `exploring.py`. What all
requests share is in `server.py` (limits, figures, reloads), `doors.py` (keys, hosts, origins),
`request_fields.py` (what a body holds), `answers.py` (large answers) and `application.py` (routes, errors).
`logs.py` is the log, `serve.py` the way in; `uvicorn_server.py` runs uvicorn with the connections of
`connections.py`, and reloads at SIGHUP (`hangups.py`). Start with `worker.py`.
"""
