"""Second moments of attention layers on a calibration text, for the data-aware rewrites."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import final

import torch

from triptych.algebra.moments import Moments, MomentsGatherer
from triptych.algebra.weights import AttentionWeights
from triptych.checkpoints.layer import AttentionLayer, AttentionSource, Site
from triptych.opening import Seen, TextModel, open_text_model
from triptych.rewriting.inputs import before_gain
from triptych.rewriting.layers import RewrittenLayer

MOST_TOKENS = 1 << 16
# What is held of layers in one pass over the text: their maps and moments, in float64. More take more passes.
MOST_BYTES = 1 << 31


def gather_moments(
    source: AttentionSource,
    folder: Path,
    sites: Sequence[Site],
    before: Callable[[AttentionLayer], RewrittenLayer],
    text: Path,
    *,
    most_tokens: int = MOST_TOKENS,
    most_bytes: int = MOST_BYTES,
) -> dict[str, Moments]:
    """Gather the moments of layers over a text, as the layers are before a step.

    The inputs of every layer come from the forward pass of the original model. Queries, keys and outputs are
    computed by the layer after the previous steps. In models that apply one layer several times, all uses
    count alike.
    """
    found: dict[str, Moments] = {}
    model: TextModel | None = None
    for together in _within(source, sites, most_bytes):
        listeners = {site.name: _listener(source.read(site), before) for site in together}
        model = model or open_text_model(folder)
        for window in model.windows(text, most_tokens):
            for name, uses in model.inputs(window, source, together).items():
                for seen in uses:
                    listeners[name].hear(seen)
        found |= {name: listener.result() for name, listener in listeners.items()}
    return found


def _within(source: AttentionSource, sites: Sequence[Site], most_bytes: int) -> Iterator[list[Site]]:
    """Group layers in order, within a number of bytes, at least one layer each."""
    together: list[Site] = []
    left = most_bytes
    for site in sites:
        needed = _bytes_held(source.read(site).weights)
        if together and needed > left:
            yield together
            together, left = [], most_bytes
        together.append(site)
        left -= needed
    if together:
        yield together


def _bytes_held(weights: AttentionWeights) -> int:
    """Bytes of a layer's maps and moments in float64; keys count like queries."""
    widths = [weights.multiplied(side).d_out for side in ("q", "k", "v")]
    return 8 * (weights.num_parameters + weights.num_heads * sum(width * (width + 1) for width in widths))


def _listener(read: AttentionLayer, before: Callable[[AttentionLayer], RewrittenLayer]) -> "_Listener":
    return _Listener(before(read).weights.to(torch.float64), read.weights)


@final
class _Listener:
    """Gathers the moments of one layer."""

    def __init__(self, weights: AttentionWeights, read: AttentionWeights) -> None:
        self._weights = weights
        self._norm = read.norm if weights.norm is None else None
        self._memory_norm = read.memory_norm if weights.memory_norm is None else None
        self._gatherer = MomentsGatherer()

    def hear(self, found: Seen) -> None:
        x = before_gain(found.x.double(), self._norm)
        memory = None if found.memory is None else before_gain(found.memory.double(), self._memory_norm)
        self._gatherer.add(self._weights, x, memory)

    def result(self) -> Moments:
        return self._gatherer.result()
