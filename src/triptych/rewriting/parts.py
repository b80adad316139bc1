"""Parts of a layer, some of its heads each, and the layer that they are put together into."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.algebra.rewrites import Layer, LayerRewrite, RewriteRecord
from triptych.algebra.rewrites.legality import with_chains
from triptych.algebra.slices import heads_of, joined, joined_links
from triptych.algebra.weights import SIDES, AttentionWeights, Chain, Link, Side


def shape_of(weights: AttentionWeights) -> AttentionWeights:
    """The weights on the "meta" device, for costs."""
    return weights.mapped(lambda tensor: tensor.to("meta"))


class Done(NamedTuple):
    """What a rewrite did to some heads: the shapes before and after, and whether it was anything."""

    record: RewriteRecord
    before: AttentionWeights
    after: AttentionWeights
    acted: bool


class Part(NamedTuple):
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
    done: dict[int, Done]


class Stored(NamedTuple):
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
    done: dict[int, Done]


@final
class Storage:
    """A layer into which heads come part by part, in the dtype and the order in memory that was read.

    There is one tensor for each side from the start: many small ones would leave gaps, as large as the layer.
    """

    def __init__(self, read: AttentionWeights, copies: Mapping[Side, int]) -> None:
        self._read = read
        self._sides = {side: _Maps(read.chain(side)[0], copies[side]) for side in SIDES}
        self._first: AttentionWeights | None = None

    def take(self, part: Part, *, sorts: LayerRewrite | None) -> Stored:
        """Cast some heads; maps left alone are not copied as long as all are."""
        if part.layer is None:
            for side in SIDES:
                self._sides[side].change()
            return Stored(None, _added(part, part.left_bias), None, (), part.done)
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
        return Stored(shape_of(after), _added(part, after.o_bias), passed_on, seen, part.done)

    def together(self, parts: Sequence[Stored], order: Sequence[int] | None) -> AttentionWeights:
        """Join all heads; to be called once."""
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
        semantics = left[0].semantics.joined([shapes.semantics for shapes in left[1:]])
        if order is not None:
            semantics = semantics.of_heads(order)
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


def _added(part: Part, bias: Tensor | None) -> Tensor | None:
    """What heads add to the output bias; None where it still is the zero that stands for the first heads'."""
    return None if part.before is not None and part.start and bias is part.before.o_bias else bias


def _some_passed_on(parts: Sequence[AttentionWeights]) -> bool:
    """Whether some groups of heads gave their value bias to the output's, as ranks that cannot carry it do.

    Then all do, as they would have together.
    """
    return len({part.v[0].bias is None for part in parts}) > 1


def joined_shapes(parts: Sequence[AttentionWeights]) -> AttentionWeights:
    """The shapes of a layer from those of its parts, as `Storage.together` joins their maps."""
    if _some_passed_on(parts):
        parts = [replace(part, v=(replace(part.v[0], bias=None),)) for part in parts]
    return joined(parts)
