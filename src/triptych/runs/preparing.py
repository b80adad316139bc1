"""What a run needs before its first step, whatever it learns."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.models.storage import OwnModel
from triptych.training import AnyRecipe
from triptych.training.objectives import Objective
from triptych.training.state import Publish, publish_weights


@dataclass(frozen=True)
class Prepared:
    """A run whose input has been read, before anything is written.

    Attributes:
        recipe: every choice made.
        objective: makes the objective, and draws the initial weights; those that are read may still be mapped
            from their file.
        begin: writes into a folder what lies there from the start of the run: configuration and tokenizers.
        fingerprints: hashes of what must not change before a run is resumed, by the words that name it.
        publish: writes `model.safetensors`.
    """

    recipe: AnyRecipe
    objective: Callable[[], Objective[Any, Any]]
    begin: Callable[[OwnModel, Path], None]
    fingerprints: Callable[[], dict[str, str]]
    publish: Publish = publish_weights


def digests(parts: Mapping[str, Sequence[bytes]]) -> dict[str, str]:
    """A hash of each part."""
    return {name: hashlib.sha256(b"\0".join(part)).hexdigest() for name, part in parts.items()}
