"""SentencePiece models, read by their own library, which the extra `sentencepiece` installs."""

import re
from typing import TYPE_CHECKING

from tokenizers import AddedToken

from triptych.errors import UsageError
from triptych.extras import require_extra
from triptych.text.vocabularies import Vocabulary

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE_MARK = "▁"

# The first release that refused every damaged model we made; see docs/explanation/decisions/010.
_OLDEST = (0, 2, 3)

# Numbers of fields and types in github.com/google/sentencepiece, src/sentencepiece_model.proto.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TYPE, _MODEL_TYPE, _CHARSMAP = 3, 3, 2
_CONTROL, _USER_DEFINED = 3, 4


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


def read_model(model: bytes) -> Vocabulary:
    """The vocabulary of a model file's content; the file need not be trusted."""
    processor = load_sentencepiece(model)
    fields = _fields(model)
    (trainer,) = fields.get(_TRAINER, [b""])[-1:]
    (normalizer,) = fields.get(_NORMALIZER, [b""])[-1:]
    settings, rules = _fields(_as_bytes(trainer)), _fields(_as_bytes(normalizer))
    numbers = list(range(len(processor)))
    pieces = tuple(zip(processor.id_to_piece(numbers), processor.get_score(numbers), strict=True))
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    types = [_as_int(_fields(_as_bytes(piece)).get(_TYPE, [1])[-1]) for piece in fields.get(_PIECE, [])]
    marked = tuple(
        AddedToken(pieces[number][0], normalized=False, special=types[number] == _CONTROL)
        for number in numbers
        if types[number] in (_CONTROL, _USER_DEFINED)
    )
    charsmap = _as_bytes(rules.get(_CHARSMAP, [b""])[-1])
    match _as_int(settings.get(_MODEL_TYPE, [1])[-1]):
        case 1:
            return Vocabulary(
                *("unigrams", ids), pieces=pieces, charsmap=charsmap, unk_id=processor.unk_id(), marked=marked
            )
        case 2:
            # Ids are ranks: there is a merge for every way to make a piece of two others.
            cuts = ((piece[:cut], piece[cut:]) for piece in ids for cut in range(1, len(piece)))
            merges = tuple((left, right) for left, right in cuts if left in ids and right in ids)
            return Vocabulary("pairs", ids, merges, charsmap=charsmap, marked=marked)
        case _:
            raise ValueError("it cuts text into words or characters, not by unigram or bpe")


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
