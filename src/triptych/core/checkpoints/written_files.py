"""Files of a model in another form, written a tensor at a time to a temporary folder."""

import shutil
import weakref
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp

from triptych.core.checkpoints.made_files import TOKENIZER, MadeFiles
from triptych.core.storage.shards import write_tensors
from triptych.core.storage.tensors import SAFETENSORS

# Any of these files is a tokenizer, or the largest part of a tokenizer.
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)


class WrittenFiles(MadeFiles, ABC):
    """A model written to a folder as a configuration, a tokenizer and unchanged tensors."""

    @abstractmethod
    def write_beside(self, folder: Path) -> None:
        """Write the configuration and the tokenizer to a folder."""

    @cached_property
    def folder(self) -> Path:
        """Folder of the configuration and the tokenizer; weights are written to it by `fetch`."""
        folder = Path(mkdtemp(prefix="triptych-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.write_beside(folder)
        return folder

    def fetch(self) -> Path:
        """Write the model in the format of `transformers`, once, a tensor at a time; return the folder."""
        target = self.folder / SAFETENSORS
        if not target.exists():
            write_tensors(self.tensors(), target)
        return self.folder


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in a folder; an empty list without a vocabulary."""
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        return []
    return [path for name in TOKENIZER if (path := folder / name).is_file()]
