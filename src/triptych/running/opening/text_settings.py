"""The settings of a model for texts, read without its weights: tokenizers and generation settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from triptych.core.checkpoints.made_files import MadeFiles
from triptych.core.checkpoints.source import Source
from triptych.errors import DataError, TriptychError
from triptych.files import file_hash
from triptych.running.opening.generation_config import (
    FILE,
    GenerationConfig,
    begin_id,
    effective_settings,
    end_ids,
)
from triptych.running.opening.marian_tokenizers import MarianIds, read_tokenizers
from triptych.running.opening.run_folder import TOKENIZER, read_decoding
from triptych.running.text.pretrained import (
    TOKENIZER_FILES,
    load_tokenizer,
    read_tokenizer,
)
from triptych.running.text.sentence_tokenizers import TokenizerPair
from triptych.running.text.tokenizers import Tokenizer
from triptych.running.text.vocabularies import VOCABULARIES
from triptych.untrusted import read_json, validated

# A folder has a tokenizer if it has one of these.
_VOCABULARIES = (TOKENIZER, "source.spm", *VOCABULARIES)
# Files of tokenizers in any format; the Hub is asked for them one by one.
_OF_TOKENIZERS = (*TOKENIZER_FILES, "source.spm", "target.spm", "target_vocab.json")


@final
@dataclass(frozen=True)
class TextSettings:
    """Tokenizers and generation settings of a model.

    Attributes:
        tokenizers: tokenizers by their use: "tokenizer", or "source tokenizer" and "target tokenizer" of a
            translator with two; empty without a tokenizer.
        files: hashes of the tokenizer's files, by name.
        unreadable: reason why a tokenizer cannot be read; "" without a reason.
        generation: settings of generation with an effect, by name; empty if no file has any.
        generation_in: file of the settings of generation.
    """

    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    unreadable: str = ""
    generation: Mapping[str, Any] = field(default_factory=dict)
    generation_in: str = ""


def read_text_settings(source: Source) -> TextSettings:
    """Read the tokenizers and the generation settings of a model, without its weights."""
    if source.module is not None:
        return _of_tokenizer(source.tokenizer)
    folder = _folder(source)
    if folder is None:
        return _of_tokenizer(source.tokenizer)
    if source.is_own:
        return _of_run(source, folder)
    tokenizers, why = _read(source, folder)
    settings = _generation(source, folder, tokenizers)
    return TextSettings(tokenizers, _hashes(folder), why, settings, FILE)


def _hashes(folder: Path) -> dict[str, str]:
    paths = [folder / name for name in _OF_TOKENIZERS]
    return {path.name: file_hash(path) for path in paths if path.is_file()}


def _folder(source: Source) -> Path | None:
    """Return the folder of the settings; None without such files."""
    found = [source.file(name) for name in (*_OF_TOKENIZERS, FILE)]
    return next((path.parent for path in found if path is not None), None)


def _of_tokenizer(folder: Path | None) -> TextSettings:
    if folder is None:
        return TextSettings()
    try:
        return TextSettings({"tokenizer": load_tokenizer(folder)})
    except DataError as error:
        return TextSettings(unreadable=str(error))


def _of_run(source: Source, folder: Path) -> TextSettings:
    """Read the files of a run or of a converted model of this library."""
    if not (folder / TOKENIZER).exists():
        return TextSettings()
    try:
        if not source.translates:
            return TextSettings({"tokenizer": read_tokenizer(folder / TOKENIZER)})
        pair = TokenizerPair.load(folder)
        decoding = read_decoding(folder, pair)
    except DataError as error:
        return TextSettings(unreadable=str(error))
    return TextSettings(
        _of_pair(pair), generation=decoding.model_dump(), generation_in="recipe.toml"
    )


def _of_pair(pair: TokenizerPair) -> dict[str, Tokenizer]:
    if pair.joint:
        return {"tokenizer": pair.source}
    return {"source tokenizer": pair.source, "target tokenizer": pair.target}


def _read(source: Source, folder: Path) -> tuple[dict[str, Tokenizer], str]:
    """Read the tokenizers of a checkpoint of another library."""
    folder = folder if source.tokenizer is None else source.tokenizer
    made = source.found
    if isinstance(made, MadeFiles) and not made.has_tokenizer and not source.tokenizer:
        return {}, ""
    is_marian = source.record.get("model_type") == "marian"
    if not any((folder / name).exists() for name in _VOCABULARIES):
        return {}, ""
    try:
        if is_marian and source.tokenizer is None:
            path = folder / "config.json"
            ids = validated(MarianIds, read_json(path), path)
            return _of_pair(read_tokenizers(folder, ids)), ""
        return {"tokenizer": load_tokenizer(folder)}, ""
    except TriptychError as error:
        return {}, str(error)


def _generation(
    source: Source, folder: Path, tokenizers: Mapping[str, Tokenizer]
) -> dict[str, Any]:
    """Return the settings of generation, with the tokens that texts begin and end with."""
    path = folder / FILE
    found = effective_settings(read_json(path) if path.exists() else {})
    try:
        generation = GenerationConfig.read(folder)
    except DataError:  # a damaged end token: compared as stored
        return found
    record = source.record
    ends = end_ids(generation, record, tokenizers.get("tokenizer"))
    named = {
        "eos_token_id": sorted({*ends}) or None,
        "bos_token_id": begin_id(generation, record),
        "decoder_start_token_id": found.get(
            "decoder_start_token_id", record.get("decoder_start_token_id")
        ),
    }
    return {
        **found,
        **{name: value for name, value in named.items() if value is not None},
    }
