"""One attention layer through the steps of a rewrite, and what its output did on the way."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import Layer, LayerRewrite, OtherReaders, Rewrite, RewriteRefusedError
from triptych.algebra.rewrites.legality import require_finite
from triptych.algebra.slices import groups_of, separable
from triptych.algebra.weights import AttentionWeights
from triptych.checkpoints.layer import AttentionLayer
from triptych.rewriting.certificate import StepRecord
from triptych.rewriting.parts import LayerInParts, can_go_in_parts

# Above so many numbers in a layer's maps, groups of heads are taken one after the other: 32 MiB in float64,
# and less than that for a map. Larger pieces are slower: the system hands out fresh memory for each.
MOST_NUMBERS = 1 << 22


@final
@dataclass(frozen=True, eq=False)
class RewrittenLayer:
    """A layer after the steps.

    Attributes:
        weights: new ones; float64, or the dtype that was read where that holds all that is stored.
        kept: which of the heads are left, in order; None for all as they were.
        records: of every step, done or refused.
    """

    weights: AttentionWeights
    kept: tuple[int, ...] | None
    records: tuple[StepRecord, ...]

    @property
    def changed(self) -> bool:
        """Whether any step was done."""
        return any(not record.refused for record in self.records)

    @property
    def took_up_norm(self) -> bool:
        """Whether the gain of the norm before is in its maps."""
        return any(record.rewrite == "fold_norm" and not record.refused for record in self.records)

    @property
    def bounded(self) -> bool:
        """Whether more than rounding has moved."""
        return any(record.tier == "bounded" for record in self.records)


def rewrite_layer(
    read: AttentionLayer,
    steps: Sequence[Rewrite],
    *,
    skip_refused: bool,
    longest_text: int = 2048,
    moments: Mapping[int, Moments] | None = None,
    others: OtherReaders | None = None,
    most_numbers: int = MOST_NUMBERS,
) -> RewrittenLayer:
    """Put a layer through the steps, in float64.

    Args:
        read: the layer.
        steps: in order.
        skip_refused: whether a refused step is left out and recorded, or an error.
        longest_text: positions that the model is made for.
        moments: of the layer before the step of that number in `steps`, for those that look at a text.
        others: what else reads the norm of the layer, and takes it up if the layer does.
        most_numbers: layers with larger maps are taken a few groups of heads at a time, where all steps treat
            groups by themselves.

    Raises:
        RewriteRefusedError: a step would change what the layer computes, with the reason and the layer.
    """
    mine = _steps_of(read, steps)
    if (parts := _in_parts(read, mine, skip_refused, longest_text, others, most_numbers)) is not None:
        return RewrittenLayer(*parts.through())
    return _whole(read, mine, skip_refused, longest_text, others, moments or {})


def rewritten_parts(
    read: AttentionLayer,
    steps: Sequence[Rewrite],
    *,
    skip_refused: bool,
    longest_text: int = 2048,
    moments: Mapping[int, Moments] | None = None,
    others: OtherReaders | None = None,
    most_numbers: int = MOST_NUMBERS,
) -> Iterator[Layer]:
    """A layer after the steps in float64, a few groups of heads at a time where it is large.

    What is given holds until the next is asked for.

    Arguments and errors as those of `rewrite_layer`.
    """
    mine = _steps_of(read, steps)
    ends = any(step.at_end for _, step in mine)
    parts = None if ends else _in_parts(read, mine, skip_refused, longest_text, others, most_numbers)
    if parts is not None:
        yield from parts.layers()
        return
    done = _whole(read, mine, skip_refused, longest_text, others, moments or {})
    scoring = read.scoring if done.kept is None else read.scoring.of_heads(done.kept)
    yield Layer(read.site.name, done.weights, scoring, longest_text)


def _steps_of(read: AttentionLayer, steps: Sequence[Rewrite]) -> list[tuple[int, LayerRewrite]]:
    """The steps that are for a layer, with their numbers.

    Raises:
        RewriteRefusedError: the layer has numbers that no step can take.
    """
    try:
        require_finite("rewrite", read.weights)
    except RewriteRefusedError as refused:
        raise refused.at(read.site.name) from None
    return [
        (number, step)
        for number, step in enumerate(steps)
        if isinstance(step, LayerRewrite) and (step.layers is None or read.site.layer in step.layers)
    ]


def _in_parts(
    read: AttentionLayer,
    steps: Sequence[tuple[int, LayerRewrite]],
    skip_refused: bool,
    longest_text: int,
    others: OtherReaders | None,
    most_numbers: int,
) -> LayerInParts | None:
    """The layer in parts; None if it is small, or has to be taken as a whole."""
    weights, mine = read.weights, [step for _, step in steps]
    if sum(link.weight.numel() for link in weights.links()) <= most_numbers:
        return None
    if not can_go_in_parts(mine) or not separable(weights, read.scoring):
        return None
    runs = groups_of(weights, most_numbers)
    if len(runs) == 1:
        return None
    return LayerInParts(read, mine, runs, skip_refused=skip_refused, longest_text=longest_text, others=others)


def _whole(
    read: AttentionLayer,
    steps: Sequence[tuple[int, LayerRewrite]],
    skip_refused: bool,
    longest_text: int,
    others: OtherReaders | None,
    moments: Mapping[int, Moments],
) -> RewrittenLayer:
    layer = Layer(read.site.name, read.weights.to(torch.float64), read.scoring, longest_text, others=others)
    records: list[StepRecord] = []
    kept: tuple[int, ...] | None = None
    for number, step in steps:
        layer = replace(layer, moments=moments.get(number))
        order = None
        try:
            if step.selects:
                done, order = step.select(layer.weights, step.look(layer))
            else:
                done = step.apply(layer)
        except RewriteRefusedError as refused:
            if not skip_refused:
                raise refused.at(layer.name) from None
            records.append(StepRecord(rewrite=step.name, refused=refused.reason))
            continue
        if order is not None:
            before = kept or tuple(range(layer.weights.num_heads))
            kept = tuple(before[head] for head in order)
            layer = replace(layer, scoring=layer.scoring.of_heads(order))
        layer = replace(layer, weights=done.weights)
        records.append(StepRecord.of(step.name, done.record, read.cache_bytes))
    return RewrittenLayer(layer.weights, kept, tuple(records))
