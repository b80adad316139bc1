"""Comparison of two models on text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.errors import UsageError
from triptych.running.opening import Output, TextReader, Window

_FARTHEST = 4
# Maximum number of outputs compared at a time.
_NUMBERS_AT_A_TIME = 1 << 21


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


@final
@dataclass
class _Sums:
    """Sums over compared rows, and the largest difference."""

    tokens: int = 0
    predicted: int = 0  # number of rows with a target
    worst: float = 0.0
    divergence: float = 0.0
    moved: float = 0.0  # squared norm of the difference
    size: float = 0.0  # squared norm of the original's outputs
    cosines: float = 0.0
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, one: Tensor, other: Tensor, targets: Tensor | None) -> float:
        """Add rows of both models; return the largest difference of these rows."""
        one = one.double()
        other = other.double()
        apart = largest_difference(one, other)
        self.worst = max(self.worst, apart)
        # KL divergence of the rewritten model's predictions from the original's.
        log_p = one.log_softmax(dim=-1)
        log_q = other.log_softmax(dim=-1)
        self.divergence += float((log_p.exp() * (log_p - log_q)).sum().clamp(min=0))
        self.tokens += len(one)
        self.moved += float((one - other).square().sum())
        self.size += float(one.square().sum())
        self.cosines += float(torch.cosine_similarity(one, other, dim=-1).sum())
        if targets is not None:
            self.predicted += len(targets)
            for place, found in enumerate((log_p, log_q)):
                self.losses[place] -= float(found.gather(-1, targets[:, None]).sum())
        return apart


@torch.inference_mode()
def compare_outputs(
    original: TextReader, rewritten: TextReader, windows: Iterator[Window]
) -> Deviations:
    """Compare two models on a text."""
    sums = _Sums()
    farthest = list[tuple[float, Window]]()
    for window in windows:
        one = original.outputs(window)
        other = rewritten.outputs(window)
        # The comparison converts the rows to float64 several times.
        step = max(1, _NUMBERS_AT_A_TIME // max(1, one.shape[-1]))
        apart = 0.0
        for start in range(0, len(one), step):
            rows = slice(start, start + step)
            targets = None if window.targets is None else window.targets[rows]
            apart = max(apart, sums.add(one[rows], other[rows], targets))
        farthest = sorted([*farthest, (apart, window)], key=lambda pair: -pair[0])[
            :_FARTHEST
        ]
    if not sums.tokens:
        raise UsageError("the text is empty: there is nothing to compare on")
    before, after = (
        loss / sums.predicted if sums.predicted else None for loss in sums.losses
    )
    return Deviations(
        sums.tokens,
        sums.worst,
        sums.divergence / sums.tokens,
        before,
        after,
        tuple(window for _, window in farthest),
        original.output,
        math.sqrt(sums.moved / sums.size) if sums.size else 0.0,
        sums.cosines / sums.tokens,
    )


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two outputs; infinite if an entry is NaN in only one output."""
    one = one.double()
    other = other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return float(
        (one - other).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0).max()
    )
