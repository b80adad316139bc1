"""SentencePiece models, read by their own library, which the extra `sentencepiece` installs."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from triptych.errors import UsageError
from triptych.extras import require_extra

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE_MARK = "▁"

# The first release that refused every damaged model we made; see docs/explanation/decisions/010.
_OLDEST = (0, 2, 3)

# Numbers of fields, types and kinds in github.com/google/sentencepiece, src/sentencepiece_model.proto.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TYPE, _MODEL_TYPE, _CHARSMAP = 3, 3, 2
_CONTROL, _USER_DEFINED = 3, 4
_KINDS: dict[int, Literal["unigram", "bpe"]] = {1: "unigram", 2: "bpe"}


def load_sentencepiece(model: bytes) -> "SentencePieceProcessor":
    """The processor of a model file's content, which need not be trusted."""
    require_extra("sentencepiece", "sentencepiece", what="a SentencePiece tokenizer")
    import sentencepiece

    if tuple(map(int, re.findall(r"\d+", sentencepiece.__version__)[:3])) < _OLDEST:
        raise UsageError(
            f"sentencepiece {sentencepiece.__version__} crashes on damaged files: "
            "pip install --upgrade 'triptych[sentencepiece]'"
        )
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
        processor.id_to_piece(list(range(len(processor))))  # UnicodeDecodeError if a piece is not UTF-8
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    return processor


@final
@dataclass(frozen=True)
class SentencePieceModel:
    """What a SentencePiece model file says."""

    # Every piece by id with its score, the logarithm of its probability or minus its rank.
    pieces: tuple[tuple[str, float], ...]
    control: frozenset[int]  # ids of the pieces that no text has, such as `<s>`
    user_defined: frozenset[int]  # ids of the pieces that are always cut out whole
    kind: Literal["unigram", "bpe"]  # how text is cut
    charsmap: bytes  # the rules of normalization, in SentencePiece's own format; empty for none
    unk_id: int  # stands for what no piece covers


def read_model(model: bytes) -> SentencePieceModel:
    """What a model file's content says; the file need not be trusted."""
    processor = load_sentencepiece(model)
    fields = _fields(model)
    (trainer,) = fields.get(_TRAINER, [b""])[-1:]
    (normalizer,) = fields.get(_NORMALIZER, [b""])[-1:]
    settings, rules = _fields(_as_bytes(trainer)), _fields(_as_bytes(normalizer))
    kind = _KINDS.get(_as_int(settings.get(_MODEL_TYPE, [1])[-1]))
    if kind is None:
        raise ValueError("it cuts text into words or characters, not by unigram or bpe")
    ids = list(range(len(processor)))
    types = [_as_int(_fields(_as_bytes(piece)).get(_TYPE, [1])[-1]) for piece in fields.get(_PIECE, [])]
    return SentencePieceModel(
        pieces=tuple(zip(processor.id_to_piece(ids), processor.get_score(ids), strict=True)),
        control=frozenset(token for token in ids if types[token] == _CONTROL),
        user_defined=frozenset(token for token in ids if types[token] == _USER_DEFINED),
        kind=kind,
        charsmap=_as_bytes(rules.get(_CHARSMAP, [b""])[-1]),
        unk_id=processor.unk_id(),
    )


def _fields(message: bytes) -> dict[int, list[int | bytes]]:
    """The fields of a protocol buffers message, each with all its values in order."""
    found: dict[int, list[int | bytes]] = {}
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        value: int | bytes
        match key & 7:
            case 0:
                value, place = _varint(message, place)
            case 1:
                value, place = message[place : place + 8], place + 8
            case 2:
                length, place = _varint(message, place)
                value, place = message[place : place + length], place + length
            case 5:
                value, place = message[place : place + 4], place + 4
            case other:
                raise ValueError(f"a field of the unknown type {other}")
        if place > len(message):
            raise ValueError("it ends inside a field")
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("it ends inside a number")
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("a number of more than ten bytes")


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a record is wanted")
    return value


def _as_int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a record where a number is wanted")
    return value
