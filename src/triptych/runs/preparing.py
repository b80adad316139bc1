"""What a run needs before its first step, whatever it learns."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.models.storage import OwnModel
from triptych.models.vectors import WordVectors
from triptych.text import Tokenizer
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
        vectors: by parameter, the word vectors that it begins with.
    """

    recipe: AnyRecipe
    objective: Callable[[], Objective[Any, Any]]
    begin: Callable[[OwnModel, Path], None]
    fingerprints: Callable[[], dict[str, str]]
    publish: Publish = publish_weights
    vectors: Mapping[str, WordVectors] = field(default_factory=dict)


def word_vectors(base: Path, path: str, tokenizer: Tokenizer, width: int) -> WordVectors:
    """The vectors of a recipe's file for the tokens of a tokenizer."""
    ids = range(tokenizer.vocab_size)
    special = tokenizer.special_ids
    pieces = [None if token in special else tokenizer.pieces([token])[0] for token in ids]
    return WordVectors(base / path, pieces, width)


def digests(parts: Mapping[str, Sequence[bytes]]) -> dict[str, str]:
    """A hash of each part."""
    return {name: hashlib.sha256(b"\0".join(part)).hexdigest() for name, part in parts.items()}
