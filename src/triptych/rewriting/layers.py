"""One attention layer through the steps of a rewrite, and what its output did on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import OtherReaders, RewriteRefusedError
from triptych.algebra.rewrites.legality import require_finite, with_chains
from triptych.algebra.slices import groups_of, heads_of, joined, scoring_of, separable
from triptych.algebra.weights import SIDES, AttentionWeights, Chain, Side
from triptych.checkpoints.layer import AttentionLayer
from triptych.rewriting.certificate import Cost, StepRecord
from triptych.rewriting.steps import AttentionStep, Layer, Step

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
    steps: Sequence[Step],
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
    weights = read.weights
    mine = [
        (n, step)
        for n, step in enumerate(steps)
        if isinstance(step, AttentionStep) and (step.layers is None or read.site.layer in step.layers)
    ]
    try:
        require_finite("rewrite", weights)
    except RewriteRefusedError as refused:
        raise refused.at(read.site.name) from None
    number_bytes = weights.dtype.itemsize
    runs = [(0, weights.num_heads)]
    size = sum(link.weight.numel() for link in weights.links())
    by_groups = size > most_numbers and all(step.by_groups for _, step in mine)
    if by_groups and separable(weights, read.scoring):
        runs = groups_of(weights, most_numbers)
    if len(runs) == 1:
        layer = Layer(read.site.name, weights.to(torch.float64), read.scoring, longest_text, others=others)
        done, found, kept = _through(layer, mine, skip_refused, moments or {}, number_bytes)
        return RewrittenLayer(done, kept, _together([found], weights.o[-1].d_out))
    parts, records = _Parts(weights), []
    for start, stop in runs:
        part = heads_of(weights, start, stop).to(torch.float64)
        scoring = scoring_of(read.scoring, start, stop)
        layer = Layer(read.site.name, part, scoring, longest_text, others=others)
        done, found, kept = _through(layer, mine, skip_refused, moments or {}, number_bytes)
        parts.add(start, stop, part, done)
        records.append(found)
    return RewrittenLayer(parts.together(), kept, _together(records, weights.o[-1].d_out))


class _Parts:
    """Groups of heads after the steps, in the dtype that was read; maps left alone are not copied."""

    def __init__(self, weights: AttentionWeights) -> None:
        self._weights = weights
        self._parts: list[AttentionWeights] = []
        self._alone: set[Side] = set(SIDES)
        self._o_bias: Tensor | None = None

    def add(self, start: int, stop: int, before: AttentionWeights, after: AttentionWeights) -> None:
        """The heads from `start` to `stop`, in float64, before and after."""
        alone = {side for side in SIDES if after.chain(side) is before.chain(side)}
        self._alone &= alone
        if after.o_bias is not None:  # cast once, when all have added to it
            self._o_bias = after.o_bias if self._o_bias is None else self._o_bias + after.o_bias
        as_read = heads_of(self._weights, start, stop)
        changed = with_chains(replace(after, o_bias=None), dict.fromkeys(alone, ())).to(self._weights.dtype)
        self._parts.append(with_chains(changed, {side: as_read.chain(side) for side in alone}))

    def together(self) -> AttentionWeights:
        """All of them."""
        empty: dict[Side, Chain] = dict.fromkeys(self._alone, ())
        whole = joined([with_chains(part, empty) for part in self._parts])
        o_bias = None if self._o_bias is None else self._o_bias.to(self._weights.dtype)
        return with_chains(
            replace(whole, o_bias=o_bias), {side: self._weights.chain(side) for side in self._alone}
        )


def with_same_heads(layer: Layer, kept: Sequence[int] | None) -> Layer:
    """The layer with what belongs to each head in the order of the heads that are left."""
    if kept is None or layer.scoring.sinks is None:
        return layer
    return replace(layer, scoring=replace(layer.scoring, sinks=layer.scoring.sinks[list(kept)]))


class _Done(NamedTuple):
    """What a step did to a part of a layer, and whether there was an output bias in it."""

    record: StepRecord
    bias_before: bool
    bias_after: bool


def _through(
    layer: Layer,
    steps: Sequence[tuple[int, AttentionStep]],
    skip_refused: bool,
    moments: Mapping[int, Moments],
    number_bytes: int,
) -> tuple[AttentionWeights, list[_Done], tuple[int, ...] | None]:
    records: list[_Done] = []
    kept: tuple[int, ...] | None = None
    for number, step in steps:
        layer = replace(layer, moments=moments.get(number))
        try:
            order = step.kept_heads(layer)
            done = step.apply(layer)
        except RewriteRefusedError as refused:
            if not skip_refused:
                raise refused.at(layer.name) from None
            records.append(_Done(StepRecord(rewrite=step.rewrite, refused=refused.reason), False, False))
            continue
        if order is not None:
            before = kept or tuple(range(layer.weights.num_heads))
            kept = tuple(before[head] for head in order)
        record = StepRecord.of(step.rewrite, done.record, number_bytes)
        biases = (weights.o_bias is not None for weights in (layer.weights, done.weights))
        records.append(_Done(record, *biases))
        layer = with_same_heads(replace(layer, weights=done.weights), order)
    return layer.weights, records, kept


def _together(records: Sequence[Sequence[_Done]], width: int) -> tuple[StepRecord, ...]:
    """The records of a layer that was taken in parts, as one for each step.

    Args:
        records: of each part.
        width: of the output bias, which every part that has one counts.
    """
    if len(records) == 1:
        return tuple(done.record for done in records[0])
    found = []
    for same in zip(*records, strict=True):
        refused = next((done.record for done in same if done.record.refused), None)
        first = same[0].record
        if refused is not None:
            found.append(refused)
            continue
        twice_before = max(0, sum(done.bias_before for done in same) - 1)
        twice_after = max(0, sum(done.bias_after for done in same) - 1)
        update = {
            "before": _sum([done.record.before for done in same], twice_before * width),
            "after": _sum([done.record.after for done in same], twice_after * width),
            "notes": tuple(dict.fromkeys(said for done in same for said in done.record.notes)),
            "bound": max(done.record.bound for done in same),
        }
        found.append(first.model_copy(update=update))
    return tuple(found)


def _sum(costs: Sequence[Cost | None], counted_twice: int) -> Cost:
    total = reduce(Cost.plus, [cost for cost in costs if cost is not None])
    return total.model_copy(update={"parameters": total.parameters - counted_twice})
