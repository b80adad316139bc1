"""The tokenizers of a Marian checkpoint: two SentencePiece models over a vocabulary of its own.

One that we wrote may have a tokenizer of ours instead, in `tokenizer.json`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from triptych.checkpoints.marian_settings import MarianSettings, read_tokenizer_settings
from triptych.checkpoints.marian_tokenizer_writing import TARGET_FOLDER
from triptych.checkpoints.sentencepiece import read_sentencepiece
from triptych.errors import DataError
from triptych.storage.tensors import read_json
from triptych.text import SentencePieceRecord, SentencePieceTokenizer, Tokenizer, TokenizerPair


def read_tokenizers(folder: Path, settings: MarianSettings) -> TokenizerPair:
    """The tokenizers of both sides; one, if all of their files say the same.

    They do as `MarianTokenizer` does, but for special tokens that a text spells out: `</s>` in a text is
    text, where `MarianTokenizer` ends the sentence.

    Raises:
        DataError: files that are missing, damaged or contradict each other.
    """
    if (folder / "tokenizer.json").exists() and not (folder / "source.spm").exists():
        return _of_ours(folder, settings)
    path = folder / "tokenizer_config.json"
    found = read_tokenizer_settings(folder)
    tokens = {name: _text(getattr(found, name)) for name in ("unk_token", "eos_token", "pad_token")}
    added = {_text(token) for token in found.added_tokens_decoder.values()}
    if further := sorted(added - set(tokens.values())) or found.additional_special_tokens:
        raise DataError(f"{path}: there are further special tokens, {further[0]!r}: they cannot be read")
    if found.extra_special_tokens or found.sp_model_kwargs:
        raise DataError(f"{path}: extra_special_tokens and sp_model_kwargs cannot be read: leave them out")
    vocab_path = folder / "vocab.json"
    vocab = _vocab(vocab_path, settings.vocab_size, tokens, settings)
    target_vocab = vocab
    if found.separate_vocabs:
        vocab_path = folder / "target_vocab.json"
        target_vocab = _vocab(vocab_path, settings.tgt_vocab_size, tokens, settings)
    elif settings.tgt_vocab_size != settings.vocab_size:
        raise DataError(
            f"{folder}: config.json has vocabularies of {settings.vocab_size} and {settings.tgt_vocab_size}, "
            "but separate_vocabs is not set in tokenizer_config.json"
        )
    source, target = (
        SentencePieceTokenizer(
            SentencePieceRecord(
                pad_id=settings.pad_token_id,
                bos_id=settings.decoder_start_token_id,
                eos_id=settings.eos_token_id,
                unk_id=own.index(tokens["unk_token"]),
                joins_punctuation=bool(found.clean_up_tokenization_spaces),
                vocab=own,
                model=read_sentencepiece(folder / file),
            )
        )
        for own, file in ((vocab, "source.spm"), (target_vocab, "target.spm"))
    )
    if source.to_json() == target.to_json():
        return TokenizerPair(source, source)
    return TokenizerPair(source, target)


def _of_ours(folder: Path, settings: MarianSettings) -> TokenizerPair:
    """Tokenizers that were trained here.

    Raises:
        DataError: damaged, of another make, or not those of `config.json`.
    """
    source = target = Tokenizer.load(folder / "tokenizer.json")
    if (folder / TARGET_FOLDER).is_dir():
        target = Tokenizer.load(folder / TARGET_FOLDER / "tokenizer.json")
    for name, found, wanted in (
        ("vocab_size", source.vocab_size, settings.vocab_size),
        ("decoder_vocab_size", target.vocab_size, settings.tgt_vocab_size),
        ("pad_token_id", target.pad_id, settings.pad_token_id),
        ("eos_token_id", target.eos_id, settings.eos_token_id),
        ("decoder_start_token_id", target.bos_id, settings.decoder_start_token_id),
    ):
        if found != wanted:
            raise DataError(
                f"{folder / 'tokenizer.json'}: {name} is {found} here and {wanted} in config.json: the files "
                "come from different models"
            )
    return TokenizerPair(source, target)


def _vocab(path: Path, size: int, tokens: Mapping[str, str], settings: MarianSettings) -> tuple[str, ...]:
    """The pieces by id.

    Raises:
        DataError: ids other than 0 to size − 1, or special tokens that are not those of `config.json`.
    """
    try:
        record = TypeAdapter(dict[str, int]).validate_python(read_json(path), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path}: {first['loc'][0]!r}: {first['msg']}") from None
    if len(record) != size or sorted(record.values()) != list(range(size)):
        raise DataError(
            f"{path} has {len(record)} pieces and config.json a vocabulary of {size}: "
            f"the ids must be those from 0 to {size - 1}, each once"
        )
    for name, wanted in (
        ("unk_token", None),
        ("eos_token", settings.eos_token_id),
        ("pad_token", settings.pad_token_id),
    ):
        if tokens[name] not in record:
            raise DataError(f"{path} does not have the {name} {tokens[name]!r}")
        if wanted is not None and record[tokens[name]] != wanted:
            raise DataError(
                f"{path} gives the {name} {tokens[name]!r} the id {record[tokens[name]]}, "
                f"config.json {name}_id {wanted}"
            )
    return tuple(sorted(record, key=record.__getitem__))


def _text(token: str | dict[str, Any]) -> str:
    """A token, which may be written with the way it is to be found."""
    return token if isinstance(token, str) else str(token.get("content"))
