"""One attention layer through the steps of a rewrite, and what its output did on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.algebra.bounds import output_bound, score_bound
from triptych.algebra.function import attend
from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import FORMS, RewriteRefusedError, fold_norm
from triptych.algebra.rewrites.channels import move
from triptych.algebra.rewrites.legality import require_finite, with_chains
from triptych.algebra.rewrites.planes import rotary_move
from triptych.algebra.slices import groups_of, heads_of, joined, scoring_of, separable
from triptych.algebra.weights import SIDES, AttentionWeights, Chain, Norm, Side
from triptych.certificates import Cost, Measured, Probes, StepRecord
from triptych.checkpoints.layer import AttentionLayer
from triptych.rewrite_steps import Layer, Step

PROBES = Probes(count=2, length=16, seed=2017)
# Above so many numbers in a layer's maps, groups of heads are taken one after the other: 32 MiB in float64,
# and less than that for a map. Larger pieces are slower: the system hands out fresh memory for each.
_MOST_NUMBERS = 1 << 22


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
    most_numbers: int = _MOST_NUMBERS,
) -> RewrittenLayer:
    """Put a layer through the steps, in float64.

    Args:
        read: the layer.
        steps: in order.
        skip_refused: whether a refused step is left out and recorded, or an error.
        longest_text: positions that the model is made for.
        moments: of the layer before the step of that number in `steps`, for those that look at a text.
        most_numbers: layers with larger maps are taken a few groups of heads at a time, where all steps treat
            groups by themselves.

    Raises:
        RewriteRefusedError: a step would change what the layer computes, with the reason and the layer.
    """
    weights = read.weights
    mine = [
        (n, step) for n, step in enumerate(steps) if step.layers is None or read.site.layer in step.layers
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
        layer = Layer(read.site.name, weights.to(torch.float64), read.scoring, longest_text)
        done, found, kept = _through(layer, mine, skip_refused, moments or {}, number_bytes)
        return RewrittenLayer(done, kept, _together([found], weights.o[-1].d_out))
    parts, records = _Parts(weights), []
    for start, stop in runs:
        part = heads_of(weights, start, stop).to(torch.float64)
        layer = Layer(read.site.name, part, scoring_of(read.scoring, start, stop), longest_text)
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
    steps: Sequence[tuple[int, Step]],
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


def measure_change(
    before: AttentionLayer,
    after: AttentionLayer,
    probes: Probes = PROBES,
    *,
    bounded: bool = False,
    most_numbers: int = _MOST_NUMBERS,
) -> Measured:
    """How far the output of a layer moves on random inputs, both as saved.

    Args:
        before: the original layer.
        after: the rewritten one, read back from what was saved.
        probes: the inputs: normal numbers, standardised at every position as a norm without gain leaves them;
            each layer gets them through the gain and shift of its own norm.
        bounded: whether to look as well for what the weights allow on other inputs.
        most_numbers: larger layers are measured a few groups of heads at a time.
    """
    x, memory = _probes(before, probes)
    reference = _output(before, x, memory, torch.float64, most_numbers)
    moved = _output(after, x, memory, torch.float64, most_numbers)
    difference = moved - reference
    own = before.weights.dtype
    own_error = (_output(before, x, memory, own, most_numbers).double() - reference).norm()
    new_error = (_output(after, x, memory, own, most_numbers).double() - reference).norm()
    # Where the dtype is float64 itself, what it rounds is all that there is to compare with.
    floor = torch.finfo(own).eps * reference.norm() * 1e-3 + torch.finfo(torch.float64).tiny
    scores, outputs = _bounds(before, after, most_numbers) if bounded else (None, None)
    return Measured(
        worst_absolute=float(difference.abs().max()),
        relative=float(difference.norm() / reference.norm().clamp(min=torch.finfo(torch.float64).tiny)),
        error_ratio=float(new_error / own_error.clamp(min=float(floor))),
        score_bound=scores,
        output_bound=outputs,
    )


def _probes(layer: AttentionLayer, probes: Probes) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(probes.seed)
    weights = layer.weights

    def standard(width: int) -> Tensor:
        found = torch.randn(probes.count, probes.length, width, dtype=torch.float64, generator=generator)
        found = found - found.mean(dim=-1, keepdim=True)
        return found / found.square().mean(dim=-1, keepdim=True).sqrt()

    x = standard(weights.d_model)
    if weights.traits.kind != "cross":
        return x, None
    return x, standard(weights.k[0].d_in if weights.k else weights.d_model)


def _output(
    layer: AttentionLayer, x: Tensor, memory: Tensor | None, dtype: torch.dtype, most_numbers: int
) -> Tensor:
    weights, scoring = layer.weights, layer.scoring
    x = _through_norm(x, weights.norm).to(dtype)
    if memory is not None:
        memory = _through_norm(memory, weights.memory_norm).to(dtype)
    size = sum(link.weight.numel() for link in weights.links())
    if size <= most_numbers or not separable(weights, scoring):
        return attend(weights.to(dtype), scoring, x, memory)
    total = torch.zeros((), dtype=torch.float64)  # each head rounds in its dtype, their sum does not
    for start, stop in groups_of(weights, most_numbers):
        part = heads_of(weights, start, stop).to(dtype)
        total = total + attend(part, scoring_of(scoring, start, stop), x, memory).double()
    return total


def _through_norm(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    x = x * (norm.gain.double() + norm.offset)
    return x if norm.shift is None else x + norm.shift.double()


def _bounds(
    before: AttentionLayer, after: AttentionLayer, most_numbers: int
) -> tuple[float | None, float | None]:
    """Largest moves of a score and of a head's output that the weights allow; None where none is known."""
    one, other = before.weights, after.weights
    if one.num_heads != other.num_heads or sum(link.weight.numel() for link in one.links()) > most_numbers:
        return None, None
    if before.scoring.q_norm is not None or before.scoring.between or before.scoring.clip is not None:
        return None, None
    one, other = _with_norm_folded(one), _with_norm_folded(other)
    scores = score_bound(one, other, before.scoring.rotation)
    return float(scores.max()), float(output_bound(one, other).max())


