"""Apply rewrites to one attention layer, as a whole or a few groups of heads at a time.

Of a large layer, only a few groups of heads are in float64 at once. A rewrite that depends on all heads takes
two passes over the groups: one to measure them and one to change them. Between passes only the stored weights
are kept, so nothing is rounded. A small layer is the case of one group, which is kept between passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from triptych.algebra import rewrites
from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import (
    Layer,
    LayerRewrite,
    OtherReaders,
    Rewrite,
    RewriteRecord,
    RewriteRefusedError,
)
from triptych.algebra.rewrites.legality import require_finite, with_chains
from triptych.algebra.slices import groups_of, heads_of, joined, joined_links, separable
from triptych.algebra.weights import SIDES, AttentionWeights, Chain, Link, Side
from triptych.checkpoints.layer import AttentionLayer
from triptych.rewriting.certificate import StepRecord
from triptych.rewriting.memory import Workspace

# Above so many numbers in a layer's maps, groups of heads are taken one after the other: 32 MiB in float64,
# and less than that for a map. Larger pieces are slower: the system hands out fresh memory for each.
MOST_NUMBERS = 1 << 22

Found = TypeVar("Found")


@final
@dataclass(frozen=True, eq=False)
class RewrittenLayer:
    """A layer after the rewrites.

    Attributes:
        weights: the new weights, in float64 or in the dtype that was read.
        kept: the heads that are left, in order; None if all are, unchanged.
        records: the records of all rewrites, done or refused.
    """

    weights: AttentionWeights
    kept: tuple[int, ...] | None
    records: tuple[StepRecord, ...]

    @property
    def changed(self) -> bool:
        return any(not record.refused for record in self.records)

    @property
    def took_up_norm(self) -> bool:
        """Whether the maps have taken up the norm before the layer."""
        return any(record.rewrite == "fold_norm" and not record.refused for record in self.records)

    @property
    def bounded(self) -> bool:
        """Whether the function changed by more than rounding."""
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
    """Rewrite a layer in float64.

    Args:
        read: the layer.
        steps: the rewrites, in order.
        skip_refused: whether a refused rewrite is skipped and recorded instead of raising an error.
        longest_text: the number of positions that the model is made for.
        moments: moments of the layer before a rewrite, by its number in `steps`, for data-aware rewrites.
        others: other maps that read the norm of the layer, and take it up together with the layer.
        most_numbers: layers with more parameters are rewritten a few groups of heads at a time, if all
            rewrites treat groups by themselves.

    Raises:
        RewriteRefusedError: a rewrite would change the layer's function; the message gives the reason and
            the layer.
    """
    mine = _steps_of(read, steps)
    runs = _runs_of(read, [step for _, step in mine], most_numbers)
    return _Passes(read, mine, runs, skip_refused, longest_text, moments or {}, others).result()


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
    """Yield a layer after the rewrites in float64; a large one in parts of a few groups of heads.

    A part is valid until the next one is requested. Arguments and errors as those of `rewrite_layer`.
    """
    mine = _steps_of(read, steps)
    runs = _runs_of(read, [step for _, step in mine], most_numbers)
    if any(step.at_end for _, step in mine):
        runs = [(0, read.weights.num_heads)]
    yield from _Passes(read, mine, runs, skip_refused, longest_text, moments or {}, others).layers()


def _steps_of(read: AttentionLayer, steps: Sequence[Rewrite]) -> list[tuple[int, LayerRewrite]]:
    """The rewrites that apply to a layer, with their numbers.

    Raises:
        RewriteRefusedError: the layer has weights that cannot be rewritten.
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


def _runs_of(read: AttentionLayer, steps: Sequence[LayerRewrite], most_numbers: int) -> list[tuple[int, int]]:
    """Runs of heads that can go through rewrites one after the other; one run for layers that go whole.

    Rewrites must treat groups of heads by themselves, those at the end apart that only copy numbers.
    """
    weights = read.weights
    at_end = [step for step in steps if step.at_end]
    if (
        sum(link.weight.numel() for link in weights.links()) > most_numbers
        and all(step.by_groups and not step.needs_text for step in steps)
        and list(steps[len(steps) - len(at_end) :]) == at_end
        and not any(step.selects for step in at_end[1:])
        and separable(weights)
    ):
        return groups_of(weights, most_numbers)
    return [(0, weights.num_heads)]


def shape_of(weights: AttentionWeights) -> AttentionWeights:
    """The weights on the "meta" device, for costs."""
    return weights.mapped(lambda tensor: tensor.to("meta"))


class _Done(NamedTuple):
    """What a rewrite did to some heads: the shapes before and after, and whether it was anything."""

    record: RewriteRecord
    before: AttentionWeights
    after: AttentionWeights
    acted: bool


