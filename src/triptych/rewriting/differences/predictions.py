"""The difference of two models' predictions on a text, and where in the models it begins."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from triptych.core.algebra.resampling import ratio_intervals
from triptych.errors import UsageError
from triptych.progress import Progress
from triptych.rewriting.differences.difference_records import (
    PartDifference,
    TextDifference,
)
from triptych.rewriting.on_text import largest_difference
from triptych.running.opened_source import Opened
from triptych.running.opening import TextReader, Window

# Maximal number of compared tokens of a text.
_MOST_TOKENS = 8192
# Outputs of a layer that differ by more than this many units of their dtype are not rounding.
_MOST_UNITS = 64


@final
@dataclass
class _Sums:
    """Sums over the predictions of each window."""

    divergences: list[float] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    worst: float = 0.0


def measure_on_text(
    a: Opened,
    b: Opened,
    text: Path,
    parts: tuple[PartDifference, ...],
    progress: Progress,
) -> TextDifference:
    """Compare the predictions of two models for a text, as tokenised by A.

    Raises UsageError if the text is empty, or a model does not predict tokens.
    """
    one = a.to_run
    other = b.to_run
    for opened, reader in ((a, one), (b, other)):
        *_, last = reader.model.stacks.values()
        if last.head is None:
            raise UsageError(
                f"{opened.name} predicts no tokens, which --text would compare: leave it out"
            )
    windows = list(one.windows(text, _MOST_TOKENS))
    if not windows:
        raise UsageError(f"{text} is empty: there is nothing to compare on")
    sums = _Sums()
    with torch.inference_mode():
        for number, window in enumerate(windows):
            progress("comparing predictions", number, len(windows))
            _add(sums, window, one.outputs(window), other.outputs(window))
        first_layer = _first_layer(a, one, other, windows[0])
    counts = torch.tensor(sums.counts, dtype=torch.float64)[:, None]
    changes = [after - before for before, after in sums.losses] or [0.0] * len(
        sums.counts
    )
    figures = torch.tensor([sums.divergences, changes], dtype=torch.float64).mT
    low, high = ratio_intervals(figures, counts)
    means = figures.sum(dim=0) / counts.sum()
    tokens = sum(sums.counts)
    return TextDifference(
        tokens,
        (float(means[0]), float(low[0]), float(high[0])),
        sum(before for before, _ in sums.losses) / tokens,
        (float(means[1]), float(low[1]), float(high[1])),
        sums.worst,
        first_layer,
        _first_head(first_layer, parts),
    )


def _add(sums: _Sums, window: Window, one: Tensor, other: Tensor) -> None:
    """Add the predictions of a window; tokens that only one model has are left out."""
    count = min(one.shape[-1], other.shape[-1])
    one = one[..., :count].double()
    other = other[..., :count].double()
    sums.worst = max(sums.worst, largest_difference(one, other))
    log_p = one.log_softmax(dim=-1)
    log_q = other.log_softmax(dim=-1)
    sums.divergences.append(float((log_p.exp() * (log_p - log_q)).sum().clamp(min=0)))
    sums.counts.append(len(one))
    if window.targets is not None:
        targets = window.targets.clamp(max=count - 1)[:, None]
        losses = [-float(found.gather(-1, targets).sum()) for found in (log_p, log_q)]
        sums.losses.append((losses[0], losses[1]))


def _first_layer(a: Opened, one: TextReader, other: TextReader, window: Window) -> str:
    """Return the name of the first attention layer with a difference beyond rounding, or ""."""
    source = a.attention
    names = {
        place.site.name: name
        for place, name in zip(source.layers, a.places.names, strict=True)
    }
    outputs = (
        one.attention_outputs(source, window),
        other.attention_outputs(source, window),
    )
    for (name, mine), (_, theirs) in zip(*outputs, strict=False):
        eps = max(torch.finfo(tensor.dtype).eps for tensor in (mine, theirs))
        apart = float((mine.double() - theirs.double()).norm())
        if mine.shape != theirs.shape or apart > _MOST_UNITS * eps * float(
            mine.double().norm()
        ):
            return str(names.get(name, name))
    return ""


def _first_head(layer: str, parts: tuple[PartDifference, ...]) -> str:
    """Return the first head of a layer with differing weights, such as "3.2", or ""."""
    for part in parts:
        if layer and part.kind == "attention" and part.layer == layer:
            off = [
                head.head
                for head in part.heads
                if head.verdict in ("near", "different")
            ]
            return f"{layer}.{off[0]}" if off else ""
    return ""
