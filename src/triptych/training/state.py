"""State of a run, from which training resumes exactly.

One process writes one file, `state/last.safetensors`: weights, optimizer moments and random-number states,
with the counters in its header. A file is replaced atomically, so a state is never half old, half new.
Several processes write a folder of shards, `state/saved-NNNNNNNN/`, and then its marker `complete.json`
(`sharded_state.py`). Checkpoints for averaging lie next to the state; its counters list their steps.
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

from triptych.core.models import (
    AnyModel,
    load_tensors,
    model_tensors,
)
from triptych.errors import DataError, TriptychError
from triptych.files import sync, write_bytes, write_json
from triptych.training.optimizers import Optimizer
from triptych.untrusted import LONGEST_JSON, read_limited, require_regular

_LAST = "last.safetensors"
_MARKER = "complete.json"
_MARKER_FORMAT = 1
# Writes a model into a file in its published format.
Publish = Callable[[AnyModel, Path], None]
# Names of all files of a run, by subfolder of the run folder; other files are not the run's.
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
        f"saved-{'[0-9]' * 8}/*",
        "diverged.json",
    ),
    "tensorboard": ("events.out.tfevents.*",),
    "logs": ("rank-*.log",),
}


@dataclass
class Counters:
    """Progress of a run."""

    step: int = 0  # number of updates
    epoch: int = 0  # number of finished epochs
    batch: int = 0  # batches of this epoch's plan used so far
    tokens: int = 0  # target tokens so far
    seconds: float = 0.0  # training time so far, over all starts of the run
    # Metric of the best validation; empty before the first validation.
    best_by: Literal["", "bleu", "chrf", "loss"] = ""
    best_score: float | None = (
        None  # score of the best validation, higher is better; None before the first
    )
    best_step: int = 0  # step of the best validation
    validations_since_best: int = 0  # count for early stopping
    # Steps of the checkpoints kept for averaging, oldest first.
    checkpoints: list[int] = field(default_factory=list)
    window_loss: float = (
        0.0  # smoothed loss since the last line of metrics, summed over tokens
    )
    window_tokens: int = 0  # target tokens since the last line of metrics
    # Hashes by name: texts, tokenizers, model and settings of the validation. They must be the same when the
    # run resumes.
    fingerprints: dict[str, str] = field(default_factory=dict)
    started_in: str = ""  # base folder of the recipe's relative paths


def own_files(folder: Path) -> list[Path]:
    """Return the files of a folder with names of a run's files."""
    found = list[Path]()
    for within, names in RUN_FILES.items():
        for name in names:
            found += (folder / within).glob(name)
    return found


_COUNTERS = TypeAdapter(Counters)


def write_state(folder: Path, counters: Counters, tensors: dict[str, Tensor]) -> None:
    """Save tensors, counters and the states of the random-number generators atomically."""
    random = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["random.cuda"] = torch.cuda.get_rng_state()
    save_or_explain(
        {**tensors, **random},
        folder / _LAST,
        {"counters": json.dumps(asdict(counters))},
    )


