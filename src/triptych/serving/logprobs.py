"""Log-probabilities of tokens in the format of OpenAI's interface."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from triptych.running.decoding import Top
from triptych.running.text import StreamDecoder, Tokenizer, bytes_of
from triptych.seeing.attending import readable

# Number of tokens decoded before the first token: they decide if its text begins with a space.
_BEFORE = 8


class NamedToken(NamedTuple):
    """Token with a unique name among the candidates at its position."""

    name: str
    log_prob: float | None
    raw: bytes  # bytes of the token


class ToldToken(NamedTuple):
    """Token of a text, with the most probable tokens at its position."""

    token: NamedToken
    tops: tuple[NamedToken, ...]  # most probable first; includes the token itself
    offset: (
        int  # number of characters before the token; tokens of one character share it
    )


@final
class TokenNames:
    """Cache of the readable names and the bytes of tokens."""

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
    """Return the tokens of a text after the tokens `before`, without the token that ended it."""
    # The length of each token's text depends on the tokens before it.
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


def _named(
    names: TokenNames, own: int, log_probs: dict[int, float]
) -> dict[int, NamedToken]:
    """Return named tokens by id, most probable first; a duplicate name becomes `token_id:N`."""
    taken = {names.of(own)[0]: own}
    found = dict[int, NamedToken]()
    for token, log_prob in sorted(log_probs.items(), key=lambda item: -item[1]):
        name, raw = names.of(token)
        if taken.setdefault(name, token) != token:
            name = f"token_id:{token}"
        found[token] = NamedToken(name, log_prob, raw)
    return found


def as_completion_logprobs(told: Sequence[ToldToken], length: int) -> dict[str, Any]:
    """Return the field `logprobs` of a completion with a text of `length` characters."""
    return {
        "tokens": [one.token.name for one in told],
        "token_logprobs": [one.token.log_prob for one in told],
        "top_logprobs": [
            {top.name: top.log_prob for top in one.tops} or None for one in told
        ],
        "text_offset": [min(one.offset, length) for one in told],
    }


def as_chat_logprobs(told: Sequence[ToldToken], count: int) -> list[dict[str, Any]]:
    """Return the field `content` of a chat's log-probabilities, with `count` candidates per position."""
    return [
        {
            **_record(one.token),
            "top_logprobs": [_record(top) for top in one.tops[:count]],
        }
        for one in told
    ]


def _record(token: NamedToken) -> dict[str, Any]:
    return {"token": token.name, "logprob": token.log_prob, "bytes": [*token.raw]}
