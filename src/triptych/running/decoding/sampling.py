"""The next token, chosen from logits: greedy, or drawn after filters.

Each filter takes logits `[rows, vocab]` and sets the logits of the tokens that it removes to −inf; the best
token of a row always stays.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from triptych.errors import DataError
from triptych.running.decoding.rules import NO_RULES, TokenRules

# Logits divided by less are too large for float32; divided by more, all tokens are as probable.
_LEAST_TEMPERATURE = 1e-6
_LARGEST_TEMPERATURE = 1e6
# A factor of a hundred decides every choice; past it, logits leave the range of float32.
_LEAST_PENALTY = 0.01
_LARGEST_PENALTY = 100.0


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. The filters apply in this order."""

    # p where the logits of tokens that are in the text already, its prompt included, are divided by p if
    # positive and multiplied by p if not; 1 for none. It also acts on greedy choices. Source: Keskar et al.
    # 2019, arXiv 1909.05858, section 4.1
    repetition_penalty: float = 1.0
    temperature: float = 0.0  # logits are divided by it; 0 takes the most probable token
    top_k: int | None = None  # only the k most probable tokens; None for all
    # only the fewest most probable tokens whose probabilities sum to p or more. Source: Holtzman et al. 2020,
    # arXiv 1904.09751
    top_p: float | None = None
    # only tokens whose probability is p times that of the most probable one, or more. Source: Nguyen et al.
    # 2024, arXiv 2407.01082
    min_p: float | None = None
    # only the tokens whose information is nearest to the mean one, whose probabilities sum to p or more.
    # Source: Meister et al. 2023, arXiv 2202.00666
    typical_p: float | None = None
    rules: TokenRules = NO_RULES  # tokens that may not come next; they also bind greedy choices

    def __post_init__(self) -> None:
        if self.temperature != 0 and not _LEAST_TEMPERATURE <= self.temperature <= _LARGEST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}: it must be 0, or from {_LEAST_TEMPERATURE} to "
                f"{_LARGEST_TEMPERATURE:g}"
            )
        if not _LEAST_PENALTY <= self.repetition_penalty <= _LARGEST_PENALTY:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}: it must be from {_LEAST_PENALTY} to "
                f"{_LARGEST_PENALTY:g}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be at least 1")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p), ("typical_p", self.typical_p)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} is {value}: it must be above 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def penalise_repeats(
    logits: Float[Tensor, "rows vocab"], seen: Bool[Tensor, "rows vocab"], penalty: float
) -> Float[Tensor, "rows vocab"]:
    """See `SamplingOptions.repetition_penalty`; `seen` marks the tokens that are in the text."""
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def keep_top_k(logits: Float[Tensor, "rows vocab"], k: int) -> Float[Tensor, "rows vocab"]:
    """The k most probable tokens, and those that are as probable as the last of them."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Float[Tensor, "rows vocab"], p: float) -> Float[Tensor, "rows vocab"]:
    """The fewest most probable tokens whose probabilities sum to p or more."""
    probabilities, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    past = before >= p  # a `p` too small for the dtype of the logits is 0
    past[:, 0] = False
    removed = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, past)
    return logits.masked_fill(removed, -math.inf)


def keep_min_p(logits: Float[Tensor, "rows vocab"], p: float) -> Float[Tensor, "rows vocab"]:
    """The tokens that are at least p times as probable as the most probable one."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(p), -math.inf)


def keep_typical(logits: Float[Tensor, "rows vocab"], p: float) -> Float[Tensor, "rows vocab"]:
    """Keep the tokens nearest to the mean information whose probabilities sum to p or more."""
    log_probs = logits.log_softmax(dim=-1)
    probabilities = log_probs.exp()
    mean = -(log_probs * probabilities).nansum(dim=-1, keepdim=True)
    order = (-log_probs - mean).abs().sort(dim=-1, stable=True).indices
    ordered = probabilities.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    removed = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, before >= p)
    return logits.masked_fill(removed, -math.inf)


def filtered(logits: Float[Tensor, "rows vocab"], options: SamplingOptions) -> Float[Tensor, "rows vocab"]:
    """Divide logits by the temperature and apply top-k, top-p, min-p and typical-p."""
    logits = logits / options.temperature
    if options.top_k is not None:
        logits = keep_top_k(logits, options.top_k)
    if options.top_p is not None and options.top_p < 1:
        logits = keep_top_p(logits, options.top_p)
    if options.min_p is not None:
        logits = keep_min_p(logits, options.min_p)
    if options.typical_p is not None and options.typical_p < 1:
        logits = keep_typical(logits, options.typical_p)
    return logits


def draw(logits: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    """A token of every row: the first at which the sum of the probabilities exceeds the row's number."""
    sums = logits.double().softmax(dim=-1).cumsum(dim=-1)
    return torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)[:, 0]


@final
class RowState:
    """What the tokens of one row are chosen by: random numbers of its own, and the tokens that its text has.

    The numbers follow from the seed and the number of the sample alone: what is drawn for a prompt depends
    neither on the other texts of the batch nor on its place in it.
    """

    def __init__(self, seed: int, sample: int, ids: Sequence[int]) -> None:
        """Begin with a prompt."""
        self.numbers, self.seen = random.Random(f"triptych {seed} {sample}"), set(ids)
        self.ids, self.num_prompt = [*ids], len(ids)

    def take(self, token: int) -> None:
        """Go on with a token."""
        self.seen.add(token)
        self.ids.append(token)


def allowed(
    logits: Float[Tensor, "rows vocab"], options: SamplingOptions, rows: Sequence[RowState]
) -> Float[Tensor, "rows vocab"]:
    """Penalise repeats, and remove the tokens that may not come next."""
    if options.repetition_penalty != 1:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for place, row in enumerate(rows):
            seen[place, [*row.seen]] = True
        logits = penalise_repeats(logits, seen, options.repetition_penalty)
    if options.rules != NO_RULES:
        forbidden = torch.zeros_like(logits, dtype=torch.bool)
        for place, row in enumerate(rows):
            own = options.rules.forbidden(row.ids, row.num_prompt)
            forbidden[place, [token for token in own if token < logits.shape[-1]]] = True
        logits = logits.masked_fill(forbidden, -math.inf)
        if bool((logits == -math.inf).all(dim=-1).any()):
            raise DataError(
                "the settings of generation_config.json forbid every token that could come next: "
                "generation_config='ignore' leaves them out"
            )
    return logits


def choose(
    logits: Float[Tensor, "rows vocab"], options: SamplingOptions, rows: Sequence[RowState]
) -> Int[Tensor, " rows"]:
    """Choose a token for every row."""
    logits = allowed(logits, options, rows)
    if options.is_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        uniforms = torch.tensor([row.numbers.getrandbits(32) / 2**32 for row in rows], dtype=torch.float64)
        tokens = draw(filtered(logits, options), uniforms.to(logits.device))
    if options.repetition_penalty != 1 or options.rules != NO_RULES:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.take(token)
    return tokens
