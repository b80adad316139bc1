"""The two tokenizers of a translator, and their files."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from triptych.text.byte_level import ByteLevelTokenizer
from triptych.text.sentencepiece_tokenizer import FILE_START, SentencePieceTokenizer
from triptych.text.tokenizers import SentenceTokenizer, read_saved

_SOURCE_FILE = "tokenizer.json"
_TARGET_FILE = "tokenizer.target.json"


def read_sentence_tokenizer(path: Path) -> SentenceTokenizer:
    """Read a translator's tokenizer, as `Tokenizer.save` wrote it."""
    text = read_saved(path)
    if text.startswith(FILE_START):
        return SentencePieceTokenizer.from_json(text, str(path))
    return ByteLevelTokenizer.from_json(text, str(path))


@final
@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of the two sides; the same object twice where the vocabulary is joint."""

    source: SentenceTokenizer
    target: SentenceTokenizer

    @property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.source is self.target

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, and `tokenizer.target.json` where the target has its own."""
        self.source.save(folder / _SOURCE_FILE)
        if self.joint:
            # Left over from an earlier pair, it would be taken for the target's.
            (folder / _TARGET_FILE).unlink(missing_ok=True)
        else:
            self.target.save(folder / _TARGET_FILE)

    @classmethod
    def load(cls, folder: Path) -> "TokenizerPair":
        """Read what `save` wrote."""
        source = read_sentence_tokenizer(folder / _SOURCE_FILE)
        if not (folder / _TARGET_FILE).exists():
            return cls(source, source)
        return cls(source, read_sentence_tokenizer(folder / _TARGET_FILE))
