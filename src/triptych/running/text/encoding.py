"""Encoding of texts for a model, with special tokens in a text read as tokens or as plain text."""

from collections.abc import Sequence

from triptych.errors import UsageError
from triptych.literals import SpecialTokens
from triptych.running.text.given import (
    Text,
    TextPair,
    require_ids,
    require_one,
    which_of,
)
from triptych.running.text.sentencepiece import SPACE_MARK
from triptych.running.text.tokenizers import EncodedText, Tokenizer

_MOST_SHOWN = 5  # pieces in a message


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[Text],
    special_tokens: SpecialTokens = "tokens",
    *,
    vocab_size: int | None = None,
    begin_id: int | None = None,
) -> list[list[int]]:
    """Encode texts as `encode_inputs` does; a pair of texts is refused."""
    for number, text in enumerate(texts, start=1):
        require_one(text, which_of("text", number, texts))
    found = encode_inputs(
        tokenizer, texts, special_tokens, vocab_size=vocab_size, begin_id=begin_id
    )
    return [one.ids for one in found]


def encode_inputs(
    tokenizer: Tokenizer,
    texts: Sequence[Text],
    special_tokens: SpecialTokens = "tokens",
    *,
    vocab_size: int | None = None,
    begin_id: int | None = None,
) -> list[EncodedText]:
    """Encode texts and pairs of texts for a model, with the tokenizer's special tokens around each text.

    An empty string becomes the beginning-of-text token if available (`begin_id`, or else the tokenizer's).
    Token ids are returned unchanged; they must be below `vocab_size` (by default the tokenizer's).
    """
    # Encode all strings in one call and all pairs in another, then sort the results as the texts.
    parse_special = special_tokens == "tokens"
    strings = [text for text in texts if isinstance(text, str)]
    pairs = [text for text in texts if isinstance(text, TextPair)]
    encoded = iter(
        tokenizer.encode(strings, add_special=True, parse_special=parse_special)
        if strings
        else ()
    )
    joined = iter(
        tokenizer.encode_pairs(pairs, parse_special=parse_special) if pairs else ()
    )
    begin_id = tokenizer.bos_id if begin_id is None else begin_id
    begin = [] if begin_id is None else [begin_id]
    found = list[EncodedText]()
    for number, text in enumerate(texts, start=1):
        if isinstance(text, str):
            ids = next(encoded)
            found.append(EncodedText(ids if text else ids or begin))
        elif isinstance(text, TextPair):
            found.append(next(joined))
        else:
            require_ids(
                text,
                vocab_size or tokenizer.vocab_size,
                which_of("text", number, texts),
            )
            found.append(EncodedText([*map(int, text)]))
    return found


def token_id(tokenizer: Tokenizer, token: str | int) -> int:
    """Return the id of a token given by its id, its readable form, or a text of one token."""
    if isinstance(token, int):
        if not 0 <= token < tokenizer.vocab_size:
            raise UsageError(
                f"there is no token {token}: ids are 0 to {tokenizer.vocab_size - 1:,}"
            )
        return token
    # A readable form is unambiguous, unlike a text: SentencePiece encodes "mat" as "▁mat".
    found = tokenizer.id_of_piece.get(token.replace(" ", SPACE_MARK))
    if found is not None:
        return found
    (ids,) = tokenizer.encode([token], parse_special=True)
    if len(ids) != 1:
        shown = ", ".join(map(repr, tokenizer.pieces(ids[:_MOST_SHOWN])))
        raise UsageError(
            f"{token!r} is {len(ids)} tokens ({shown}): give one of them, or the id of a token"
        )
    return ids[0]