class _Part(NamedTuple):
    """Some heads between two rewrites.

    Attributes:
        start: the number of the first of them in the layer as read; `stop`: that after the last.
        before: the heads as read, float64; None if they are all heads.
        layer: the current heads; None if none are left.
        left_bias: the output bias if no heads are left.
        done: the records, by the place of the rewrite.
    """

    start: int
    stop: int
    before: AttentionWeights | None
    layer: Layer | None
    left_bias: Tensor | None
    done: dict[int, _Done]


class _Chosen(NamedTuple):
    """The heads that a rewrite leaves, of `num_heads`; the layer afterwards, or its shapes."""

    kept: tuple[int, ...]
    record: RewriteRecord
    after: AttentionWeights
    num_heads: int


class _Stored(NamedTuple):
    """What is kept of some heads after the rewrites, besides their maps.

    Attributes:
        shapes: of the heads; None if none is left.
        o_bias: what they add to it, in float64; it is cast when all have added to it.
        passed_on: what they would add to it with their value bias in it; None without one.
        seen: of the heads, by the rewrite that sorts them.
        done: by the place of the rewrite.
    """

    shapes: AttentionWeights | None
    o_bias: Tensor | None
    passed_on: Tensor | None
    seen: tuple[Tensor, ...]
    done: dict[int, _Done]


@final
class _PartRefusedError(Exception):
    """A rewrite is refused for some heads."""

    def __init__(self, place: int, refused: RewriteRefusedError) -> None:
        super().__init__(str(refused))
        self.place, self.refused = place, refused


