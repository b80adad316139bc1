"""Marian's pieces by sentencepiece itself, which is faster than the tokenizer of transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import final

import sentencepiece


@final
class Pieces:
    """The two sides of a Marian checkpoint."""

    end = "</s>"

    def __init__(self, folder: Path) -> None:
        self.source = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
        self.target = sentencepiece.SentencePieceProcessor(model_file=str(folder / "target.spm"))
        self.ids: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        self.names = {number: piece for piece, number in self.ids.items()}

    def split(self, line: str) -> list[str]:
        """A source line as pieces, the end of sentence last."""
        return [*self.source.encode(line, out_type=str), self.end]

    def encode(self, line: str) -> list[int]:
        """The same as ids."""
        unknown = self.ids["<unk>"]
        return [self.ids.get(piece, unknown) for piece in self.split(line)]

    def join(self, pieces: Sequence[str]) -> str:
        """Target pieces, without special ones, as text."""
        return str(self.target.decode(list(pieces)))
