"""Run folders made by training; `running/opening/run_folder.py` lists their files."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.core.checkpoints.source import is_own_config
from triptych.core.models import AnyModel
from triptych.core.models.vectors import WordVectors
from triptych.errors import DataError, UsageError
from triptych.running.opening import (
    DECODING,
    RECIPE,
)
from triptych.running.text import Tokenizer
from triptych.training.metrics import read_metrics as read_metrics
from triptych.training.objectives import Objective
from triptych.training.recipe import AnyRecipe
from triptych.training.state import (
    RUN_FILES,
    Publish,
    publish_weights,
)
from triptych.training.state import own_files as own_files
from triptych.untrusted import read_json

SUMMARY = "summary.json"


def holds_run(folder: Path) -> bool:
    """Return True if a folder has a recipe and a configuration, triptych's or a checkpoint's."""
    return (folder / RECIPE).exists() and (
        is_own_config(record := settings(folder)) or "model_type" in record
    )


def require_place(folder: Path, *, force: bool) -> None:
    """Raise an error unless a run can be made in a folder without loss of files."""
    # With `force`, other files may stay, but not a run, a converted model, or a folder with a file's name.
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a folder for the run (--out)")
    if holds_run(folder):
        raise UsageError(
            f"{folder} already has a run: continue it (--resume {folder}) or give another folder (--out)"
        )
    if (folder / DECODING).exists() and is_own_config(settings(folder)):
        raise UsageError(f"{folder} has a converted model: give another folder (--out)")
    found = sorted(path.name for path in folder.iterdir())
    if found and not force:
        shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise UsageError(
            f"{folder} holds other files ({shown}): name a folder that is new or empty (--out); triptych "
            "train --force puts the run among them, and replaces those with the name of a run's file"
        )
    for name in RUN_FILES:
        place = folder / name
        if (
            name != "."
            and place.exists()
            and not (place.is_dir() and not any(place.iterdir()))
        ):
            raise UsageError(f"{place} is in the way: give another folder (--out)")
    if taken := [path for path in own_files(folder) if path.is_dir()]:
        raise UsageError(
            f"{taken[0]} is a folder, where a run needs a file: give another folder (--out)"
        )


def settings(folder: Path) -> dict[str, Any]:
    """Read a folder's `config.json`; empty if the file is missing or invalid."""
    try:
        return read_json(folder / "config.json")
    except DataError:
        return {}


@dataclass(frozen=True)
class Prepared:
    """Inputs of a run, before a file is written."""

    recipe: AnyRecipe  # recipe with every choice made
    # Makes the objective, and draws or reads the initial weights; weights of a checkpoint may be mapped from
    # its file.
    objective: Callable[[], Objective[Any, Any]]
    # Writes the first files of the run into a folder: configuration, and tokenizers or checkpoint.
    begin: Callable[[AnyModel, Path], None]
    # Hashes of the inputs required unchanged on resuming, by their description.
    fingerprints: Callable[[], dict[str, str]]
    publish: Publish = publish_weights  # writes `model.safetensors`
    # Initial word vectors by parameter name.
    vectors: Mapping[str, WordVectors] = field(default_factory=dict)
    from_checkpoint: bool = (
        False  # True if the weights are a checkpoint's, mapped from its file
    )


def word_vectors(
    base: Path, path: str, tokenizer: Tokenizer, width: int
) -> WordVectors:
    """Return the word vectors of a recipe's file for the tokens of a tokenizer."""
    special = tokenizer.special_ids
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    words = [None if token in special else piece for token, piece in enumerate(pieces)]
    return WordVectors(base / path, words, width)


def hash_parts(parts: Mapping[str, Sequence[bytes]]) -> dict[str, str]:
    """Return the SHA-256 of each part."""
    return {
        name: hashlib.sha256(b"\0".join(part)).hexdigest()
        for name, part in parts.items()
    }
