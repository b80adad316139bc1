"""SentencePiece's model files (`*.spm`, `*.model`), without its library.

A file is a protocol buffer, `ModelProto` of `sentencepiece_model.proto`.
Source: github.com/google/sentencepiece, version 0.2.0; protobuf.dev/programming-guides/encoding.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from pydantic import ValidationError

from triptych.errors import DataError
from triptych.text import SentencePieceSpec

# The largest published models have 250,000 pieces and take 5 MB.
_MAX_BYTES = 1 << 28
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPES = {int: _VARINT, bool: _VARINT, float: _FIXED32, bytes: _BYTES, str: _BYTES}

# ModelProto and its parts: the fields that are read, by number.
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_TYPES = {1: "normal", 2: "unknown", 3: "control", 4: "user_defined", 5: "unused", 6: "byte"}


@final
class _MalformedError(Exception):
    """The file is not what it should be; the message says in which way."""


@final
@dataclass(frozen=True)
class _Message:
    """A protocol buffer taken apart: what was given for each field, by its number.

    Attributes:
        name: of its type, for messages.
        fields: pairs of wire type and value.
    """

    name: str
    fields: dict[int, list[tuple[int, int | bytes]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes, name: str) -> "_Message":
        message = cls(name)
        for number, wire, value in _wire(data, name):
            message.fields.setdefault(number, []).append((wire, value))
        return message

    def all(self, number: int, kind: type) -> list[Any]:
        """What was given for a repeated field."""
        return [self._as(number, kind, *given) for given in self.fields.get(number, [])]

    def one(self, number: int, default: Any) -> Any:
        """What was given last for a field, or the default, whose type it must have."""
        return (self.all(number, type(default)) or [default])[-1]

    def part(self, number: int, name: str) -> "_Message":
        """An embedded message; empty if it was not given. Several are one, as protocol buffers have it."""
        return _Message.parse(b"".join(self.all(number, bytes)), name)

    def _as(self, number: int, kind: type, wire: int, value: int | bytes) -> Any:
        if wire != _WIRE_TYPES[kind]:
            raise _MalformedError(
                f"field {number} of {self.name} has wire type {wire}, not {_WIRE_TYPES[kind]}"
            )
        if kind is str:
            assert isinstance(value, bytes)  # by its wire type
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError:
                raise _MalformedError(f"field {number} of {self.name} is not UTF-8") from None
        if kind is float:
            (number32,) = struct.unpack("<f", struct.pack("<I", value))
            return number32
        return kind(value)


def read_sentencepiece(path: Path) -> SentencePieceSpec:
    """Read a model file.

    Raises:
        DataError: no such file, one that is truncated or damaged, or a model of another sort than
            "bpe" and "unigram".
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise DataError(f"{path} is no SentencePiece model: it has {size:,} bytes")
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing: a Marian checkpoint has it beside its config.json") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    try:
        return _spec(_Message.parse(data, "ModelProto"))
    except _MalformedError as error:
        raise DataError(f"{path} is no SentencePiece model, or damaged: {error}") from None
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DataError(f"{path} is no SentencePiece model, or damaged: {message}") from None


def _spec(model: _Message) -> SentencePieceSpec:
    trainer = model.part(_TRAINER, "TrainerSpec")
    normalizer = model.part(_NORMALIZER, "NormalizerSpec")
    kind = _KINDS.get(trainer.one(3, 1), "unknown")
    if kind not in ("bpe", "unigram"):
        raise _MalformedError(f"it is of the sort {kind!r}, and only 'bpe' and 'unigram' can be read")
    if model.part(_DENORMALIZER, "NormalizerSpec").one(2, b""):
        raise _MalformedError("it has rules for decoding (denormalizer_spec), which cannot be applied")
    return SentencePieceSpec.model_validate(
        {
            "kind": kind,
            "pieces": tuple(_piece(data) for data in model.all(_PIECES, bytes)),
            "rules": normalizer.one(2, b""),
            "byte_fallback": trainer.one(35, False),
            "add_dummy_prefix": normalizer.one(3, True),
            "remove_extra_whitespaces": normalizer.one(4, True),
            "escape_whitespaces": normalizer.one(5, True),
            "whitespace_as_suffix": trainer.one(24, False),
        }
    )


def _piece(data: bytes) -> tuple[str, float, str]:
    piece = _Message.parse(data, "SentencePiece")
    number = piece.one(3, 1)
    if number not in _TYPES:
        raise _MalformedError(f"a piece is of type {number}, which there is not")
    return piece.one(1, ""), piece.one(2, 0.0), _TYPES[number]


def _wire(data: bytes, name: str) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and value of every field, in their order."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, name)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise _MalformedError(f"{name} has a field of number 0")
        if wire == _VARINT:
            value, at = _varint(data, at, name)
            yield number, wire, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at, name)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise _MalformedError(f"{name} has a field of wire type {wire}, which there is not")
        if size > len(data) - at:
            raise _MalformedError(f"{name} ends {size - (len(data) - at):,} bytes too soon")
        raw = data[at : at + size]
        yield number, wire, raw if wire == _BYTES else int.from_bytes(raw, "little")
        at += size


def _varint(data: bytes, at: int, name: str) -> tuple[int, int]:
    """A number of seven bits a byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _MalformedError(f"{name} ends in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _MalformedError(f"{name} has a number of more than ten bytes")
