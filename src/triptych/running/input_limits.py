"""Limits of a model's input: the length of texts, and the size of the vocabulary."""

from typing import TYPE_CHECKING

from triptych.errors import DataError, UsageError
from triptych.running.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from triptych.core.models import LanguageModel

# Time grows with the square of the length of a text. So does the size of a page with all attention weights.
LONGEST_PROMPT = 32_768
LONGEST_LINE = 1_024
LONGEST_SHOWN = 8_192


def check_length(
    which: str,
    length: int,
    positions: int | None,
    asked: int | None,
    otherwise: int,
    option: str = "",
) -> None:
    """Check that a text can be read at once; `option`, if any, names the option to raise the limit."""
    if not length:
        raise UsageError(f"{which} is empty: give it some text")
    if positions is not None and length > positions:
        raise UsageError(
            f"{which} has {length:,} tokens, but the model has positions for {positions:,}: shorten it"
        )
    # A given limit replaces the usual limit; the model's positions were checked above.
    most = asked or positions or otherwise
    if length > most:
        raise UsageError(
            f"{which} has {length:,} tokens, and at most {most:,} are read at once: shorten it"
            + (option and f", or raise {option}")
        )


def check_vocabulary(model: "LanguageModel", tokenizer: Tokenizer) -> None:
    """Check that the model has at least as many tokens as the tokenizer."""
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model {model.vocab_size:,}: take "
            "both from one checkpoint"
        )
