"""Serving of models over HTTP: LibreTranslate's and OpenAI's interfaces, and triptych's records.

A request becomes a `QueuedJob` and its items (a line, a prompt), which wait in the queue of their
`ServedModel` (`served_models.py`). One `Worker` per model (`worker.py`) decodes items together; a second
worker answers questions about the model itself. A `Fleet` (`fleet.py`) has all models and the other processes
(`worker_processes.py`); a reload makes a new fleet. The interfaces are in `translation_api.py`
(LibreTranslate; its files are in `text_files.py`), `completions.py` and `embeddings.py` (OpenAI) and
`attention_records.py` (attend, inspect, steps). The page at `/` is in `translation_page.py`, and its
questions to a model in `exploring.py`. Common parts of all requests are in `server.py` (limits, figures,
reloads), `doors.py` (keys, hosts, origins), `request_fields.py` (fields of a body), `answers.py` (large
answers) and `application.py` (routes, errors). `logs.py` is the log, `serve.py` the entry point;
`uvicorn_server.py` runs uvicorn with the connections of `connections.py`, and reloads at SIGHUP
(`hangups.py`). Start with `worker.py`.

Interface: `hangups`, `limits`, `recording`, `serve`.
"""
