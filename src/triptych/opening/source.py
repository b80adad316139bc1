"""What a source of a model is: a run of ours, a checkpoint of another library, here or on the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from triptych.checkpoints.own import is_own
from triptych.errors import DataError
from triptych.storage.hub import download_checkpoint, is_hub_id
from triptych.storage.untrusted import read_json


@final
@dataclass(frozen=True)
class Source:
    """A model's files.

    Attributes:
        name: as it was given.
        path: the folder, or a tensor file beside its `config.json`.
        record: what `config.json` says.
    """

    name: str
    path: Path
    record: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def is_own(self) -> bool:
        """Whether the model is in our own format: a run's, or a converted one."""
        return is_own(self.record)

    @property
    def translates(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        if self.is_own:
            return self.record.get("model_type") != "triptych"  # which models of one stack have
        return self.record.get("model_type") == "marian" or self.record.get("is_encoder_decoder") is True


def is_on_hub(source: str | Path) -> bool:
    """Whether a name stands for a repository of the Hub: a path of that name comes first."""
    return not Path(source).exists() and is_hub_id(str(source))


def find_source(source: str | Path) -> Source:
    """What is at a path, or has a name on the Hub, from where it is fetched whole."""
    name = str(source)
    path = download_checkpoint(name) if is_on_hub(source) else Path(source)
    if not path.exists():
        raise DataError(f"{name}: there is no such file or folder, and it is no name on the Hub (owner/name)")
    config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.exists():
        raise DataError(
            f"{path} is not a run folder, nor one in Hugging Face's format: it has no config.json"
        )
    return Source(name, path, read_json(config))
