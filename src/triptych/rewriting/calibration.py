"""Statistics of a text for rewrites: second moments of layers, and the worth of each head to the loss."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from triptych.core.algebra.weights import AttentionWeights
from triptych.core.checkpoints.source import Source
from triptych.core.checkpoints.stored_layers import (
    AttentionLayer,
    AttentionSource,
    Site,
)
from triptych.errors import UsageError
from triptych.rewriting.functions.moments import Moments, MomentsGatherer
from triptych.rewriting.inputs import before_gain
from triptych.running.measuring import (
    MOST_TOKENS_OF_WORTH,
    cut_windows,
    measure_worth,
)
from triptych.running.opening import (
    TextReader,
    open_reader,
    open_text_reader,
    read_tab_pairs,
    read_whole_text,
)

MOST_TOKENS = 1 << 16
# Memory limit for maps and moments of layers in one pass over the text, in float64. Larger models need
# several passes.
MOST_BYTES = 1 << 31


def gather_moments(
    source: AttentionSource,
    files: Source | Path,
    sites: Sequence[Site],
    before: Callable[[AttentionLayer], AttentionWeights],
    text: Path,
    *,
    served: bool = False,
    most_tokens: int = MOST_TOKENS,
    most_bytes: int = MOST_BYTES,
) -> dict[str, Moments]:
    """Gather the moments of layers over a text, in float64, after the previous steps of a recipe.

    Inputs come from the original model; queries, keys and values are computed by the layer after the
    previous steps. `served` also gathers the moments for a latent. Layers sharing weights contribute equally.
    """
    found: dict[str, Moments] = {}
    model: TextReader | None = None
    for together in _groups_within(source, sites, most_bytes):
        layers = {}
        for site in together:
            read = source.read(site)
            weights = before(read)
            # Steps may have folded the norm: the rewritten layer then reads inputs before its gain.
            norm = read.weights.norm if weights.norm is None else None
            memory_norm = (
                read.weights.memory_norm if weights.memory_norm is None else None
            )
            layers[site.name] = (
                weights,
                norm,
                memory_norm,
                MomentsGatherer(served=served),
            )
        model = model or open_text_reader(files)
        _require_run(model, together)
        for window in model.windows(text, most_tokens):
            for name, uses in model.inputs(window, source, together).items():
                weights, norm, memory_norm, gatherer = layers[name]
                for seen in uses:
                    memory = (
                        None
                        if seen.memory is None
                        else before_gain(seen.memory.double(), memory_norm)
                    )
                    gatherer.add(weights, before_gain(seen.x.double(), norm), memory)
        found |= {name: gatherer.result() for name, (*_, gatherer) in layers.items()}
    return found


def _groups_within(
    source: AttentionSource, sites: Sequence[Site], most_bytes: int
) -> Iterator[list[Site]]:
    """Group layers in order, within `most_bytes` and with at least one layer per group."""
    together: list[Site] = []
    left = most_bytes
    for site in sites:
        weights = source.read(site).weights
        widths = [
            weights.multiplied(side).d_out for side in ("q", "k", "v")
        ]  # keys count like queries
        moments = weights.num_heads * sum(width * (width + 1) for width in widths)
        needed = 8 * (weights.num_parameters + moments)
        if together and needed > left:
            yield together
            together = []
            left = most_bytes
        together.append(site)
        left -= needed
    if together:
        yield together


def _require_run(model: TextReader, sites: Sequence[Site]) -> None:
    for site in sites:
        if not model.runs(site):
            raise UsageError(
                f"{site.module} is not run on the calibration text: leave it out with layers"
            )


def measure_head_losses(
    files: Source | Path, sites: Sequence[Site], text: Path
) -> dict[str, tuple[float, ...]]:
    """Measure how much the original model's loss rises without each head, in nats per token.

    Layers that share their weights lose a head at once.
    """
    reader = open_reader(files, "cpu")
    _require_run(reader, sites)
    # A translator reads pairs of lines, a language model the whole text.
    if reader.translates:
        pairs = [*read_tab_pairs(text)]
        windows = cut_windows(
            reader, [one for one, _ in pairs], [other for _, other in pairs]
        )
    else:
        windows = cut_windows(reader, [read_whole_text(text)])
    places = {site.name: reader.layers_of(site) for site in sites}
    together = [[place.name for place in own] for own in places.values()]
    worth = measure_worth(
        reader, windows.within(MOST_TOKENS_OF_WORTH), "zero", together=together
    )
    return {
        name: worth.of(first.stack, first.block) for name, (first, *_) in places.items()
    }
