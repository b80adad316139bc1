"""The face of the package: one model, its layers, its heads.

`load` gives a `Model`. It holds what it opened (`Opened`) and its `Change`s, and delegates: each capability
lives in its own room. What its weights say is in `reading.py` (`layers`, `inspect`, `composition`), what it
does with texts in `running.py` (`translate`, `attend`, `run`), what changes or writes it in `model.py`. A
change gives a new `Model`. Start with `model.py`.
"""

from triptych.face.model import Model, load, renamed, reopened, require_same_files

__all__ = [
    "Model",
    "load",
    "renamed",
    "reopened",
    "require_same_files",
]
