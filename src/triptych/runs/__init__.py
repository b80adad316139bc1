"""Runs: a recipe becomes a folder, a folder becomes a translator or a model that continues text."""

from triptych.runs.continuing import copy_checkpoint, goes_on, holds_language_model
from triptych.runs.evaluation import Evaluation, evaluate
from triptych.runs.folder import Run, holds_run
from triptych.runs.generation import (
    OpenedModel,
    fill,
    open_language_model,
    open_text_model,
)
from triptych.runs.training import Summary, resume, train, validate

__all__ = [
    "Evaluation",
    "OpenedModel",
    "Run",
    "Summary",
    "copy_checkpoint",
    "evaluate",
    "fill",
    "goes_on",
    "holds_language_model",
    "holds_run",
    "open_language_model",
    "open_text_model",
    "resume",
    "train",
    "validate",
]
