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
    """A run with its input read and nothing written yet.

    Attributes:
        recipe: every choice made.
        objective: makes it, and draws the weights.
        save_tokenizers: writes them into a folder.
        fingerprints: what a resumed run must find as it was, by the words that name it.
    """

    recipe: AnyRecipe
    objective: Callable[[], Objective[Any, Any]]
    save_tokenizers: Callable[[Path], None]
    fingerprints: Callable[[], dict[str, str]]


def digests(parts: Mapping[str, Sequence[bytes]]) -> dict[str, str]:
    """A hash of each part."""
    return {name: hashlib.sha256(b"\0".join(part)).hexdigest() for name, part in parts.items()}