def move_of_forms(before: AttentionLayer, after: AttentionLayer) -> float | None:
    """The largest Frobenius norm by which a form of a head moves; None if heads cannot be compared.

    W_QK of rotary heads moves as its root mean square over long distances, biases as rows (`rotary_move`).
    """
    one, other = before.weights.to(torch.float64), after.weights.to(torch.float64)
    if one.num_heads != other.num_heads or before.scoring.between:
        return None
    if not _is_same_norm(one.norm, other.norm) or not _is_same_norm(one.memory_norm, other.memory_norm):
        one, other = _with_norm_folded(one), _with_norm_folded(other)
    if before.scoring.rotation is None:
        return max(float(move(one, other, form).form.max()) for form in FORMS)
    of_scores = rotary_move(one, other, before.scoring.rotation)
    return max(float(of_scores.max()), float(move(one, other, "ov").form.max()))


def _is_same_norm(one: Norm | None, other: Norm | None) -> bool:
    if one is None or other is None:
        return one is other
    shifts = (norm.gain.new_zeros(1) if norm.shift is None else norm.shift for norm in (one, other))
    return torch.equal(one.gain, other.gain) and torch.equal(*shifts)


def _with_norm_folded(weights: AttentionWeights) -> AttentionWeights:
    """In float64, the gain and shift of its norm in its maps; without what has no map to take them."""
    wide = weights.to(torch.float64)
    if wide.norm is None and wide.memory_norm is None:
        return wide
    everything = frozenset(SIDES)
    free = replace(
        wide, traits=replace(wide.traits, norm="pre", other_norm_readers="", bias_slots=everything)
    )
    return fold_norm(free).weights
