"""A large layer through the steps, a few groups of heads at a time, so that only those are in float64.

What a step must know of all heads (which of them do least, say) is looked for in one pass over the groups,
and done in the next. Between passes nothing is kept but the numbers that were read: no step rounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from triptych.algebra import rewrites
from triptych.algebra.rewrites import Layer, LayerRewrite, OtherReaders, RewriteRecord, RewriteRefusedError
from triptych.algebra.rewrites.legality import with_chains
from triptych.algebra.slices import heads_of, joined, joined_links, scoring_of
from triptych.algebra.weights import SIDES, AttentionWeights, Chain, Link, Side
from triptych.checkpoints.layer import AttentionLayer
from triptych.rewriting.certificate import StepRecord
from triptych.rewriting.memory import Workspace

Found = TypeVar("Found")


class Through(NamedTuple):
    """A layer after the steps.

    Attributes:
        weights: in the dtype that was read.
        kept: which heads are left, in order; None for all as they were.
        records: of every step, done or refused.
    """

    weights: AttentionWeights
    kept: tuple[int, ...] | None
    records: tuple[StepRecord, ...]


@final
class LayerInParts:
    """A layer whose heads go through the steps in runs of whole groups.

    A step that is refused for some heads is refused for all, and begins again without it.
    """

    def __init__(
        self,
        read: AttentionLayer,
        steps: Sequence[LayerRewrite],
        runs: Sequence[tuple[int, int]],
        *,
        skip_refused: bool,
        longest_text: int,
        others: OtherReaders | None = None,
    ) -> None:
        """Nothing is done yet.

        Args:
            read: the layer, of which `heads_of` can tell the heads apart.
            steps: those that it is for, in order; all of them treat groups of heads by themselves.
            runs: of heads, whole groups each.
            skip_refused: whether a refused step is left out and recorded, or an error.
            longest_text: positions that the model is made for.
            others: what else reads the norm of the layer.
        """
        self._read, self._runs = read, runs
        self._skip_refused, self._longest_text, self._others = skip_refused, longest_text, others
        self._steps = tuple(steps)
        self._refused: dict[int, str] = {}
        self._chosen: dict[int, _Chosen] = {}
        end = next((place for place, step in enumerate(steps) if step.at_end), len(steps))
        # Steps after one that only copies numbers do so, too: `can_go_in_parts` looks at that.
        self._at_end = range(end, len(steps))

    def through(self) -> Through:
        """All of it."""
        self._choose(self._at_end.start)
        at_end = [(place, self._steps[place]) for place in self._at_end]
        sorts = next((step for _, step in at_end if step.selects), None)
        whole: _Whole | None = None

        def begin() -> Callable[[_Part], _Rewritten]:
            nonlocal whole
            whole = _Whole(self._read.weights, self._copies())
            return partial(whole.take, sorts=sorts)

        parts = self._of_all(self._at_end.start, begin)
        assert whole is not None
        records = {place: self._record(place, parts) for place in range(self._at_end.start)}
        kept, order = self._kept(), None
        for place, step in at_end:
            if not step.selects:
                continue
            seen = _side_by_side([part.seen for part in parts if part.shapes is not None])
            left = [part.shapes for part in parts if part.shapes is not None]
            try:
                done, order = step.select(_shapes_of(left, any(part.biased for part in parts)), seen)
            except RewriteRefusedError as refused:
                self._refuse(place, refused)
                continue
            before = kept or tuple(range(self._read.weights.num_heads))
            kept = tuple(before[head] for head in order)
            records[place] = done.record
        weights = whole.together(parts, order)
        del whole
        layer = Layer(self._read.site.name, weights, self._read.scoring, self._longest_text)
        del weights  # a layer may be large
        for place, step in at_end:
            if step.selects:
                continue
            try:
                done = step.apply(layer)
            except RewriteRefusedError as refused:
                self._refuse(place, refused)
                continue
            layer = replace(layer, weights=done.weights)
            records[place] = done.record
        said = (self._said(place, records) for place in range(len(self._steps)))
        return Through(layer.weights, kept, tuple(said))

    def layers(self) -> Iterator[Layer]:
        """Its heads after all steps in float64, run by run; each holds until the next is asked for."""
        if self._at_end:
            raise ValueError(f"{self._steps[-1].name} is done to all heads at once")
        self._choose(len(self._steps))
        if self._skip_refused:
            self._of_all(len(self._steps), lambda: lambda part: None)  # what is refused is known from here on
        for part in self._parts(len(self._steps)):
            if part.layer is not None:
                yield part.layer

    def _parts(self, upto: int) -> Iterator["_Part"]:
        """Every run of heads after the first steps."""
        workspace = Workspace()
        for start, stop in self._runs:
            weights = workspace.cast(heads_of(self._read.weights, start, stop), torch.float64)
            scoring = scoring_of(self._read.scoring, start, stop)
            layer = Layer(
                self._read.site.name,
                weights,
                scoring,
                self._longest_text,
                others=self._others,
                first_head=start,
            )
            part = _Part(start, stop, weights, layer, None, {})
            for place in range(upto):
                if place not in self._refused and part.layer is not None:
                    part = self._after(part, part.layer, place)
            yield part
            del weights, layer, part

    def _after(self, part: "_Part", layer: Layer, place: int) -> "_Part":
        if place in self._chosen:
            return self._chosen[place].of(part, layer, place)
        try:
            done = self._steps[place].apply(layer)
        except RewriteRefusedError as refused:
            raise _PartRefusedError(place, refused) from None
        shapes = _Shapes(shape_of(layer.weights), shape_of(done.weights))
        one = _Done(done.record, shapes, done.weights is not layer.weights)
        return part._replace(layer=replace(layer, weights=done.weights), done={**part.done, place: one})

    def _of_all(self, upto: int, begin: Callable[[], Callable[["_Part"], Found]]) -> list[Found]:
        """What is found of every run after the first steps, from the beginning where one refuses a step."""
        while True:
            look = begin()
            try:
                return [look(part) for part in self._parts(upto)]
            except _PartRefusedError as found:
                self._refuse(found.place, found.refused)

    def _refuse(self, place: int, refused: RewriteRefusedError) -> None:
        if not self._skip_refused:
            raise refused.at(self._read.site.name) from None
        self._refused[place] = refused.reason

    def _choose(self, upto: int) -> None:
        """Find out what the first steps have to know of all heads."""
        for place, step in enumerate(self._steps[:upto]):
            if not step.selects:
                continue
            found = self._of_all(place, lambda step=step: partial(_Looked.of, step=step))  # type: ignore[misc]
            shapes = [looked.shapes for looked in found if looked.shapes is not None]
            whole = _shapes_of(shapes, any(looked.biased for looked in found))
            seen = _side_by_side([looked.seen for looked in found if looked.shapes is not None])
            try:
                done, kept = step.select(whole, seen)
            except RewriteRefusedError as refused:
                self._refuse(place, refused)
            else:
                self._chosen[place] = _Chosen(kept, done.record, done.weights, whole.num_heads)

    def _copies(self) -> dict[Side, int]:
        """How many maps each side has after the steps."""
        shapes = [chosen.shapes for chosen in self._chosen.values()]
        last = shapes[-1] if shapes else self._read.weights
        return {side: last.chain(side)[0].copies for side in SIDES}

    def _kept(self) -> tuple[int, ...] | None:
        kept: tuple[int, ...] | None = None
        for chosen in self._chosen.values():
            kept = chosen.kept if kept is None else tuple(kept[head] for head in chosen.kept)
        return kept

    def _record(self, place: int, parts: Sequence["_Rewritten"]) -> RewriteRecord | None:
        """What a step did to all of them."""
        if place in self._refused:
            return None
        if place in self._chosen:
            return self._chosen[place].record
        # A part that has gone by now has only its output bias in the layer.
        biased = [False, False]
        for part in parts:
            if place in part.done:
                for at, shape in enumerate(part.done[place].shapes):
                    biased[at] = biased[at] or shape.o_bias is not None
            else:
                biased = [there or part.left_bias is not None for there in biased]
        done = [part.done[place] for part in parts if place in part.done]
        before, after = (_shapes_of([one.shapes[at] for one in done], biased[at]) for at in range(2))
        acted = [one.record for one in done if one.acted] or [one.record for one in done]
        return rewrites.of_groups(acted, before, after)

    def _said(self, place: int, records: dict[int, RewriteRecord | None]) -> StepRecord:
        name, record = self._steps[place].name, records.get(place)
        if record is None:
            return StepRecord(rewrite=name, refused=self._refused[place])
        return StepRecord.of(name, record, self._read.cache_bytes)


def can_go_in_parts(steps: Sequence[LayerRewrite]) -> bool:
    """Whether steps treat groups of heads by themselves, those at the end apart that only copy numbers."""
    at_end = [step for step in steps if step.at_end]
    return (
        all(step.by_groups and not step.needs_text for step in steps)
        and list(steps[len(steps) - len(at_end) :]) == at_end
        and not any(step.selects for step in at_end[1:])
    )


def shape_of(weights: AttentionWeights) -> AttentionWeights:
    """The shapes of weights, for costs."""
    return weights.mapped(lambda tensor: tensor.to("meta"))


@final
class _PartRefusedError(Exception):
    """A step is refused for some heads."""

    def __init__(self, place: int, refused: RewriteRefusedError) -> None:
        super().__init__(str(refused))
        self.place, self.refused = place, refused


class _Shapes(NamedTuple):
    """Of some heads, before a step and after it."""

    before: AttentionWeights
    after: AttentionWeights


class _Done(NamedTuple):
    """What a step did to some heads, and whether that was anything."""

    record: RewriteRecord
    shapes: _Shapes
    acted: bool


class _Part(NamedTuple):
    """Some heads on their way.

    Attributes:
        start: the first of them as they were read; `stop`: the one after the last.
        before: as they were read, float64.
        layer: as they are now; None if none is left.
        left_bias: the output bias of heads of which none is left.
        done: by the place of the step.
    """

    start: int
    stop: int
    before: AttentionWeights
    layer: Layer | None
    left_bias: Tensor | None
    done: dict[int, _Done]


class _Looked(NamedTuple):
    """What a step saw of some heads."""

    shapes: AttentionWeights | None
    seen: tuple[Tensor, ...]
    biased: bool

    @classmethod
    def of(cls, part: _Part, step: LayerRewrite) -> "_Looked":
        if part.layer is None:
            return cls(None, (), part.left_bias is not None)
        weights = part.layer.weights
        return cls(shape_of(weights), step.look(part.layer), weights.o_bias is not None)


@final
@dataclass(frozen=True, eq=False)
class _Chosen:
    """The heads of a layer that a step leaves.

    Attributes:
        kept: in order.
        record: of the whole layer.
        shapes: of the layer afterwards.
        num_heads: before.
    """

    kept: tuple[int, ...]
    record: RewriteRecord
    shapes: AttentionWeights
    num_heads: int

    def of(self, part: _Part, layer: Layer, place: int) -> _Part:
        """Those of them that are in a part."""
        first, weights = layer.first_head, layer.weights
        here = [head - first for head in self.kept if first <= head < first + weights.num_heads]
        if not here:
            return part._replace(layer=None, left_bias=weights.o_bias)
        if len(self.kept) == self.num_heads:
            return part
        served = {side: self.shapes.num_heads // self.shapes.chain(side)[0].copies for side in SIDES}
        layer = replace(
            layer,
            weights=rewrites.leave_heads(weights, here, served),
            scoring=layer.scoring.of_heads(here),
            first_head=sum(head < first for head in self.kept),
        )
        return part._replace(layer=layer)


@final
@dataclass(frozen=True, eq=False)
class _Rewritten:
    """What is to be known of some heads after the steps, besides their maps.

    Attributes:
        shapes: of the heads; None if none is left.
        o_bias: what they add to it, in float64; it is cast when all have added to it.
        passed_on: what they would add to it with their value bias in it; None without one.
        left_bias: the same of heads of which none is left.
        seen: of the heads, by the step that sorts them.
        done: by the place of the step.
    """

    shapes: AttentionWeights | None
    o_bias: Tensor | None
    passed_on: Tensor | None
    left_bias: Tensor | None
    seen: tuple[Tensor, ...]
    done: dict[int, _Done]

    @property
    def biased(self) -> bool:
        """Whether they add to the output bias."""
        return self.o_bias is not None


@final
class _Whole:
    """A layer into which heads come part by part, in the dtype and the order in memory that was read.

    There is one tensor for each side from the start: many small ones would leave gaps, as large as the layer.
    """

    def __init__(self, read: AttentionWeights, copies: Mapping[Side, int]) -> None:
        self._read = read
        self._sides = {side: _Maps(read.chain(side)[0], copies[side]) for side in SIDES}
        self._first: AttentionWeights | None = None

    def take(self, part: _Part, *, sorts: LayerRewrite | None) -> _Rewritten:
        """Cast some heads; maps left alone are not copied as long as all are."""
        if part.layer is None:
            for side in SIDES:
                self._sides[side].change()
            return _Rewritten(None, part.left_bias, None, part.left_bias, (), part.done)
        after = part.layer.weights
        as_read = heads_of(self._read, part.start, part.stop)
        for side in SIDES:
            alone = after.chain(side) is part.before.chain(side)
            self._sides[side].add((as_read if alone else after).chain(side)[0], alone=alone)
        if self._first is None:
            self._first = with_chains(replace(after, o_bias=None), dict.fromkeys(SIDES, ())).to(
                self._read.dtype
            )
        bias = after.head_bias("v")
        passed_on = None if bias is None else torch.einsum("hv,hvo->o", bias, after.W_O)
        seen = () if sorts is None else sorts.look(part.layer)
        return _Rewritten(shape_of(after), after.o_bias, passed_on, None, seen, part.done)

    def together(self, parts: Sequence[_Rewritten], order: Sequence[int] | None) -> AttentionWeights:
        """All of them; to be called once.

        Args:
            parts: what was said of them.
            order: to put them in; None as they are.
        """
        assert self._first is not None
        left = [part.shapes for part in parts if part.shapes is not None]
        heads = sum(shapes.num_heads for shapes in left)
        if order is not None and list(order) == list(range(heads)):
            order = None
        biases = [part.o_bias for part in parts if part.o_bias is not None]
        if _some_passed_on(left):
            biases += [part.passed_on for part in parts if part.passed_on is not None]
            self._sides["v"].without_bias()
        chains: dict[Side, Chain] = {}
        for side in SIDES:
            link = self._sides.pop(side).together()
            if link is None and order is None:
                chains[side] = self._read.chain(side)
                continue
            link = link or self._read.chain(side)[0]
            served = heads // link.copies
            places = None if order is None else [head // served for head in order[::served]]
            chains[side] = (joined_links([link], places),)
        o_bias = torch.stack(biases).sum(dim=0).to(self._read.dtype) if biases else None
        q, k, v, o = (chains[side] for side in SIDES)
        return replace(self._first, num_heads=heads, q=q, k=k, v=v, o=o, o_bias=o_bias)


@final
class _Maps:
    """The maps of one side, as they come."""

    def __init__(self, read: Link, copies: int) -> None:
        self._read, self._copies = read, copies
        self._alone: list[Link] = []
        self._weight: Tensor | None = None
        self._biases: list[tuple[int, Tensor | None]] = []
        self._filled, self._rows, self._columns = 0, 0, 0

    def add(self, link: Link, *, alone: bool) -> None:
        """The next ones; `alone` if they are as they were read."""
        if alone and self._weight is None:
            self._alone.append(link)
        else:
            self.change()
            self._put(link)

    def change(self) -> None:
        """From now on they are not all as they were read."""
        if self._weight is not None:
            return
        if self._copies == self._read.copies:
            self._weight = torch.empty_like(self._read.weight)
        else:
            self._weight = self._read.weight.mT.new_empty(self._copies, *self._read.weight.mT.shape[1:]).mT
        alone, self._alone = self._alone, []
        for link in alone:
            self._put(link)

    def without_bias(self) -> None:
        """Leave out the bias of all."""
        self.change()
        self._biases = [(copies, None) for copies, _ in self._biases]

    def together(self) -> Link | None:
        """All of them; None if they are as they were read. To be called once."""
        if self._weight is None:
            return None
        weight, self._weight = self._weight, None
        if weight.shape[1:] != (self._rows, self._columns):
            weight = weight[:, : self._rows, : self._columns].mT.contiguous().mT
        bias = None
        if any(found is not None for _, found in self._biases):
            bias = weight.new_zeros(len(weight), self._columns)
            at = 0
            for copies, found in self._biases:
                if found is not None:
                    bias[at : at + copies, : found.shape[1]] = found
                at += copies
        return replace(self._read, weight=weight, bias=bias)

    def _put(self, link: Link) -> None:
        assert self._weight is not None
        copies, rows, columns = link.weight.shape
        place = self._weight[self._filled : self._filled + copies]
        if place.shape != link.weight.shape:
            place.zero_()
        place[:, :rows, :columns] = link.weight
        self._filled += copies
        self._rows, self._columns = max(self._rows, rows), max(self._columns, columns)
        self._biases.append((copies, link.bias))


def _side_by_side(seen: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(numbers) for numbers in zip(*seen, strict=True))


def _some_passed_on(parts: Sequence[AttentionWeights]) -> bool:
    """Whether some groups of heads gave their value bias to the output's, as ranks that cannot carry it do.

    Then all do, as they would have together.
    """
    return len({part.v[0].bias is None for part in parts}) > 1


def _without_value_bias(weights: AttentionWeights) -> AttentionWeights:
    return replace(weights, v=(replace(weights.v[0], bias=None),))


def _shapes_of(parts: Sequence[AttentionWeights], biased: bool) -> AttentionWeights:
    """The shapes of a layer from those of its heads, with an output bias or without."""
    if _some_passed_on(parts):
        parts = [_without_value_bias(part) for part in parts]
    shapes = joined(parts)
    if not biased or shapes.o_bias is not None:
        return shapes
    return replace(shapes, o_bias=torch.empty(shapes.o[-1].d_out, dtype=shapes.dtype, device="meta"))
