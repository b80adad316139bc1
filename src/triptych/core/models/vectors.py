"""Pretrained word vectors as initial values of an embedding table."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triptych.errors import DataError
from triptych.untrusted import require_regular


@final
class WordVectors:
    """The word vectors of a file for the tokens of a vocabulary."""

    def __init__(self, path: Path, pieces: Sequence[str | None], width: int) -> None:
        """Store path and readable pieces of tokens (None for special tokens); the file is read later."""
        self.path = path
        self._width = width
        self._words = [
            None if piece is None else piece.strip("▁ ") or None for piece in pieces
        ]

    def into(self, drawn: Tensor) -> Tensor:
        """Return the table: vectors rescaled to the size of the drawn values, and drawn values elsewhere."""
        rows, found = self._read
        rows = rows.to(drawn)
        found = found.to(drawn.device)
        size = rows[found].square().mean().sqrt()
        scaled = rows * (drawn.detach().square().mean().sqrt() / size.clamp(min=1e-12))
        return torch.where(found[:, None], scaled, drawn.detach())

    def describe(self) -> str:
        return f"{self.path}: vectors of {int(self._read[1].sum()):,} of {len(self._words):,} tokens"

    @cached_property
    def _read(self) -> tuple[Tensor, Tensor]:
        """Vectors of the file, `[tokens, width]`, and the mask `[tokens]` of tokens with a vector."""
        # Words are looked up by their text, then in lower case.
        try:
            require_regular(self.path)
            if self.path.suffix == ".safetensors":
                return self._read_safetensors(), torch.ones(
                    len(self._words), dtype=torch.bool
                )
            by_word = dict(self._read_text())
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{self.path}: the vectors cannot be read ({error})"
            ) from None
        rows = torch.zeros(len(self._words), self._width)
        found = []
        for row, word in zip(rows, self._words, strict=True):
            vector = (
                None if word is None else by_word.get(word, by_word.get(word.lower()))
            )
            found.append(vector is not None)
            if vector is not None:
                row.copy_(vector)
        if not any(found):
            raise DataError(f"{self.path} has a vector for no token of the vocabulary")
        return rows, torch.tensor(found)

    def _read_safetensors(self) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            names = list(file.keys())
            shape = file.get_slice(names[0]).get_shape() if len(names) == 1 else []
            if shape != [len(self._words), self._width]:
                raise DataError(
                    f"{self.path}: one tensor [{len(self._words)}, {self._width}] is needed, a row for each "
                    f"token, and it has {shape or f'{len(names)} tensors'}"
                )
            return file.get_tensor(names[0]).float()  # type: ignore[no-any-return]

    def _read_text(self) -> Iterator[tuple[str, Tensor]]:
        """Yield words of the vocabulary with their vectors."""
        wanted = {
            *chain.from_iterable((word, word.lower()) for word in self._words if word)
        }
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                parts = line.rstrip().split(" ")
                if number == 1 and len(parts) == 2:
                    continue  # header of word2vec: number of words, width
                text = " ".join(parts[: -self._width])
                if not text or (number <= 2 and len(parts) != self._width + 1):
                    raise DataError(
                        f"{self.path}, line {number}: a vector of {len(parts) - 1} numbers, and the "
                        f"embeddings are {self._width} wide (model.d_model)"
                    )
                if text not in wanted:
                    continue
                try:
                    vector = [float(part) for part in parts[-self._width :]]
                except ValueError:
                    vector = [math.nan]
                if not all(map(math.isfinite, vector)):
                    raise DataError(
                        f"{self.path}, line {number}: not {self._width} finite numbers"
                    )
                yield text, torch.tensor(vector)
