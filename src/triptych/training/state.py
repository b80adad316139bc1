"""What a run needs to go on exactly where it was.

One file, `state/last.safetensors`, holds weights, optimizer moments and random-number states, and
in its header the counters; one file can be replaced at once, so a state is never half old, half new.
Checkpoints to be averaged lie beside it, named in its counters.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from triptych.errors import DataError, TriptychError
from triptych.files import write_bytes
from triptych.models.storage import OwnModel, load_tensors, model_tensors
from triptych.training.optimizers import Optimizer

_LAST = "last.safetensors"
# Writes a model into a file, as those who use it read it.
Publish = Callable[[OwnModel, Path], None]
# Everything that a run writes, by the folder within its own; what has another name is not a run's.
RUN_FILES = {
    ".": (
        "recipe.toml",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.target.json",
        "metrics.jsonl",
        "summary.json",
        "README.md",
    ),
    "state": (
        _LAST,
        "best.safetensors",
        f"checkpoint-{'[0-9]' * 8}.safetensors",
        "diverged.json",
    ),
    "tensorboard": ("events.out.tfevents.*",),
}


@dataclass
class Counters:
    """Where a run stands.

    Attributes:
        step: updates made.
        epoch: passes over the text finished.
        batch: batches of this epoch's plan that have been used.
        tokens: target tokens learned from.
        seconds: training time so far, over all sittings.
        best_by: what the best validation was chosen by, "bleu" or "loss"; empty before the first.
        best_score: of the best validation, higher is better; None before the first.
        best_step: when that was.
        validations_since_best: for early stopping.
        checkpoints: steps of the checkpoints kept for averaging, oldest first.
        window_loss: smoothed loss since the last line of metrics, summed over tokens.
        window_tokens: tokens since then.
        fingerprints: by name, of the texts, the tokenizers, the model and what a validation measures; a
            resumed run must have the same.
        started_in: the folder that the recipe's relative paths are relative to.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_by: Literal["", "bleu", "loss"] = ""
    best_score: float | None = None
    best_step: int = 0
    validations_since_best: int = 0
    checkpoints: list[int] = field(default_factory=list)
    window_loss: float = 0.0
    window_tokens: int = 0
    fingerprints: dict[str, str] = field(default_factory=dict)
    started_in: str = ""


def own_files(folder: Path) -> list[Path]:
    """The files of a folder that have the names of a run's."""
    return [
        path for within, names in RUN_FILES.items() for name in names for path in (folder / within).glob(name)
    ]


_COUNTERS = TypeAdapter(Counters)


def write_state(folder: Path, counters: Counters, model: nn.Module, optimizer: Optimizer) -> None:
    """Save the state, whole or not at all.

    Raises:
        TriptychError: it cannot be written (disk full, say); the state before it is still whole.
    """
    tensors = {f"model.{name}": value for name, value in model_tensors(model).items()}
    tensors |= optimizer.tensors()
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_or_explain(contiguous, folder / _LAST, {"counters": json.dumps(asdict(counters))})


def save_or_explain(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors atomically; a full disk becomes an error that says what is left.

    Raises:
        TriptychError: the file cannot be written; what it held before is still there.
    """
    try:
        write_bytes(path, save(tensors, metadata))
    except OSError as error:
        raise TriptychError(
            f"{path} could not be saved ({error.strerror}); what was saved before is whole: "
            "free some space, then continue with --resume"
        ) from None


def publish_weights(model: OwnModel, path: Path) -> None:
    """Write a model's weights by our names.

    Raises:
        TriptychError: see `save_or_explain`.
    """
    save_or_explain({name: value.cpu() for name, value in model_tensors(model).items()}, path)


def read_counters(folder: Path) -> Counters:
    """Where the saved run stands.

    Raises:
        DataError: there is no state, or it is damaged.
    """
    path = folder / _LAST
    if not path.exists():
        raise DataError(f"{path} is missing: this run saved no state to resume from")
    try:
        with safe_open(path, framework="numpy") as file:  # torch would open it twice, and it may be replaced
            text = file.metadata()["counters"]
            record: Any = json.loads(text)
        known = {item.name for item in fields(Counters)}
        if not isinstance(record, dict) or record.keys() != known:
            raise DataError(f"{path} was written by another release of triptych: it cannot be resumed")
        return _COUNTERS.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{path} is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']}): train again"
        ) from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(f"{path} is damaged ({error}): train again") from None


def read_state(folder: Path, model: nn.Module, optimizer: Optimizer) -> Counters:
    """Put a saved state into model, optimizer and random-number generators.

    Raises:
        DataError: the state is missing, damaged or another model's.
    """
    counters = read_counters(folder)
    try:
        tensors = load_file(folder / _LAST)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{folder / _LAST} is damaged ({error}): train again") from None
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    load_tensors(model, weights, str(folder / _LAST))
    try:
        optimizer.load(tensors)
    except ValueError as error:
        raise DataError(f"{folder / _LAST} is damaged ({error}): train again") from None
    try:
        torch.set_rng_state(tensors["random.cpu"])
    except (KeyError, TypeError, RuntimeError):
        raise DataError(f"{folder / _LAST} is damaged (random.cpu): train again") from None
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return counters


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step:08d}.safetensors"


def average_checkpoints(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of every tensor over several checkpoints, summed in float64.

    Raises:
        DataError: a checkpoint is missing or damaged.
    """
    total: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise DataError(f"checkpoint {path} cannot be read ({error})") from None
        for name, value in tensors.items():
            total[name] = total.get(name, torch.zeros(())) + value.double()
    return {name: (value / len(paths)).float() for name, value in total.items()}
