"""Choice of the next token from logits: greedy, or sampling after filters.

A filter takes logits `[rows, vocab]` and sets removed tokens to −inf. Every filter but `keep_typical` keeps
the most probable token of a row.
"""

import math
import random
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from triptych.errors import DataError
from triptych.running.decoding_options import SamplingOptions
from triptych.running.token_rules import NO_RULES


def penalise_repeats(
    logits: Float[Tensor, "rows vocab"],
    seen: Bool[Tensor, "rows vocab"],
    penalty: float,
) -> Float[Tensor, "rows vocab"]:
    """Apply `SamplingOptions.repetition_penalty` to the tokens marked in `seen`."""
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def keep_top_k(
    logits: Float[Tensor, "rows vocab"], k: int
) -> Float[Tensor, "rows vocab"]:
    """Keep the k most probable tokens, and tokens as probable as the k-th."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(
    logits: Float[Tensor, "rows vocab"], p: float
) -> Float[Tensor, "rows vocab"]:
    """Keep the smallest set of most probable tokens with a total probability of at least p."""
    probabilities, order = logits.softmax(dim=-1).sort(
        dim=-1, descending=True, stable=True
    )
    before = probabilities.cumsum(dim=-1) - probabilities
    past = (
        before >= p
    )  # true even for the first token if `p` underflows to 0 in the logits' dtype
    past[:, 0] = False
    removed = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, past)
    return logits.masked_fill(removed, -math.inf)


def keep_min_p(
    logits: Float[Tensor, "rows vocab"], p: float
) -> Float[Tensor, "rows vocab"]:
    """Keep tokens with at least p times the largest probability."""
    return logits.masked_fill(
        logits < logits.amax(dim=-1, keepdim=True) + math.log(p), -math.inf
    )


def keep_typical(
    logits: Float[Tensor, "rows vocab"], p: float
) -> Float[Tensor, "rows vocab"]:
    """Keep the tokens with information nearest to the entropy, up to a total probability of at least p."""
    log_probs = logits.log_softmax(dim=-1)
    probabilities = log_probs.exp()
    mean = -(log_probs * probabilities).nansum(dim=-1, keepdim=True)
    order = (-log_probs - mean).abs().sort(dim=-1, stable=True).indices
    ordered = probabilities.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    removed = torch.zeros_like(logits, dtype=torch.bool).scatter_(
        -1, order, before >= p
    )
    return logits.masked_fill(removed, -math.inf)


def filtered(
    logits: Float[Tensor, "rows vocab"], options: SamplingOptions
) -> Float[Tensor, "rows vocab"]:
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


def draw(
    logits: Float[Tensor, "rows vocab"], uniforms: Float[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Draw a token for each row: the first whose cumulative probability exceeds the row's uniform number."""
    sums = logits.double().softmax(dim=-1).cumsum(dim=-1)
    return torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)[:, 0]


@final
class RowState:
    """Sampling state of a row: its random stream and the tokens of its text.

    The random stream depends on the seed and the index of the sample alone, so that samples of a prompt do
    not depend on the batch.
    """

    def __init__(self, seed: int, sample: int, ids: Sequence[int]) -> None:
        """Start with a prompt."""
        self.numbers, self.seen = random.Random(f"triptych {seed} {sample}"), set(ids)
        self.ids, self.num_prompt = [*ids], len(ids)

    def take(self, token: int) -> None:
        """Append a token."""
        self.seen.add(token)
        self.ids.append(token)


def allowed(
    logits: Float[Tensor, "rows vocab"],
    options: SamplingOptions,
    rows: Sequence[RowState],
) -> Float[Tensor, "rows vocab"]:
    """Apply the repetition penalty and set tokens forbidden by the rules to −inf."""
    # Penalty and rules need the tokens of each row, unlike the filters.
    if options.repetition_penalty != 1:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for place, row in enumerate(rows):
            seen[place, [*row.seen]] = True
        logits = penalise_repeats(logits, seen, options.repetition_penalty)
    if options.rules != NO_RULES:
        forbidden = torch.zeros_like(logits, dtype=torch.bool)
        for place, row in enumerate(rows):
            own = options.rules.forbidden(row.ids, row.num_prompt)
            forbidden[place, [token for token in own if token < logits.shape[-1]]] = (
                True
            )
        logits = logits.masked_fill(forbidden, -math.inf)
        if bool((logits == -math.inf).all(dim=-1).any()):
            raise DataError(
                "the settings of generation_config.json forbid every token that could come next: "
                "generation_config='ignore' leaves them out"
            )
    return logits


def choose(
    logits: Float[Tensor, "rows vocab"],
    options: SamplingOptions,
    rows: Sequence[RowState],
) -> Int[Tensor, " rows"]:
    """Choose a token for each row and update the rows' states."""
    logits = allowed(logits, options, rows)
    if options.is_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        uniforms = torch.tensor(
            [row.numbers.getrandbits(32) / 2**32 for row in rows], dtype=torch.float64
        )
        tokens = draw(filtered(logits, options), uniforms.to(logits.device))
    if options.repetition_penalty != 1 or options.rules != NO_RULES:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.take(token)
    return tokens
