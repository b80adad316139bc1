"""Scripts without spaces between words."""

import re

# Ranges of characters: Thai, Lao, Burmese, Khmer and the scripts of their neighbours, Javanese and Balinese,
# kana, Chinese characters.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9df\uaa60-\uaadf"
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u303b\u3040-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003fffd"
)
_UNSPACED = re.compile(f"[{UNSPACED}]")


def is_unspaced(char: str) -> bool:
    """Return True for a character of a script without spaces between words."""
    return _UNSPACED.match(char) is not None
