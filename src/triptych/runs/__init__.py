"""Runs: a recipe becomes a folder (`train`), which can be continued (`resume`) and measured (`validate`)."""

from triptych.runs.continuing import copy_checkpoint, goes_on, holds_language_model
from triptych.runs.folder import holds_run
from triptych.runs.training import Summary, resume, train, validate

__all__ = [
    "Summary",
    "copy_checkpoint",
    "goes_on",
    "holds_language_model",
    "holds_run",
    "resume",
    "train",
    "validate",
]
