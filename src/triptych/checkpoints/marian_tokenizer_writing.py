"""Our tokenizers as files that Hugging Face's tokenizers read.

A SentencePiece tokenizer becomes what `MarianTokenizer` reads: `source.spm`, `target.spm` and `vocab.json`.
One that was trained here works on bytes, with rules for words that SentencePiece has not, so no such
model is it; it becomes `tokenizer.json` with `tokenizer_config.json`, which `AutoTokenizer` reads. Where the
target has its own of that kind, it lies in a folder below.
"""

import json
import struct
from pathlib import Path
from typing import Any

import tokenizers as hf
from tokenizers import processors

from triptych.errors import UsageError
from triptych.text import (
    SentencePieceRecord,
    SentencePieceSpec,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerPair,
)
from triptych.text.tokenizers import SPECIAL_TOKENS, ByteLevelTokenizer

TARGET_FOLDER = "target_tokenizer"

_KINDS = {"unigram": 1, "bpe": 2}
_TYPES = {"normal": 1, "unknown": 2, "control": 3, "user_defined": 4, "unused": 5, "byte": 6}


def write_tokenizers(pair: TokenizerPair, max_tokens: int, folder: Path) -> None:
    """Write both tokenizers.

    Args:
        pair: of the model.
        max_tokens: the longest source, its end included.
        folder: must exist.

    Raises:
        UsageError: the two are of different makes, or their vocabularies do not go together in their files.
    """
    source, target = pair.source, pair.target
    if isinstance(source, SentencePieceTokenizer) and isinstance(target, SentencePieceTokenizer):
        _write_sentencepieces(source.record, target.record, max_tokens, folder)
    elif isinstance(source, ByteLevelTokenizer) and isinstance(target, ByteLevelTokenizer):
        _write_fast(source, max_tokens, folder)
        if not pair.joint:
            (folder / TARGET_FOLDER).mkdir()
            _write_fast(target, max_tokens, folder / TARGET_FOLDER)
    else:
        raise UsageError(
            f"the source has a {type(source).__name__}, the target a {type(target).__name__}: their files "
            "cannot lie in one folder"
        )


def _write_fast(tokenizer: Tokenizer, max_tokens: int, folder: Path) -> None:
    pad, bos, eos = SPECIAL_TOKENS
    inner = hf.Tokenizer.from_str(tokenizer.to_json())
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, tokenizer.eos_id)]
    )
    (folder / "tokenizer.json").write_text(inner.to_str(pretty=True), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "bos_token": bos,
            "eos_token": eos,
            "model_max_length": max_tokens,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            # "<eos>" in a text is text.
            "split_special_tokens": True,
        },
    )


def _write_sentencepieces(
    source: SentencePieceRecord, target: SentencePieceRecord, max_tokens: int, folder: Path
) -> None:
    pieces = {name: source.vocab[getattr(source, f"{name}_id")] for name in ("unk", "eos", "pad")}
    own = {name: target.vocab[getattr(target, f"{name}_id")] for name in pieces}
    ids = {(record.eos_id, record.pad_id, record.joins_punctuation) for record in (source, target)}
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
        (folder / name).write_bytes(sentencepiece_bytes(record.model))
    _write_json(
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
    _write_json(path, {piece: token for token, piece in enumerate(record.vocab)})


def sentencepiece_bytes(spec: SentencePieceSpec) -> bytes:
    """A SentencePiece model file, `ModelProto`; `checkpoints.sentencepiece` reads it.

    Source: `sentencepiece_model.proto` of github.com/google/sentencepiece, version 0.2.0.
    """
    pieces = b"".join(
        _block(1, _block(1, text.encode()) + _float32(2, score) + _number(3, _TYPES[own]))
        for text, score, own in spec.pieces
    )
    trainer = (
        _number(3, _KINDS[spec.kind])
        + _number(4, len(spec.pieces))
        + _number(24, spec.whitespace_as_suffix)
        + _number(35, spec.byte_fallback)
    )
    normalizer = (
        (_block(2, spec.rules) if spec.rules else b"")
        + _number(3, spec.add_dummy_prefix)
        + _number(4, spec.remove_extra_whitespaces)
        + _number(5, spec.escape_whitespaces)
    )
    return pieces + _block(2, trainer) + _block(3, normalizer)


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _block(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _float32(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
