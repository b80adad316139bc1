"""Characters that a tokenizer does not know. They all become one token, and cannot be recovered."""

from collections import Counter
from collections.abc import Sequence

from triptych.literals import SpecialTokens
from triptych.running.text.tokenizers import Tokenizer

# The largest share of a text that may be unknown where its bits per byte are given. An unknown character
# hides up to 20 bits, which is what it takes to name one of all characters: at this share the figure is at
# most 0.02 bits a character too low.
MOST_UNKNOWN = 0.001


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the token for unknown text; None if there is none, or if it has another use, as in GPT-2."""
    others = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return None if tokenizer.unk_id in others else tokenizer.unk_id


def count_unknown(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], special_tokens: SpecialTokens = "tokens"
) -> int:
    """Count the characters of a text that its tokens do not represent, at least.

    One token may replace several characters; they are missing when the other tokens are decoded. Special
    tokens that the text spells out are represented, the unknown token among them.
    """
    unknown = unknown_token(tokenizer)
    if unknown is None or unknown not in ids:
        return 0
    spelled = _spelled(tokenizer, text, ids) if special_tokens == "tokens" else {}
    count = list(ids).count(unknown) - spelled.get(tokenizer.pieces([unknown])[0], 0)
    if not count:
        return 0
    (told,) = tokenizer.decode([[token for token in ids if token != unknown]])
    return max(count, len(text) - len(told) - sum(len(name) * number for name, number in spelled.items()))


def _spelled(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> dict[str, int]:
    """Count the special tokens, by their names, that a text spells out and that are read as such."""
    counts = Counter(token for token in ids if token in tokenizer.special_ids)
    names = zip(tokenizer.pieces([*counts]), counts.values(), strict=True)
    return {name: min(number, text.count(name)) for name, number in names}


def why_no_bits(share: float, what: str = "characters") -> str:
    """Return the reason why a text with this unknown share has no bits per byte; "" if it has."""
    if share <= MOST_UNKNOWN:
        return ""
    return (
        f"no bits per byte: {share:.2%} of the {what} are unknown to the tokenizer (<unk>), more than "
        f"{MOST_UNKNOWN:.1%}"
    )
