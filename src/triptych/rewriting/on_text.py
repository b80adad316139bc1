"""Comparison of two models on text."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.errors import UsageError
from triptych.running.opening import Output, TextReader, Window

_FARTHEST = 4


class Deviations(NamedTuple):
    """Comparison of two models on the same windows."""

    tokens: int  # number of compared rows (tokens, or texts for classes of whole texts)
    worst_logit: (
        float  # largest difference of a logit, or of an entry of a hidden state
    )
    # mean KL divergence of the second model's predictions (tokens or classes) from the first's;
    # meaningless for other outputs
    divergence_nats: float
    loss_before_nats: (
        float | None
    )  # loss of the first model per token; None without targets
    loss_after_nats: float | None
    farthest: tuple[
        Window, ...
    ] = ()  # windows of largest logit differences, in descending order
    output: Output = "tokens"
    # norm of the difference of all outputs, divided by the norm of the first model's outputs
    relative: float = 0.0
    cosine: float = 1.0  # mean cosine of the rows of both models


@torch.inference_mode()
def compare_outputs(
    original: TextReader, rewritten: TextReader, windows: Iterator[Window]
) -> Deviations:
    """Compare two models on a text."""
    tokens = 0
    worst = 0.0
    divergence = 0.0
    predicted = 0
    losses = [0.0, 0.0]
    moved = 0.0
    size = 0.0
    cosines = 0.0
    farthest = list[tuple[float, Window]]()
    for window in windows:
        one = original.outputs(window).double()
        other = rewritten.outputs(window).double()
        apart = largest_difference(one, other)
        worst = max(worst, apart)
        farthest = sorted([*farthest, (apart, window)], key=lambda pair: -pair[0])[
            :_FARTHEST
        ]
        # KL divergence of the rewritten model's predictions from the original's.
        log_p = one.log_softmax(dim=-1)
        log_q = other.log_softmax(dim=-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum().clamp(min=0))
        tokens += len(one)
        moved += float((one - other).square().sum())
        size += float(one.square().sum())
        cosines += float(torch.cosine_similarity(one, other, dim=-1).sum())
        if window.targets is not None:
            predicted += len(window.targets)
            for place, found in enumerate((log_p, log_q)):
                losses[place] -= float(found.gather(-1, window.targets[:, None]).sum())
    if not tokens:
        raise UsageError("the text is empty: there is nothing to compare on")
    before, after = (loss / predicted if predicted else None for loss in losses)
    return Deviations(
        tokens,
        worst,
        divergence / tokens,
        before,
        after,
        tuple(window for _, window in farthest),
        original.output,
        math.sqrt(moved / size) if size else 0.0,
        cosines / tokens,
    )


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two outputs; infinite if an entry is NaN in only one output."""
    one = one.double()
    other = other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return float(
        (one - other).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0).max()
    )
