"""The files of a checkpoint, local or on the Hub: configuration, tensors, copies.

`Settings` (`settings.py`) reads a configuration with errors that name the field. `tensors.py` and
`shards.py` read tensors by their bytes, `hub.py` by ranges over HTTP, `quantised.py` in other number
formats; `copying.py` writes a folder with some tensors exchanged. `untrusted.py` bounds what a file may
make us do. Start with `tensors.py`.
"""
