"""How many tokens a model reads at once, where its positions set no limit."""

from triptych.errors import UsageError

# Time grows with the square of a text's length, and so do files that show all of its attention.
LONGEST_PROMPT, LONGEST_LINE, LONGEST_SHOWN = 32_768, 1_024, 8_192


def check_length(
    which: str, length: int, positions: int | None, asked: int | None, otherwise: int, option: str
) -> None:
    """Check that a text can be read at once."""
    if not length:
        raise UsageError(f"{which} is empty: give it some text")
    if positions is not None and length > positions:
        raise UsageError(
            f"{which} has {length:,} tokens, but the model has positions for {positions:,}: shorten it"
        )
    most = asked or positions or otherwise
    if length > most:
        raise UsageError(
            f"{which} has {length:,} tokens, and at most {most:,} are read at once: shorten it, or raise "
            f"{option}"
        )
