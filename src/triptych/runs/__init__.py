"""Runs: a recipe becomes a folder, a folder becomes a translator."""

from triptych.runs.folder import Run, holds_run, load
from triptych.runs.training import Summary, resume, train

__all__ = ["Run", "Summary", "holds_run", "load", "resume", "train"]
