"""Open a model to run it: triptych runs every model that it can, and `transformers` the others."""

from pathlib import Path

from triptych.checkpoints.own import is_own
from triptych.errors import DataError, UsageError
from triptych.extras import is_installed
from triptych.rewriting.own_models import LanguageRunnable, TranslatorRunnable
from triptych.rewriting.running import RunnableModel
from triptych.rewriting.transformers_models import TransformersModel
from triptych.storage.untrusted import read_json

_NO_TRANSFORMERS = "transformers, which would run it, is not installed: pip install 'triptych[run]'"


def open_model(path: Path) -> RunnableModel:
    """Open a model to run it.

    Raises:
        UsageError: we cannot run it, and `transformers` is not installed or has no such model.
    """
    if _is_run_by_us(path):
        return TranslatorRunnable(path)
    try:
        return _kind_of(path)(path)
    except (DataError, UsageError) as error:
        if not is_installed("transformers"):
            raise UsageError(f"{error}; {_NO_TRANSFORMERS}") from None
    return TransformersModel(path)


def can_run(path: Path) -> str:
    """Why a model cannot be run here; "" if it can."""
    if not path.is_dir():
        return "it is not a folder"
    if _is_run_by_us(path) or is_installed("transformers"):
        return ""
    try:
        _kind_of(path)(path)
    except (DataError, UsageError) as error:
        return f"{error}; {_NO_TRANSFORMERS}"
    return ""


def _kind_of(path: Path) -> type[LanguageRunnable] | type[TranslatorRunnable]:
    """What a checkpoint of others would be run as."""
    says = read_json(path / "config.json").get("is_encoder_decoder")
    return TranslatorRunnable if says is True else LanguageRunnable


def _is_run_by_us(path: Path) -> bool:
    """Whether a model is one of ours that translates, or a Marian translator, which becomes one."""
    record = read_json(path / "config.json")
    if is_own(record):
        return record.get("model_type") != "triptych"  # which language models have
    return record.get("model_type") == "marian"
