"""What attention layers do on a text: second moments for the rewrites that look at data."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from triptych.algebra.function import Scoring
from triptych.algebra.moments import Moments, MomentsGatherer
from triptych.algebra.weights import AttentionWeights, Norm
from triptych.checkpoints.layer import AttentionSource
from triptych.layer_rewriting import rewrite_layer
from triptych.rewrite_steps import Step
from triptych.running import Seen, open_model

MOST_TOKENS = 1 << 16


def gather_moments(
    source: AttentionSource,
    folder: Path,
    steps: Sequence[Step],
    text: Path,
    *,
    skip_refused: bool,
    most_tokens: int = MOST_TOKENS,
) -> dict[str, dict[int, Moments]]:
    """Moments of every layer as it is before each step that needs them, in one pass over a text.

    The model's own forward makes the inputs of every layer; the layer as the steps before have left it makes
    queries, keys and outputs of them.

    Args:
        source: the checkpoint.
        folder: that it lies in.
        steps: all of the recipe, in order.
        text: to run on.
        skip_refused: as for the steps themselves.
        most_tokens: where to stop.

    Returns:
        By the name of the layer and the number of the step.

    Raises:
        UsageError: the model cannot be run, or the text is not of its kind.
    """
    wanted = [number for number, step in enumerate(steps) if step.needs_text]
    listeners: dict[str, list[_Listener]] = {}
    for site in source.sites:
        read = source.read(site)
        for number in wanted:
            if steps[number].layers is not None and site.layer not in (steps[number].layers or ()):
                continue
            now = rewrite_layer(read, steps[:number], skip_refused=skip_refused)
            listener = _Listener(number, now.weights.to(torch.float64), read.scoring, read.weights)
            listeners.setdefault(site.name, []).append(listener)
    model = open_model(folder)
    with model.watch(source, [site for site in source.sites if site.name in listeners]):
        for window in model.windows(text, most_tokens):
            model.outputs(window)
            for name, heard in listeners.items():
                for listener in heard:
                    listener.hear(model.seen[name])
    return {
        name: {listener.step: listener.result() for listener in heard} for name, heard in listeners.items()
    }


@final
class _Listener:
    """Gathers the moments of one layer for one step."""

    def __init__(
        self, step: int, weights: AttentionWeights, scoring: Scoring, read: AttentionWeights
    ) -> None:
        self.step = step
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
