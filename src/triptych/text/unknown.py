"""Characters that a tokenizer does not know. They all become one token, and cannot be recovered."""

from collections.abc import Sequence

from triptych.text.tokenizers import Tokenizer

# The largest share of a text that may be unknown where its bits per byte are given. An unknown character
# hides up to 20 bits, which is what it takes to name one of all characters: at this share the figure is at
# most 0.02 bits a character too low.
MOST_UNKNOWN = 0.001


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the token for unknown text; None if there is none, or if it has another use, as in GPT-2."""
    others = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return None if tokenizer.unk_id in others else tokenizer.unk_id


def count_unknown(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> int:
    """Count the characters of a text that its tokens do not represent, at least.

    One token may replace several characters; they are missing when the other tokens are decoded.
    """
    unknown = unknown_token(tokenizer)
    count = 0 if unknown is None else list(ids).count(unknown)
    if not count:
        return 0
    (told,) = tokenizer.decode([[token for token in ids if token != unknown]])
    return max(count, len(text) - len(told))


def why_no_bits(share: float, what: str = "characters") -> str:
    """Return the reason why a text with this unknown share has no bits per byte; "" if it has."""
    if share <= MOST_UNKNOWN:
        return ""
    return (
        f"no bits per byte: {share:.2%} of the {what} are unknown to the tokenizer (<unk>), more than "
        f"{MOST_UNKNOWN:.1%}"
    )
