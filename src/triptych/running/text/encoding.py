"""Encoding of texts for a model, with special tokens in a text read as tokens or as plain text."""

from collections.abc import Sequence

from triptych.literals import SpecialTokens
from triptych.running.text.given import Text, require_ids, which_of
from triptych.running.text.tokenizers import Tokenizer


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[Text],
    special_tokens: SpecialTokens = "tokens",
    *,
    vocab_size: int | None = None,
    begin_id: int | None = None,
) -> list[list[int]]:
    """Encode texts for a model, with the tokenizer's special tokens around each text.

    An empty string becomes the beginning-of-text token if available (`begin_id`, or else the tokenizer's).
    Token ids are returned unchanged; they must be below `vocab_size` (by default the tokenizer's).
    """
    # Encode all strings in one call, then put the results among the texts given as token ids.
    strings = [text for text in texts if isinstance(text, str)]
    encoded = iter(
        tokenizer.encode(
            strings, add_special=True, parse_special=special_tokens == "tokens"
        )
        if strings
        else ()
    )
    begin_id = tokenizer.bos_id if begin_id is None else begin_id
    begin = [] if begin_id is None else [begin_id]
    found = list[list[int]]()
    for number, text in enumerate(texts, start=1):
        if isinstance(text, str):
            ids = next(encoded)
            found.append(ids if text else ids or begin)
        else:
            require_ids(
                text,
                vocab_size or tokenizer.vocab_size,
                which_of("text", number, texts),
            )
            found.append([*map(int, text)])
    return found
