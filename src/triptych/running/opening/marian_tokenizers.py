"""Reading and writing the tokenizers of a Marian checkpoint.

`MarianTokenizer` has two SentencePiece models (`source.spm`, `target.spm`) and a separate vocabulary
(`vocab.json`). Tokenizers trained by triptych are byte-level. A checkpoint written by triptych has them in
`tokenizer.json`, readable by `AutoTokenizer`, and a separate target tokenizer in a subfolder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers as hf
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from tokenizers import processors

from triptych.errors import DataError, UsageError
from triptych.files import write_json
from triptych.running.text.sentence_tokenizers import (
    SPECIAL_TOKENS,
    ByteLevelTokenizer,
    SentencePieceRecord,
    SentencePieceTokenizer,
    TokenizerPair,
    read_sentence_tokenizer,
)
from triptych.running.text.sentencepiece import load_sentencepiece
from triptych.running.text.tokenizers import SentenceTokenizer
from triptych.untrusted import LONGEST_TOKENIZER, read_json, read_limited, validated

TARGET_FOLDER = "target_tokenizer"


class MarianIds(BaseModel):
    """The vocabulary sizes and special token ids in `config.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    vocab_size: int = Field(ge=1)
    decoder_vocab_size: int | None = Field(None, ge=1)
    pad_token_id: int = Field(ge=0)
    eos_token_id: int = Field(ge=0)
    decoder_start_token_id: int = Field(ge=0)
    share_encoder_decoder_embeddings: bool = True

    @property
    def tgt_vocab_size(self) -> int:
        own = None if self.share_encoder_decoder_embeddings else self.decoder_vocab_size
        return self.vocab_size if own is None else own


class _TokenizerFiles(BaseModel):
    """The settings used from `tokenizer_config.json` and `special_tokens_map.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    unk_token: str | dict[str, Any] = "<unk>"
    eos_token: str | dict[str, Any] = "</s>"
    pad_token: str | dict[str, Any] = "<pad>"
    separate_vocabs: bool = False
    model_max_length: int | float | None = Field(None, ge=2)
    clean_up_tokenization_spaces: bool | None = None
    sp_model_kwargs: dict[str, Any] | None = None
    additional_special_tokens: list[Any] | None = None
    extra_special_tokens: list[Any] | dict[str, Any] | None = None
    added_tokens_decoder: dict[str, dict[str, Any]] = {}


def longest_source(folder: Path) -> int | float | None:
    """Return the tokenizer's maximum source length in tokens, end included; None if it is not set."""
    return _read_settings(folder).model_max_length


def _read_settings(folder: Path) -> _TokenizerFiles:
    path = folder / "tokenizer_config.json"
    legacy = folder / "special_tokens_map.json"
    older, newer = (read_json(file) if file.exists() else {} for file in (legacy, path))
    return validated(_TokenizerFiles, {**older, **newer}, path)


def read_tokenizers(folder: Path, settings: MarianIds) -> TokenizerPair:
    """Read the source and target tokenizers; one object if their files are equal."""
    # A `</s>` in a text is plain text here; `MarianTokenizer` reads it as the end of the sentence.
    if (folder / "tokenizer.json").exists() and not (folder / "source.spm").exists():
        return _of_ours(folder, settings)
    path = folder / "tokenizer_config.json"
    found = _read_settings(folder)
    tokens = {
        name: _text(getattr(found, name))
        for name in ("unk_token", "eos_token", "pad_token")
    }
    added = {_text(token) for token in found.added_tokens_decoder.values()}
    if (
        further := sorted(added - set(tokens.values()))
        or found.additional_special_tokens
    ):
        raise DataError(
            f"{path}: there are further special tokens, {further[0]!r}: they cannot be read"
        )
    if found.extra_special_tokens or found.sp_model_kwargs:
        raise DataError(
            f"{path}: extra_special_tokens and sp_model_kwargs cannot be read: leave them out"
        )
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


