"""The face of the package: one model, its layers, its heads.

`load` gives a `Model`. It reads (`layers`, `inspect`, `composition`) and runs (`translate`, `attend`, `run`).
Every change gives a new `Model` that every method takes. A `Model` holds what it opened (`Opened`) and its
`Change`s, and delegates; each capability lives in its own room. Start with `model.py`.
"""

from triptych.face.changes import Change
from triptych.face.composition import Composition
from triptych.face.heads import Head, Layer, Layers, RotaryForm, Stack
from triptych.face.model import Model, load
from triptych.face.run import Activations, Run
from triptych.face.sweep import Sweep

__all__ = [
    "Activations",
    "Change",
    "Composition",
    "Head",
    "Layer",
    "Layers",
    "Model",
    "RotaryForm",
    "Run",
    "Stack",
    "Sweep",
    "load",
]
