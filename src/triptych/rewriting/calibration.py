"""What attention layers do on a text: second moments for the rewrites that look at data."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from triptych.algebra.function import Scoring
from triptych.algebra.moments import Moments, MomentsGatherer
from triptych.algebra.weights import AttentionWeights, Norm
from triptych.checkpoints.layer import AttentionLayer, AttentionSource, Site
from triptych.errors import UsageError
from triptych.rewriting.layers import RewrittenLayer
from triptych.rewriting.running import Seen, open_model

MOST_TOKENS = 1 << 16


def gather_moments(
    source: AttentionSource,
    folder: Path,
    sites: Sequence[Site],
    before: Callable[[AttentionLayer], RewrittenLayer],
    text: Path,
    *,
    most_tokens: int = MOST_TOKENS,
) -> dict[str, Moments]:
    """Moments of layers as they are before a step, in one pass over a text.

    The model's own forward makes the inputs of every layer; the layer as the steps before have left it makes
    queries, keys and outputs of them.

    Args:
        source: the checkpoint.
        folder: that it lies in.
        sites: of the layers.
        before: a layer through all steps before this one.
        text: to run on.
        most_tokens: where to stop.

    Returns:
        By the name of the layer.

    Raises:
        UsageError: the model cannot be run, or the text is not of its kind; a layer that the model applies
            several times, or that has lost heads with norms of their own.
    """
    listeners: dict[str, _Listener] = {}
    for site in sites:
        read = source.read(site)
        if read.uses > 1:
            raise UsageError(
                f"{source.name}: {site.name} is applied {read.uses} times, to other inputs each "
                "time: what it does on a text is not one thing; choose the criterion free"
            )
        now = before(read)
        listeners[site.name] = _Listener(
            now.weights.to(torch.float64), scoring_of_kept(read, now), read.weights
        )
    model = open_model(folder)
    with model.watch(source, sites):
        for window in model.windows(text, most_tokens):
            model.outputs(window)
            for name, listener in listeners.items():
                listener.hear(model.seen[name])
    return {name: listener.result() for name, listener in listeners.items()}


def scoring_of_kept(read: AttentionLayer, now: RewrittenLayer) -> Scoring:
    """What a layer does besides its maps, of the heads that are left.

    Raises:
        UsageError: heads are gone, and those that are left have norms of their own, or together.
    """
    scoring = read.scoring
    if now.kept is None or list(now.kept) == list(range(read.weights.num_heads)):
        return scoring
    norms = [norm for norm in (scoring.q_norm, scoring.k_norm) if norm is not None]
    if any(norm.over == "all heads" or norm.of_each_head for norm in norms):
        raise UsageError(
            f"{read.site.name}: heads with norms of their own are gone or in another order: what the "
            "others do on a text cannot be measured here; put the step that looks at the text first"
        )
    sinks = None if scoring.sinks is None else scoring.sinks[list(now.kept)]
    return replace(scoring, sinks=sinks)


@final
class _Listener:
    """Gathers the moments of one layer."""

    def __init__(self, weights: AttentionWeights, scoring: Scoring, read: AttentionWeights) -> None:
        self._weights, self._scoring = weights, scoring
        self._norm = read.norm if weights.norm is None else None
        self._memory_norm = read.memory_norm if weights.memory_norm is None else None
        self._gatherer = MomentsGatherer()

    def hear(self, found: Seen) -> None:
        """Take in one input."""
        x = _before_gain(found.x.double(), self._norm)
        memory = None if found.memory is None else _before_gain(found.memory.double(), self._memory_norm)
        self._gatherer.add(self._weights, self._scoring, x, memory)

    def result(self) -> Moments:
        """What was gathered."""
        return self._gatherer.result()


def _before_gain(x: Tensor, norm: Norm | None) -> Tensor:
    """What a norm made before its gain and shift; 0 where the gain is, which no map sees."""
    if norm is None:
        return x
    gain = norm.gain.double() + norm.offset
    x = x if norm.shift is None else x - norm.shift.double()
    return torch.where(gain == 0, 0.0, x / torch.where(gain == 0, 1.0, gain))
