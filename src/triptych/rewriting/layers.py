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
from triptych.algebra.slices import groups_of, heads_of, separable
from triptych.algebra.weights import SIDES, AttentionWeights, Side
from triptych.checkpoints.layer import AttentionLayer
from triptych.rewriting.certificate import StepRecord
from triptych.rewriting.memory import Workspace
from triptych.rewriting.parts import Done, Part, Storage, Stored, joined_shapes, shape_of

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
    """Rewrite a layer in float64."""
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
    """The rewrites that apply to a layer, with their numbers."""
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


class _Chosen(NamedTuple):
    """The heads that a rewrite leaves, of `num_heads`; the layer afterwards, or its shapes."""

    kept: tuple[int, ...]
    record: RewriteRecord
    after: AttentionWeights
    num_heads: int


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
        self._held: tuple[Part, int] | None = None  # all heads, and how many rewrites are done
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
        stored: Storage | None = None

        def begin() -> Callable[[Part], Stored]:
            nonlocal stored
            stored = Storage(self._read.weights, self._copies())
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
                shapes = joined_shapes([part.shapes for part in left if part.shapes is not None])
                try:
                    done, order = step.select(shapes, _side_by_side([part.seen for part in left]))
                except RewriteRefusedError as refused:
                    self._refuse(place, refused)
                else:
                    self._chosen[place] = _Chosen(order, done.record, shapes, shapes.num_heads)
                    records[place] = done.record
        weights = stored.together(parts, order)
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

    def _parts(self, upto: int) -> Iterator[Part]:
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

    def _begun(self, start: int, stop: int, workspace: Workspace) -> Part:
        read, before = self._read.weights, None
        if self._whole:
            weights = read.to(torch.float64)
        else:
            weights = before = workspace.cast(heads_of(read, start, stop), torch.float64)
            if start and read.o_bias is not None:  # that of the layer is with the first heads
                weights = before = replace(weights, o_bias=torch.zeros_like(read.o_bias, dtype=torch.float64))
        name = self._read.site.name
        layer = Layer(name, weights, self._longest_text, others=self._others, first_head=start)
        return Part(start, stop, before, layer, None, {})

    def _after(self, part: Part, layer: Layer, place: int) -> Part:
        if place in self._chosen:
            return self._left(part, layer, place)
        layer = replace(layer, moments=self._moments[place])
        try:
            done = self._steps[place].apply(layer)
        except RewriteRefusedError as refused:
            raise _PartRefusedError(place, refused) from None
        shapes = shape_of(layer.weights), shape_of(done.weights)
        one = Done(done.record, *shapes, done.weights is not layer.weights)
        return part._replace(layer=replace(layer, weights=done.weights), done={**part.done, place: one})

    def _left(self, part: Part, layer: Layer, place: int) -> Part:
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

    def _of_all(self, upto: int, begin: Callable[[], Callable[[Part], Found]]) -> list[Found]:
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
            whole = left[0][0] if self._whole else joined_shapes([shapes for shapes, _ in left])
            try:
                done, kept = step.select(whole, _side_by_side([seen for _, seen in left]))
            except RewriteRefusedError as refused:
                self._refuse(place, refused)
            else:
                self._chosen[place] = _Chosen(kept, done.record, done.weights, whole.num_heads)

    def _look(self, place: int, part: Part) -> tuple[AttentionWeights, tuple[Tensor, ...]] | None:
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

    def _record(self, place: int, parts: Sequence[dict[int, Done]]) -> RewriteRecord | None:
        """Join the records of a rewrite over all parts."""
        if place in self._refused:
            return None
        if place in self._chosen:
            return self._chosen[place].record
        done = [part[place] for part in parts if place in part]
        if self._whole:
            return done[0].record
        acted = [one.record for one in done if one.acted] or [one.record for one in done]
        before, after = (
            joined_shapes([one.before for one in done]),
            joined_shapes([one.after for one in done]),
        )
        return rewrites.of_groups(acted, before, after)

    def _said(self, records: Mapping[int, RewriteRecord | None]) -> tuple[StepRecord, ...]:
        return tuple(
            StepRecord(rewrite=step.name, refused=self._refused[place])
            if (record := records.get(place)) is None
            else StepRecord.of(step.name, record, self._read.cache_bytes)
            for place, step in enumerate(self._steps)
        )


def _side_by_side(seen: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(numbers) for numbers in zip(*seen, strict=True))
