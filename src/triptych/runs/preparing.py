"""What a run needs before its first step, whatever it learns."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.training import AnyRecipe
from triptych.training.objectives import Objective


@dataclass(frozen=True)
class Prepared:
    """A run whose input has been read, before anything is written.

    Attributes:
        recipe: every choice made.
        objective: makes the objective, and draws the initial weights.
        save_tokenizers: writes them into a folder.
        fingerprints: hashes of what must not change before a run is resumed, by the words that name it.
    """

    recipe: AnyRecipe
    objective: Callable[[], Objective[Any, Any]]
    save_tokenizers: Callable[[Path], None]
    fingerprints: Callable[[], dict[str, str]]


def digests(parts: Mapping[str, Sequence[bytes]]) -> dict[str, str]:
    """A hash of each part."""
    return {name: hashlib.sha256(b"\0".join(part)).hexdigest() for name, part in parts.items()}
