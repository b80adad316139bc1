"""Language models that continue, score and fill in text: of a run, a checkpoint or the Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from triptych.checkpoints.models import load_language_model
from triptych.checkpoints.own import is_own
from triptych.decoding import Filling, fill_masks
from triptych.errors import DataError
from triptych.models import LanguageModel
from triptych.models.device import find_device
from triptych.models.storage import read_own_model
from triptych.runs.folder import settings
from triptych.runs.language import TOKENIZER
from triptych.storage.untrusted import read_json
from triptych.text import Tokenizer, load_tokenizer, read_tokenizer


class OpenedModel(NamedTuple):
    """A language model with its tokenizer.

    Attributes:
        model: in evaluation mode.
        tokenizer: fits the model's embedding.
        end_ids: tokens that end a text, as the checkpoint's configuration has them.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]


def open_text_model(path: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> OpenedModel:
    """The language model of a run, of a folder in Hugging Face's format, or of a repository on the Hub.

    Args:
        path: the folder or the id.
        device: where the model goes; "auto" takes a GPU if there is one.
        dtype: of its numbers; the one that most of the file's have if None.

    Raises:
        UsageError: no such device.
        DataError: files missing or damaged, or a family that cannot be run.
    """
    if Path(path).is_dir() and is_own(settings(Path(path))):
        opened = open_language_model(path, device)
        return opened if dtype is None else opened._replace(model=opened.model.to(dtype))
    loaded = load_language_model(path, find_device(device), dtype)
    tokenizer = load_tokenizer(loaded.folder, vocab_size=loaded.model.vocab_size)
    return OpenedModel(loaded.model, tokenizer, _end_ids(loaded.folder, loaded.config))


def open_language_model(path: str | Path, device: str = "auto") -> OpenedModel:
    """The language model of a run of ours.

    Raises:
        UsageError: no such device.
        DataError: files missing or damaged, files of different runs, or a run that translates.
    """
    folder = Path(path)
    model = read_own_model(folder)
    if not isinstance(model, LanguageModel):
        raise DataError(f"{folder} translates: it has no language model; see triptych translate")
    tokenizer = read_tokenizer(folder / TOKENIZER)
    if tokenizer.vocab_size != model.vocab_size:
        raise DataError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model {model.vocab_size:,}: "
            "the files come from different runs"
        )
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return OpenedModel(model.to(find_device(device)), tokenizer, ends)


def fill(
    path: str | Path, text: str, count: int = 5, device: str = "auto", *, max_tokens: int | None = None
) -> list[list[Filling]]:
    """The most probable tokens for every mask of a text; see `triptych.decoding.fill_masks`.

    Args:
        path: a run folder, a folder in Hugging Face's format, or a name on the Hub.
        text: with at least one `[MASK]`.
        count: tokens for each mask.
        device: where the model goes; "auto" takes a GPU if there is one.
        max_tokens: longest text; see `triptych.decoding.fill_masks`.

    Raises:
        UsageError: no such device, a text that is too long or has no mask, or a model that predicts no masked
            tokens.
        DataError: files missing or damaged, or a family that cannot be run.
    """
    model, tokenizer, _ = open_text_model(path, device)
    return fill_masks(model, tokenizer, text, count, max_tokens)


def _end_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """What `generation_config.json`, or else `config.json`, says of the end of a text."""
    path = folder / "generation_config.json"
    for record in (read_json(path) if path.exists() else {}, config):
        match record.get("eos_token_id"):
            case int(one):
                return (one,)
            case list(several):
                return tuple(token for token in several if isinstance(token, int))
    return ()