def read_sentencepiece(path: Path) -> bytes:
    """Read a SentencePiece model file (`*.spm`, `*.model`) and check it."""
    try:
        model = read_limited(path, LONGEST_TOKENIZER)
        load_sentencepiece(model)
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: a Marian checkpoint has it next to config.json"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(
            f"{path} is not a SentencePiece model, or it is damaged: {error}"
        ) from None
    return model


def _of_ours(folder: Path, settings: MarianIds) -> TokenizerPair:
    """Read byte-level tokenizers trained by triptych, and check them against `config.json`."""
    # Sizes and ids have to agree, or token ids would index the wrong embedding rows.
    source = target = read_sentence_tokenizer(folder / "tokenizer.json")
    if (folder / TARGET_FOLDER).is_dir():
        target = read_sentence_tokenizer(folder / TARGET_FOLDER / "tokenizer.json")
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


def _vocab(
    path: Path, size: int, tokens: Mapping[str, str], settings: MarianIds
) -> tuple[str, ...]:
    try:
        record = TypeAdapter(dict[str, int]).validate_python(
            read_json(path), strict=True
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path}: {first['loc'][0]!r}: {first['msg']}") from None
    # The ids have to be a permutation of 0 … size - 1, since the result is indexed by id.
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
    """Return the text of a token, stored as a string or as a record with matching flags."""
    return token if isinstance(token, str) else str(token.get("content"))


def write_tokenizers(pair: TokenizerPair, max_tokens: int, folder: Path) -> None:
    source = pair.source
    target = pair.target
    if isinstance(source, SentencePieceTokenizer) and isinstance(
        target, SentencePieceTokenizer
    ):
        _write_sentencepieces(source.record, target.record, max_tokens, folder)
    elif isinstance(source, ByteLevelTokenizer) and isinstance(
        target, ByteLevelTokenizer
    ):
        _write_fast(source, max_tokens, folder)
        if not pair.joint:
            (folder / TARGET_FOLDER).mkdir()
            _write_fast(target, max_tokens, folder / TARGET_FOLDER)
    else:
        raise UsageError(
            f"the source has a {type(source).__name__}, the target a {type(target).__name__}: their files "
            "cannot lie in one folder"
        )


def _write_fast(tokenizer: SentenceTokenizer, max_tokens: int, folder: Path) -> None:
    pad, bos, eos = SPECIAL_TOKENS
    inner = hf.Tokenizer.from_str(tokenizer.to_json())
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}",
        pair=f"$A {eos} $B {eos}",
        special_tokens=[(eos, tokenizer.eos_id)],
    )
    (folder / "tokenizer.json").write_text(inner.to_str(pretty=True), encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "bos_token": bos,
            "eos_token": eos,
            "model_max_length": max_tokens,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            # An "<eos>" in a text is plain text.
            "split_special_tokens": True,
        },
    )


def _write_sentencepieces(
    source: SentencePieceRecord,
    target: SentencePieceRecord,
    max_tokens: int,
    folder: Path,
) -> None:
    pieces = {
        name: source.vocab[getattr(source, f"{name}_id")]
        for name in ("unk", "eos", "pad")
    }
    # The format stores one set of special tokens for the source and the target.
    own = {name: target.vocab[getattr(target, f"{name}_id")] for name in pieces}
    ids = {
        (record.eos_id, record.pad_id, record.joins_punctuation)
        for record in (source, target)
    }
    if own != pieces or len(ids) > 1:
        raise UsageError(
            f"source and target have different special tokens, {pieces} and {own}: MarianTokenizer has the "
            "same, with the same ids, on both sides"
        )
    apart = source.vocab != target.vocab
    _write_vocab(source, folder / "vocab.json")
    if apart:
        _write_vocab(target, folder / "target_vocab.json")
    for record, name in ((source, "source.spm"), (target, "target.spm")):
        (folder / name).write_bytes(record.model)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "MarianTokenizer",
            **{f"{name}_token": text for name, text in pieces.items()},
            "separate_vocabs": apart,
            "model_max_length": max_tokens,
            "clean_up_tokenization_spaces": source.joins_punctuation,
        },
    )


def _write_vocab(record: SentencePieceRecord, path: Path) -> None:
    write_json(path, {piece: token for token, piece in enumerate(record.vocab)})
