"""Serving models over HTTP: LibreTranslate's and OpenAI's interfaces, and our own records.

A request becomes a `QueuedJob` and its items (a line, a prompt), which wait in the queue of their
`ServedModel` (`models.py`). One `Worker` per model (`worker.py`) decodes them together, and a second one
answers what looks at the model itself. A `Fleet` (`fleet.py`) has all models and the other processes
(`processes.py`); a reload makes a new one. The interfaces are in `translation.py` (LibreTranslate),
`completions.py` and `embeddings.py` (OpenAI) and `records.py` (attend, inspect, steps); the page at `/` is in
`page.py`, and what it asks of a model in `exploring.py`. What all requests share is in `server.py` (limits,
figures, reloads), `doors.py` (keys, hosts, origins), `fields.py` (what a body holds), `answers.py` (large
answers) and `application.py` (routes, errors). `logs.py` is the log, `serve.py` the way in; `running.py` runs
uvicorn with the connections of `connections.py`, and reloads at SIGHUP (`hangups.py`). Start with
`worker.py`.
"""
