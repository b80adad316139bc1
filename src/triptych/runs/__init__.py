"""Runs: a recipe becomes a folder, a folder becomes a translator."""

from triptych.runs.evaluation import Evaluation, evaluate
from triptych.runs.folder import Run, holds_run
from triptych.runs.training import Summary, resume, train

__all__ = ["Evaluation", "Run", "Summary", "evaluate", "holds_run", "resume", "train"]
