"""Negative log-probabilities of tokens, without the logits of a whole text in memory."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.core.algebra.forms import at_least_float32
from triptych.core.models import LanguageModelHead

# Number of logits in memory at a time: malloc reuses memory up to 32 MB. Fewer rows slow the product down.
_LOGITS_AT_A_TIME = 1 << 23
_MIN_ROWS = 128


def nats_of(
    targets: Int[Tensor, " rows"],
    rows: Float[Tensor, "rows width"],
    head: LanguageModelHead | None,
    check: Callable[[Tensor], None],
) -> Float[Tensor, " rows"]:
    """Compute the negative log-probability of each target in nats.

    `rows` are hidden states, or logits if `head` is None. `check` is called with the logarithms of the sums.
    """
    # A row of logits has the vocabulary's size: few rows are in memory at a time.
    vocab_size = rows.shape[1] if head is None else head.output.out_features
    step = max(_MIN_ROWS, _LOGITS_AT_A_TIME // vocab_size)
    parts = []
    for own, ids in zip(
        torch.split(rows, step), torch.split(targets, step), strict=True
    ):
        logits = at_least_float32(own if head is None else head(own))
        total = logits.logsumexp(dim=-1)
        check(total)
        parts.append(total - logits.gather(1, ids[:, None])[:, 0])
    return torch.cat(parts)
