"""Models with files in the format of `transformers` made on demand."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from triptych.core.storage.tensors import Tensors

# Files of a tokenizer next to the weights.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)


class WithAndWithout(NamedTuple):
    """A model without and with adapters."""

    names: tuple[str, ...]  # names of the adapters
    base: Tensors
    adapted: Tensors


class MadeFiles(ABC):
    """A model in another form: its files are written to a temporary folder when they are needed."""

    has_tokenizer: bool
    is_in_memory: bool = False  # True if the model does not depend on files
    path: Path | None = None  # file of the model; None for a module in memory

    @abstractmethod
    def require_same(self) -> None:
        """Check that the model is unchanged since it was opened."""

    @abstractmethod
    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Return the tensors under their names in `transformers`."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Folder of the configuration and the tokenizer; weights are written to it by `fetch`."""

    @abstractmethod
    def fetch(self) -> Path:
        """Write the model in the format of `transformers`, once; return the folder."""

    def in_double(self) -> WithAndWithout | None:
        """Return the tensors without and with adapters, in float64; None without adapters."""
        return None
