"""Log-probabilities of tokens as OpenAI's interface tells them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from triptych.running.decoding import Top
from triptych.running.text import StreamDecoder, Tokenizer
from triptych.running.text.pieces import bytes_of
from triptych.seeing.attending.attention import readable

# Tokens before the first one that are decoded: they say whether it begins with a space.
_BEFORE = 8


class NamedToken(NamedTuple):
    """A token by a name that no other token in its place has."""

    name: str
    log_prob: float | None
    raw: bytes  # the bytes that it stands for


class ToldToken(NamedTuple):
    """A token of a text, with the most probable ones in its place."""

    token: NamedToken
    tops: tuple[NamedToken, ...]  # the most probable first; the token itself is among them
    offset: int  # characters of the text before it; those of one character have the same


@final
class TokenNames:
    """The readable names of tokens, and the bytes that they stand for, each made once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._found = dict[int, tuple[str, bytes]]()

    def of(self, token: int) -> tuple[str, bytes]:
        """Return a token's name and its bytes."""
        if token not in self._found:
            piece = self.tokenizer.pieces([token])[0]
            self._found[token] = readable(piece), bytes_of(piece)
        return self._found[token]


def told_tokens(
    names: TokenNames,
    before: Sequence[int],
    ids: Sequence[int],
    log_probs: Sequence[float | None],
    tops: Sequence[Top],
) -> list[ToldToken]:
    """Return the tokens of a text after the prompt, without the token that ended it."""
    decoder = StreamDecoder(names.tokenizer)
    for token in before[-_BEFORE:]:
        decoder.push(token)
    found = list[ToldToken]()
    offset = 0
    tops = tops or [()] * len(log_probs)
    for token, log_prob, top in zip(ids, log_probs, tops, strict=False):
        others = dict(top) | ({} if log_prob is None else {token: log_prob})
        named = _named(names, token, others)
        name, raw = names.of(token)
        own = named.get(token) or NamedToken(name, None, raw)
        found.append(ToldToken(own, tuple(named.values()), offset))
        offset += len(decoder.push(token))
    return found


def _named(names: TokenNames, own: int, log_probs: dict[int, float]) -> dict[int, NamedToken]:
    """Name tokens by their ids, the most probable first. A name that is taken becomes `token_id:N`."""
    taken = {names.of(own)[0]: own}
    found = dict[int, NamedToken]()
    for token, log_prob in sorted(log_probs.items(), key=lambda item: -item[1]):
        name, raw = names.of(token)
        if taken.setdefault(name, token) != token:
            name = f"token_id:{token}"
        found[token] = NamedToken(name, log_prob, raw)
    return found


def as_completion_logprobs(told: Sequence[ToldToken], length: int) -> dict[str, Any]:
    """Return the field `logprobs` of a completion whose text has that many characters."""
    return {
        "tokens": [one.token.name for one in told],
        "token_logprobs": [one.token.log_prob for one in told],
        "top_logprobs": [{top.name: top.log_prob for top in one.tops} or None for one in told],
        "text_offset": [min(one.offset, length) for one in told],
    }


def as_chat_logprobs(told: Sequence[ToldToken], count: int) -> list[dict[str, Any]]:
    """Return the field `content` of a chat completion's log-probabilities, with that many tokens a place."""
    return [
        {**_record(one.token), "top_logprobs": [_record(top) for top in one.tops[:count]]} for one in told
    ]


def _record(token: NamedToken) -> dict[str, Any]:
    return {"token": token.name, "logprob": token.log_prob, "bytes": [*token.raw]}
