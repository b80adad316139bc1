"""What attention layers do on a text: second moments for the rewrites that look at data."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import final

import torch

from triptych.algebra.moments import Moments, MomentsGatherer
from triptych.algebra.weights import AttentionWeights
from triptych.checkpoints.layer import AttentionLayer, AttentionSource, Site
from triptych.errors import UsageError
from triptych.rewriting.inputs import before_gain
from triptych.rewriting.layers import RewrittenLayer
from triptych.rewriting.running import RunnableModel, Seen, open_model

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
    """Moments of layers as they are before a step, over a text.

    The model's own forward makes the inputs of every layer; the layer as the steps before have left it makes
    queries, keys and outputs of them. What it is given each time it is used counts alike, in models that use
    one layer several times.

    Args:
        source: the checkpoint.
        folder: that it lies in.
        sites: of the layers.
        before: a layer through all steps before this one.
        text: to run on.
        most_tokens: where to stop.
        most_bytes: layers that need more are listened to in several passes, as many in each as that allows.

    Returns:
        By the name of the layer.

    Raises:
        UsageError: the model cannot be run, or the text is not of its kind; a layer that has lost heads with
            norms of their own.
    """
    found: dict[str, Moments] = {}
    model: RunnableModel | None = None
    for together in _within(source, sites, most_bytes):
        listeners = {site.name: _listener(source.read(site), before) for site in together}
        model = model or open_model(folder)
        with model.watch(source, together):
            for window in model.windows(text, most_tokens):
                model.outputs(window)
                for name, listener in listeners.items():
                    for seen in model.seen[name]:
                        listener.hear(seen)
        found |= {name: listener.result() for name, listener in listeners.items()}
    return found


def _within(source: AttentionSource, sites: Sequence[Site], most_bytes: int) -> Iterator[list[Site]]:
    """Layers in order, as many together as take so many bytes, or one."""
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
    """Of a layer's maps and moments, in float64; those of keys count as those of queries."""
    widths = [weights.multiplied(side).d_out for side in ("q", "k", "v")]
    return 8 * (weights.num_parameters + weights.num_heads * sum(width * (width + 1) for width in widths))


def _listener(read: AttentionLayer, before: Callable[[AttentionLayer], RewrittenLayer]) -> "_Listener":
    now = before(read)
    require_heads_without_norms(read, now.kept)
    return _Listener(now.weights.to(torch.float64), read.weights)


def require_heads_without_norms(read: AttentionLayer, kept: Sequence[int] | None) -> None:
    """Refuse to measure heads of which some are gone, where what stands outside the maps is each head's own.

    Raises:
        UsageError: heads are gone, and those that are left have norms of their own, or together.
    """
    semantics = read.weights.semantics
    if kept is None or list(kept) == list(range(read.weights.num_heads)):
        return
    norms = [norm for norm in (semantics.q_norm, semantics.k_norm) if norm is not None]
    if any(norm.over == "all heads" or norm.of_each_head for norm in norms):
        raise UsageError(
            f"{read.site.name}: heads with norms of their own are gone or in another order: what the "
            "others do on a text cannot be measured here; put the step that looks at the text first"
        )


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
