"""Characters unknown to a tokenizer. They are encoded as the unknown token and cannot be recovered."""

from collections import Counter
from collections.abc import Sequence

from triptych.literals import SpecialTokens
from triptych.running.text.tokenizers import Tokenizer

# Maximum share of unknown characters for a text with bits per byte. An unknown character hides up to 20 bits,
# the information in any Unicode character: at this share, the figure is at most 0.02 bits per character too
# low.
MOST_UNKNOWN = 0.001


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the token for unknown text; None if it is missing or has another use, as in GPT-2."""
    others = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return None if tokenizer.unk_id in others else tokenizer.unk_id


def count_unknown(
    tokenizer: Tokenizer,
    text: str,
    ids: Sequence[int],
    special_tokens: SpecialTokens = "tokens",
) -> int:
    """Return a lower bound on the number of characters of a text not represented by its tokens.

    One unknown token may replace several characters, absent from the decoded text of the other tokens.
    Special tokens spelled out in the text, including the unknown token, count as represented.
    """
    # The bound is the larger of two counts: unknown tokens, and characters missing after decoding.
    unknown = unknown_token(tokenizer)
    if unknown is None or unknown not in ids:
        return 0
    spelled = _spelled(tokenizer, text, ids) if special_tokens == "tokens" else {}
    count = list(ids).count(unknown) - spelled.get(tokenizer.pieces([unknown])[0], 0)
    if not count:
        return 0
    (told,) = tokenizer.decode([[token for token in ids if token != unknown]])
    return max(
        count,
        len(text)
        - len(told)
        - sum(len(name) * number for name, number in spelled.items()),
    )


def _spelled(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> dict[str, int]:
    """Count the special tokens spelled out in a text and read as tokens, by name."""
    counts = Counter(token for token in ids if token in tokenizer.special_ids)
    names = zip(tokenizer.pieces([*counts]), counts.values(), strict=True)
    return {name: min(number, text.count(name)) for name, number in names}


def why_no_bits(share: float, what: str = "characters") -> str:
    """Return the reason why bits per byte are not given for this unknown share; "" if they are."""
    if share <= MOST_UNKNOWN:
        return ""
    return (
        f"no bits per byte: {share:.2%} of the {what} are unknown to the tokenizer (<unk>), more than "
        f"{MOST_UNKNOWN:.1%}"
    )
