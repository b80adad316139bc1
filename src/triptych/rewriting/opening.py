"""Open a model to run it: triptych runs every model that it can, and `transformers` the others."""

from pathlib import Path

import torch

from triptych.checkpoints.checkpoint import open_checkpoint
from triptych.errors import DataError, UsageError
from triptych.extras import is_installed
from triptych.models import LanguageModel
from triptych.models.storage import read_own_model
from triptych.opening import Source, find_source, open_model
from triptych.rewriting.own_models import OwnRunnable
from triptych.rewriting.running import RunnableModel
from triptych.rewriting.transformers_models import TransformersModel
from triptych.training.language import TOKENIZER

_NO_TRANSFORMERS = "transformers, which would run it, is not installed: pip install 'triptych[run]'"


def open_runnable(path: Path) -> RunnableModel:
    """Open a model to run it."""
    source = find_source(path)
    if _is_run_by_us_alone(source):
        return _own(source)
    try:
        return _own(source)
    except (DataError, UsageError) as error:
        if not is_installed("transformers"):
            raise UsageError(f"{error}; {_NO_TRANSFORMERS}") from None
    return TransformersModel(path)


def can_run(path: Path) -> str:
    """Why a model cannot be run here; "" if it can."""
    if not path.is_dir():
        return "it is not a folder"
    source = find_source(path)
    if _is_run_by_us_alone(source) or is_installed("transformers"):
        return ""
    try:
        _own(source)
    except (DataError, UsageError) as error:
        return f"{error}; {_NO_TRANSFORMERS}"
    return ""


def _own(source: Source) -> OwnRunnable:
    """A model that triptych runs."""
    if source.is_own and not source.translates and not (source.folder / TOKENIZER).exists():
        model = read_own_model(source.folder)
        assert isinstance(model, LanguageModel), "its configuration says so"
        return OwnRunnable(model, _longest_text(source))
    # Marian's and ours that translate keep the dtype of their files.
    dtype = None if _is_run_by_us_alone(source) else torch.float32
    opened = open_model(source, "cpu", dtype)
    if opened.translates:
        if opened.unsearched is not None:
            raise opened.unsearched
        return OwnRunnable(opened, 0)
    return OwnRunnable(opened, _longest_text(source))


def _longest_text(source: Source) -> int:
    """Tokens of a text that a model of one stack is made for."""
    checkpoint = open_checkpoint(source.path, mapped=True)
    return checkpoint.longest_text(checkpoint.sites[0])


def _is_run_by_us_alone(source: Source) -> bool:
    """Whether a model is one of ours that translates, or a Marian translator, which becomes one."""
    return source.translates and (source.is_own or source.record.get("model_type") == "marian")
