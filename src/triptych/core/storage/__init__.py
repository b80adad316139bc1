"""Files of a checkpoint, local or on the Hub: configuration and tensors, for reading and copying.

`Settings` (`settings.py`) evaluates expressions over a configuration. `tensors.py` reads single tensors from
files, `hub.py` from ranges of files over HTTP, and `quantised.py` dequantises them. `copying.py` copies a
folder and `shards.py` a file, with some tensors replaced. Start with `tensors.py`.
"""
