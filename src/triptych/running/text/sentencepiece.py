"""SentencePiece models, read by their own library, which the extra `sentencepiece` installs."""

import re
from typing import TYPE_CHECKING

from triptych.errors import UsageError
from triptych.extras import require_extra

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE_MARK = "▁"

# The first release that refused every damaged model we made; see docs/explanation/decisions/010.
_OLDEST = (0, 2, 3)


def load_sentencepiece(model: bytes) -> "SentencePieceProcessor":
    """Load a processor from the content of a model file, trusted or not."""
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
        processor.id_to_piece(
            list(range(len(processor)))
        )  # UnicodeDecodeError if a piece is not UTF-8
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    return processor
