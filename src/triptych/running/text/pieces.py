"""Tokens in readable form, and conversion back to bytes."""

import codecs
import re

from triptych.running.text.sentencepiece import SPACE_MARK

_BYTE = re.compile("<0x([0-9A-F]{2})>")


def piece_of(raw: bytes) -> str:
    """Return a token of a byte-level vocabulary in readable form.

    A space is shown as "▁", and a byte of an incomplete character as `<0xF0>`, like SentencePiece's byte
    tokens. Tokens of different bytes have different names.
    """
    return raw.decode("utf-8", errors="triptych.bytes").replace(" ", SPACE_MARK)


def bytes_of(piece: str) -> bytes:
    """Return the bytes of a token in readable form."""
    found = b""
    end = 0
    for byte in _BYTE.finditer(piece):
        found += piece[end : byte.start()].replace(
            SPACE_MARK, " "
        ).encode() + bytes.fromhex(byte[1])
        end = byte.end()
    return found + piece[end:].replace(SPACE_MARK, " ").encode()


def _name_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    broken = error.object[error.start : error.end]
    return "".join(f"<0x{byte:02X}>" for byte in broken), error.end


codecs.register_error("triptych.bytes", _name_bytes)