@final
class _Passes:
    """A layer whose heads go through the rewrites in runs of whole groups, or all at once.

    A rewrite that is refused for some heads is refused for all, and the pass begins again without it.
    """

    def __init__(
        self,
        read: AttentionLayer,
        steps: Sequence[tuple[int, LayerRewrite]],
        runs: Sequence[tuple[int, int]],
        skip_refused: bool,
        longest_text: int,
        moments: Mapping[int, Moments],
        others: OtherReaders | None,
    ) -> None:
        self._read, self._runs = read, runs
        self._skip_refused, self._longest_text, self._others = skip_refused, longest_text, others
        self._steps = [step for _, step in steps]
        self._moments = [moments.get(number) for number, _ in steps]
        self._refused: dict[int, str] = {}
        self._chosen: dict[int, _Chosen] = {}
        self._whole = len(runs) == 1
        self._held: tuple[_Part, int] | None = None  # all heads, and how many rewrites are done
        # Numbers are copied when they are stored. Rewrites after one that only copies do so, too.
        ends = (place for place, step in enumerate(self._steps) if step.at_end and not self._whole)
        self._at_end = range(next(ends, len(steps)), len(steps))

    def result(self) -> RewrittenLayer:
        self._choose(self._at_end.start)
        if self._whole:
            (part,) = self._of_all(len(self._steps), lambda: lambda part: part)
            assert part.layer is not None
            records = {place: self._record(place, [part.done]) for place in range(len(self._steps))}
            return RewrittenLayer(part.layer.weights, self._kept(), self._said(records))
        at_end = [(place, self._steps[place]) for place in self._at_end]
        sorts = next((step for _, step in at_end if step.selects), None)
        stored: _Storage | None = None

        def begin() -> Callable[[_Part], _Stored]:
            nonlocal stored
            stored = _Storage(self._read.weights, self._copies())
            return partial(stored.take, sorts=sorts)

        parts = self._of_all(self._at_end.start, begin)
        assert stored is not None
        records = {
            place: self._record(place, [part.done for part in parts]) for place in range(self._at_end.start)
        }
        order: tuple[int, ...] | None = None
        for place, step in at_end:
            if step.selects:
                left = [part for part in parts if part.shapes is not None]
                shapes = _joined([part.shapes for part in left if part.shapes is not None])
                try:
                    done, order = step.select(shapes, _side_by_side([part.seen for part in left]))
                except RewriteRefusedError as refused:
                    self._refuse(place, refused)
                else:
                    self._chosen[place] = _Chosen(order, done.record, shapes, shapes.num_heads)
                    records[place] = done.record
        weights = stored.together(parts, self._kept(), order)
        del stored
        layer = Layer(self._read.site.name, weights, self._longest_text)
        del weights  # a layer may be large
        for place, step in at_end:
            if not step.selects:
                try:
                    done = step.apply(layer)
                except RewriteRefusedError as refused:
                    self._refuse(place, refused)
                    continue
                layer = replace(layer, weights=done.weights)
                records[place] = done.record
        return RewrittenLayer(layer.weights, self._kept(), self._said(records))

    def layers(self) -> Iterator[Layer]:
        """Yield the heads after all rewrites in float64, run by run; each is valid until the next one."""
        self._choose(len(self._steps))
        if self._skip_refused:
            self._of_all(len(self._steps), lambda: lambda part: None)  # what is refused is known from here on
        try:
            for part in self._parts(len(self._steps)):
                if part.layer is not None:
                    yield replace(part.layer, moments=None)
        except _PartRefusedError as found:
            self._refuse(found.place, found.refused)

    def _parts(self, upto: int) -> Iterator[_Part]:
        """Yield every run of heads after the first rewrites."""
        workspace = Workspace()
        for start, stop in self._runs:
            part, first = self._held or (self._begun(start, stop, workspace), 0)
            for place in range(first, upto):
                if place not in self._refused and part.layer is not None:
                    part = self._after(part, part.layer, place)
                if self._whole:
                    self._held = part, place + 1
            yield part
            del part

    def _begun(self, start: int, stop: int, workspace: Workspace) -> _Part:
        read, before = self._read.weights, None
        if self._whole:
            weights = read.to(torch.float64)
        else:
            weights = before = workspace.cast(heads_of(read, start, stop), torch.float64)
            if start and read.o_bias is not None:  # that of the layer is with the first heads
                weights = before = replace(weights, o_bias=torch.zeros_like(read.o_bias, dtype=torch.float64))
        name = self._read.site.name
        layer = Layer(name, weights, self._longest_text, others=self._others, first_head=start)
        return _Part(start, stop, before, layer, None, {})

    def _after(self, part: _Part, layer: Layer, place: int) -> _Part:
        if place in self._chosen:
            return self._left(part, layer, place)
        layer = replace(layer, moments=self._moments[place])
        try:
            done = self._steps[place].apply(layer)
        except RewriteRefusedError as refused:
            raise _PartRefusedError(place, refused) from None
        shapes = shape_of(layer.weights), shape_of(done.weights)
        one = _Done(done.record, *shapes, done.weights is not layer.weights)
        return part._replace(layer=replace(layer, weights=done.weights), done={**part.done, place: one})

    def _left(self, part: _Part, layer: Layer, place: int) -> _Part:
        """Those of the heads chosen that are in a part."""
        weights, chosen = layer.weights, self._chosen[place]
        if self._whole:
            self._chosen[place] = chosen._replace(after=shape_of(chosen.after))  # a layer may be large
            return part._replace(layer=replace(layer, weights=chosen.after))
        first = layer.first_head
        here = [head - first for head in chosen.kept if first <= head < first + weights.num_heads]
        if not here:
            return part._replace(layer=None, left_bias=weights.o_bias)
        if len(chosen.kept) == chosen.num_heads:
            return part
        served = {side: chosen.after.num_heads // chosen.after.chain(side)[0].copies for side in SIDES}
        layer = replace(
            layer,
            weights=rewrites.leave_heads(weights, here, served),
            first_head=sum(head < first for head in chosen.kept),
        )
        return part._replace(layer=layer)

    def _of_all(self, upto: int, begin: Callable[[], Callable[[_Part], Found]]) -> list[Found]:
        """Measure every run after the first rewrites. If one is refused, begin again without it."""
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
        """Collect what the first rewrites need of all heads."""
        for place, step in enumerate(self._steps[:upto]):
            if not step.selects:
                continue
            found = self._of_all(place, lambda place=place: partial(self._look, place))  # type: ignore[misc]
            if place in self._refused:
                continue
            left = [looked for looked in found if looked is not None]
            whole = left[0][0] if self._whole else _joined([shapes for shapes, _ in left])
            try:
                done, kept = step.select(whole, _side_by_side([seen for _, seen in left]))
            except RewriteRefusedError as refused:
                self._refuse(place, refused)
            else:
                self._chosen[place] = _Chosen(kept, done.record, done.weights, whole.num_heads)

    def _look(self, place: int, part: _Part) -> tuple[AttentionWeights, tuple[Tensor, ...]] | None:
        """What a rewrite has to know of some heads, and their shapes; of all heads their weights."""
        if part.layer is None:
            return None
        weights, layer = part.layer.weights, replace(part.layer, moments=self._moments[place])
        try:
            return weights if self._whole else shape_of(weights), self._steps[place].look(layer)
        except RewriteRefusedError as refused:
            self._refuse(place, refused)
            return None

    def _copies(self) -> dict[Side, int]:
        """How many maps each side has after the rewrites."""
        shapes = [chosen.after for chosen in self._chosen.values()]
        last = shapes[-1] if shapes else self._read.weights
        return {side: last.chain(side)[0].copies for side in SIDES}

    def _kept(self) -> tuple[int, ...] | None:
        kept: tuple[int, ...] | None = None
        for chosen in self._chosen.values():
            kept = chosen.kept if kept is None else tuple(kept[head] for head in chosen.kept)
        return kept

    def _record(self, place: int, parts: Sequence[dict[int, _Done]]) -> RewriteRecord | None:
        """Join the records of a rewrite over all parts."""
        if place in self._refused:
            return None
        if place in self._chosen:
            return self._chosen[place].record
        done = [part[place] for part in parts if place in part]
        if self._whole:
            return done[0].record
        acted = [one.record for one in done if one.acted] or [one.record for one in done]
        before, after = _joined([one.before for one in done]), _joined([one.after for one in done])
        return rewrites.of_groups(acted, before, after)

    def _said(self, records: Mapping[int, RewriteRecord | None]) -> tuple[StepRecord, ...]:
        return tuple(
            StepRecord(rewrite=step.name, refused=self._refused[place])
            if (record := records.get(place)) is None
            else StepRecord.of(step.name, record, self._read.cache_bytes)
            for place, step in enumerate(self._steps)
        )


@final
class _Storage:
    """A layer into which heads come part by part, in the dtype and the order in memory that was read.

    There is one tensor for each side from the start: many small ones would leave gaps, as large as the layer.
    """

    def __init__(self, read: AttentionWeights, copies: Mapping[Side, int]) -> None:
        self._read = read
        self._sides = {side: _Maps(read.chain(side)[0], copies[side]) for side in SIDES}
        self._first: AttentionWeights | None = None

    def take(self, part: _Part, *, sorts: LayerRewrite | None) -> _Stored:
        """Cast some heads; maps left alone are not copied as long as all are."""
        if part.layer is None:
            for side in SIDES:
                self._sides[side].change()
            return _Stored(None, _added(part, part.left_bias), None, (), part.done)
        after = part.layer.weights
        as_read = heads_of(self._read, part.start, part.stop)
        for side in SIDES:
            alone = part.before is not None and after.chain(side) is part.before.chain(side)
            self._sides[side].add((as_read if alone else after).chain(side)[0], alone=alone)
        if self._first is None:
            first = with_chains(replace(after, o_bias=None), dict.fromkeys(SIDES, ()))
            self._first = first.to(self._read.dtype)
        bias = after.head_bias("v")
        passed_on = None if bias is None else torch.einsum("hv,hvo->o", bias, after.W_O)
        seen = () if sorts is None else sorts.look(part.layer)
        return _Stored(shape_of(after), _added(part, after.o_bias), passed_on, seen, part.done)

    def together(
        self, parts: Sequence[_Stored], kept: Sequence[int] | None, order: Sequence[int] | None
    ) -> AttentionWeights:
        """Join all heads; to be called once.

        Args:
            parts: what was said of them.
            kept: which of the heads that were read they are, in the order they are put in; None for all.
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
        semantics = self._read.semantics if kept is None else self._read.semantics.of_heads(kept)
        semantics = replace(semantics, scale=self._first.scale)
        return replace(self._first, num_heads=heads, q=q, k=k, v=v, o=o, semantics=semantics, o_bias=o_bias)


@final
class _Maps:
    """Collects the maps of one side."""

    def __init__(self, read: Link, copies: int) -> None:
        self._read, self._copies = read, copies
        self._alone: list[Link] = []
        self._weight: Tensor | None = None
        self._biases: list[tuple[int, Tensor | None]] = []
        self._filled, self._rows, self._columns = 0, 0, 0

    def add(self, link: Link, *, alone: bool) -> None:
        """Add maps; `alone` if they did not change."""
        if alone and self._weight is None:
            self._alone.append(link)
        else:
            self.change()
            self._put(link)

    def change(self) -> None:
        """Note that not all maps are unchanged."""
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
        """Drop all biases."""
        self.change()
        self._biases = [(copies, None) for copies, _ in self._biases]

    def together(self) -> Link | None:
        """Join the maps; None if they did not change. To be called once."""
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


def _added(part: _Part, bias: Tensor | None) -> Tensor | None:
    """What heads add to the output bias; None where it still is the zero that stands for the first heads'."""
    return None if part.before is not None and part.start and bias is part.before.o_bias else bias


def _some_passed_on(parts: Sequence[AttentionWeights]) -> bool:
    """Whether some groups of heads gave their value bias to the output's, as ranks that cannot carry it do.

    Then all do, as they would have together.
    """
    return len({part.v[0].bias is None for part in parts}) > 1


def _joined(parts: Sequence[AttentionWeights]) -> AttentionWeights:
    if _some_passed_on(parts):
        parts = [replace(part, v=(replace(part.v[0], bias=None),)) for part in parts]
    return joined(parts)
