"""What a search is asked and what it finds.

A hypothesis is judged by its log-probability over the paper's length penalty,

    log P(Y | X) / lp(Y)        lp(Y) = ((5 + |Y|) / 6)^α

where |Y| counts the tokens with the end of sentence. Source: Wu et al. 2016, arXiv 1609.08144,
section 7; Vaswani et al. 2017, section 6.1, for the limit on length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.errors import DataError

Stop = Literal["certain", "full"]

# Far more than anybody searches with; what is larger ends in numbers that do not fit.
LARGEST_BEAM, MOST_TOKENS = 10_000, 10**9
_LARGEST_ALPHA = 10.0


def require_count(name: str, value: int, most: int) -> None:
    """Raises ValueError for a number below 1 or above `most`."""
    if not 1 <= value <= most:
        raise ValueError(f"{name} is {value}: it must be at least 1, and at most {most:,}")


def require_alpha(alpha: float) -> None:
    """Raises ValueError for an exponent of the length penalty that is negative or too large."""
    if not 0 <= alpha <= _LARGEST_ALPHA:
        raise ValueError(f"alpha is {alpha}: it must be at least 0, and at most {_LARGEST_ALPHA:g}")


@dataclass(frozen=True)
class SearchOptions:
    """How to search."""

    beam_size: int = 4  # hypotheses kept at every step; 1 is greedy
    alpha: float = 0.6  # exponent of the length penalty; 0 for none
    max_extra_tokens: int = 50  # a sentence's output ends at the number of its tokens plus this
    num_best: int = 1  # hypotheses returned, at most beam_size
    # when a sentence is done: "certain", when none of its open hypotheses can overtake the last finished one
    # wanted, however it goes on; or "full", already when beam_size have finished, which most toolkits do and
    # which takes about half the steps. Greedy search ends at the first
    stop: Stop = "certain"
    # longest sentence that is read at once; None for the model's limit, or 1,024 where it has none
    max_source_tokens: int | None = None

    def __post_init__(self) -> None:
        require_count("beam_size", self.beam_size, LARGEST_BEAM)
        require_count("max_extra_tokens", self.max_extra_tokens, MOST_TOKENS)
        require_alpha(self.alpha)
        if not 1 <= self.num_best <= self.beam_size:
            raise ValueError(
                f"num_best is {self.num_best}: it must be between 1 and beam_size ({self.beam_size})"
            )
        if self.max_source_tokens is not None:
            require_count("max_source_tokens", self.max_source_tokens, MOST_TOKENS)


@dataclass(frozen=True)
class Hypothesis:
    """A finished output."""

    ids: tuple[int, ...]  # its tokens, without beginning and end of sentence
    log_prob: float  # natural logarithm of its probability, the end of sentence included
    score: float  # log_prob over the length penalty


def length_penalty(length: int, alpha: float) -> float:
    """`((5 + length) / 6)^α`."""
    return float(((5 + length) / 6) ** alpha)


def enough_finished(options: SearchOptions) -> float:
    """The number of finished hypotheses at which a sentence is done whatever the open ones promise."""
    if options.beam_size == 1:
        return 1.0  # greedy search ends where the likeliest token is the end
    return float(options.beam_size) if options.stop == "full" else math.inf


def output_limits(
    src: Int[Tensor, "batch src_len"], pad_id: int, max_extra_tokens: int, max_target_tokens: int | None
) -> list[int]:
    """The most tokens that the output of each sentence may have, without its end of sentence."""
    source_tokens = (src != pad_id).sum(dim=1) - 1  # the end of sentence does not count
    return [limit_of(n, max_extra_tokens, max_target_tokens) for n in source_tokens.tolist()]


def limit_of(num_source_tokens: int, max_extra_tokens: int, max_target_tokens: int | None) -> int:
    """The most tokens that an output may have, without its end of sentence."""
    # The first token takes a position too.
    longest = math.inf if max_target_tokens is None else max_target_tokens - 1
    return int(min(num_source_tokens + max_extra_tokens, longest))


def best_first(found: Sequence[Hypothesis]) -> list[Hypothesis]:
    """By score."""
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def require_finite_logits(best: Float[Tensor, " rows"]) -> None:
    """Check that the model still computes numbers: a search over NaN has no end."""
    if bool((best.isnan() | (best == torch.inf)).any()):
        raise DataError(
            "the model computed numbers that are not finite (NaN or infinite) from weights that are: they "
            "overflow; try another --dtype or --precision"
        )