def save_or_explain(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors atomically; raise an error with advice if the disk is full."""
    try:
        write_bytes(path, save(tensors, metadata))
    except OSError as error:
        raise TriptychError(
            f"{path} could not be saved ({error.strerror}); what was saved before is whole: "
            "free some space, then resume the run"
        ) from None


def publish_weights(model: AnyModel, path: Path) -> None:
    """Write a model's weights under triptych's tensor names."""
    save_or_explain(
        {name: value.cpu() for name, value in model_tensors(model).items()}, path
    )


def read_counters(folder: Path) -> Counters:
    """Read the counters of the newest state."""
    path = find_state(folder)
    if path is None:
        raise DataError(
            f"{folder / _LAST} is missing: there is no state to resume from; train again"
        )
    return _counters_of(path)


def _counters_of(path: Path) -> Counters:
    try:
        if path.is_dir():
            text = json.dumps((read_marker(path) or {})["counters"])
        else:
            require_regular(path)
            # torch would open the file twice, and it may be replaced in between.
            with safe_open(path, framework="numpy") as file:
                text = file.metadata()["counters"]
        record: Any = json.loads(text)
        known = {item.name for item in fields(Counters)}
        if not isinstance(record, dict) or record.keys() != known:
            raise DataError(
                f"{path} was written by another release of triptych: train again"
            )
        return _COUNTERS.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{path} is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']}): train again"
        ) from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(f"{path} is damaged ({error}): train again") from None


def find_state(folder: Path) -> Path | None:
    """Return the newest complete state of a run, a file or a folder of shards; None if it is missing."""
    last = folder / _LAST
    shards = complete_states(folder)
    if not shards:
        return last if last.exists() else None
    # Both exist only if one process resumed from shards: a complete state in shards removes the file.
    if last.exists() and _counters_of(last).step >= _counters_of(shards[-1]).step:
        return last
    return shards[-1]


def shards_folder(folder: Path, number: int) -> Path:
    """Return the folder of shards of a state."""
    return folder / f"saved-{number:08d}"


def complete_states(folder: Path) -> list[Path]:
    """Return the folders of shards with a marker, oldest first."""
    return sorted(path for path in folder.glob("saved-*") if (path / _MARKER).exists())


def read_marker(path: Path) -> dict[str, Any] | None:
    """Read the marker of a folder of shards, and check the shards' sizes; None if the marker is missing."""
    marker = path / _MARKER
    if not marker.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(read_limited(marker, LONGEST_JSON))
        form = record["format"]
        files = dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{marker} is damaged ({error}): remove {path} to resume from the state before"
        ) from None
    if form != _MARKER_FORMAT:
        raise DataError(
            f"{marker} has format {form}, this triptych reads {_MARKER_FORMAT}: train again"
        )
    # A missing or short shard is an error here, before its tensors are read.
    for name, size in files.items():
        shard = path / Path(name).name
        found = shard.stat().st_size if shard.exists() else None
        if found != size:
            state = (
                "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
            )
            raise DataError(
                f"{shard} {state}: put the shard back, or remove {path} to resume from the state before"
            )
    return record


def write_marker(path: Path, counters: dict[str, Any], num_ranks: int) -> None:
    """Flush the shards of a folder to the disk, and mark the folder as complete."""
    shards = sorted(path.glob("*.safetensors"))
    for shard in shards:
        sync(shard)
    files = {shard.name: shard.stat().st_size for shard in shards}
    record = {
        "format": _MARKER_FORMAT,
        "ranks": num_ranks,
        "files": files,
        "counters": counters,
    }
    write_json(path / _MARKER, record)


def read_state(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    place: Callable[[Tensor, Tensor], Tensor] = lambda parameter, whole: whole,
) -> Counters:
    """Load a saved state into model, optimizer and random-number generators; returns the counters.

    `place` converts a whole tensor to the layout of a parameter.
    """
    path = folder / _LAST
    counters = _counters_of(path)
    try:
        require_regular(path)
        tensors = load_file(path)
        # One file has weights, moments and random states, distinguished by prefixes.
        weights = {
            k.removeprefix("model."): v
            for k, v in tensors.items()
            if k.startswith("model.")
        }
        load_tensors(model, weights, str(path), place)
        optimizer.load(tensors, place)
        torch.set_rng_state(tensors["random.cpu"])
    except (
        SafetensorError,
        KeyError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise DataError(f"{path} is damaged ({error}): train again") from None
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return counters


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step:08d}.safetensors"


def average_checkpoints(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Return the mean of every tensor over several checkpoints, summed in float64."""
    total: dict[str, Tensor] = {}
    for path in paths:
        try:
            require_regular(path)
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"checkpoint {path} cannot be read ({error}): train again"
            ) from None
        for name, value in tensors.items():
            total[name] = total.get(name, torch.zeros(())) + value.double()
    return {name: (value / len(paths)).float() for name, value in total.items()}
