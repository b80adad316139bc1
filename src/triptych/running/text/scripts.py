"""Scripts without spaces between words, and the first characters of tokens."""

import re
import unicodedata

# Ranges of characters: Thai, Lao, Burmese, Khmer and the scripts of their neighbours, Javanese and Balinese,
# kana, Chinese characters.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9df\uaa60-\uaadf"
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u303b\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003fffd"
)
_UNSPACED = re.compile(f"[{UNSPACED}]")
INCOMPLETE = "\ufffd"  # replacement for the bytes of an incomplete character
_INSIDE = "\u0300"  # replacement for the later bytes of a character
_LEAST_LATER = (
    0x80  # bytes of UTF-8: later bytes of a character, and first bytes of several
)
_LEAST_LEAD = 0xC0
_JOINERS = frozenset("\u200c\u200d🏻🏼🏽🏾🏿")


def is_unspaced(char: str) -> bool:
    """Return True for a character of a script without spaces between words."""
    return _UNSPACED.match(char) is not None


def begins_inside(raw: bytes) -> bool:
    """Return True if a token begins with a later byte of a character."""
    return raw[:1] != b"" and _LEAST_LATER <= raw[0] < _LEAST_LEAD


def first_character(raw: bytes) -> str:
    """Return the first character of a token; for incomplete bytes, a possible character or a stand-in."""
    if begins_inside(raw):
        return _INSIDE
    character = raw.decode("utf-8", errors="replace")[:1]
    if character != INCOMPLETE:
        return character
    # A possible character of a script without spaces is assumed to be such a character: its word ends sooner.
    longer = (
        raw[:3] + bytes([byte]) + b"\x80\x80"
        for byte in range(_LEAST_LATER, _LEAST_LEAD)
    )
    possible = (some.decode("utf-8", errors="replace")[0] for some in longer)
    return next((one for one in possible if is_unspaced(one)), INCOMPLETE)


def is_inside_character(character: str) -> bool:
    """Return True for what joins the character before it: marks, joiners, modifiers of emoji."""
    if character == "":
        return False
    return unicodedata.category(character).startswith("M") or character in _JOINERS
