"""Text as its tokens come: never half a character."""

from typing import final

from triptych.text.tokenizers import Tokenizer

_BROKEN = "\ufffd"
# A character of UTF-8 that is not complete has at most three bytes.
_MOST_WITHHELD = 3


@final
class StreamDecoder:
    """Decodes token by token; what it gives, end to end, is the text of all tokens.

        stream = StreamDecoder(tokenizer)
        for token in tokens:
            print(stream.push(token), end="", flush=True)
        print(stream.finish())

    A character whose bytes are in several tokens is given once it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        # Tokens are decoded with those before them, whose text is known: a tokenizer may treat the beginning
        # of a text in another way than what follows.
        self._ids: list[int] = []
        self._num_known = 0
        self._given = ""
        self._num_broken = 0  # tokens in a row that left the text with a broken end

    def push(self, token: int) -> str:
        """The text that a token makes certain; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        end = len(text.rstrip(_BROKEN))
        self._num_broken = self._num_broken + 1 if end < len(text) else 0
        if self._num_broken > _MOST_WITHHELD:
            end = max(end, len(text) - _MOST_WITHHELD)
        new = self._rest(text[:end])
        self._given += new
        if new and end == len(text):
            self._ids, self._num_known = self._ids[self._num_known :], len(self._ids) - self._num_known
            self._given = self._decode(self._ids)
        return new

    def finish(self) -> str:
        """What is left: U+FFFD for bytes that are no character."""
        new = self._rest(self._decode(self._ids))
        self._given += new
        return new

    def _rest(self, text: str) -> str:
        return text[len(self._given) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([ids], skip_special=self._skip_special)[0]
