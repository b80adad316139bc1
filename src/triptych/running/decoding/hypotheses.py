"""Hypotheses: outputs of a search with their scores, and the limit of their length."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

# Reason for an end: an end "token", a stop "text", the requested "length" or the model's "positions".
Finish = Literal["token", "text", "length", "positions"]

# Tokens and natural logarithms of their probabilities, in descending order.
Top = tuple[tuple[int, float], ...]


class Hypothesis(NamedTuple):
    """An output, open or finished."""

    ids: tuple[int, ...]  # output tokens, without prompt and end token
    log_prob: float  # natural logarithm of the output's probability, including the end
    score: float = 0.0  # finished hypotheses: log_prob over the length penalty; without a beam, log_prob
    log_probs: tuple[
        float, ...
    ] = ()  # log-probabilities of the tokens and of the end token
    finish: Finish | None = None  # reason for the end
    tops: tuple[
        Top, ...
    ] = ()  # most probable tokens at each position of `log_probs`, if requested


def length_penalty(length: int, alpha: float) -> float:
    """Return the length penalty `((5 + length) / 6)^α`."""
    return float(((5 + length) / 6) ** alpha)


def limit_of(
    num_source_tokens: int, max_extra_tokens: int, max_target_tokens: int | None
) -> int:
    """Return the maximum length of an output, without the end of sentence."""
    # The start token takes a position, too.
    longest = math.inf if max_target_tokens is None else max_target_tokens - 1
    return int(min(num_source_tokens + max_extra_tokens, longest))


def best_first(found: Sequence[Hypothesis]) -> list[Hypothesis]:
    return sorted(found, key=lambda hypothesis: -hypothesis.score)
