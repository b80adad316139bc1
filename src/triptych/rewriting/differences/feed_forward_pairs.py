"""Comparison of a feed-forward layer of A with its counterpart in B."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.core.models import ExpertsConfig, FeedForwardConfig
from triptych.rewriting.differences.affine_maps import (
    PLAIN,
    Reading,
    affine,
    rounded_rows,
)
from triptych.rewriting.differences.attention_pairs import LayerFindings
from triptych.rewriting.differences.bases import CLEAR
from triptych.rewriting.differences.matching import match, row_signature
from triptych.rewriting.differences.rounded import (
    Rounded,
    equal_numbers,
    excess,
    factor_left_alone,
    finer,
    is_same,
)
from triptych.rewriting.differences.row_maps import (
    RowMap,
    RowVerdicts,
    change_of_rows,
    compare_rows,
    differ_in_few,
    ignored_columns,
    in_blocks,
    row_signatures,
    used_rows,
)

# Activations f with f(0) = 0: the output of a unit without an input is 0.
_ZERO_AT_ZERO = frozenset(
    {"relu", "gelu", "gelu_tanh", "gelu_sigmoid", "swish", "relu_squared", "tanh"}
)
_TINY = torch.finfo(torch.float64).tiny
_FEW_UNITS = 64


@final
@dataclass(frozen=True, eq=False)
class FeedForwardView:
    """A feed-forward layer: its tensors by the names of its modules, and its input.

    Attributes:
        config: configuration.
        tensors: stored tensors, such as `inner.weight`, in their dtypes.
        read: input of the inner maps.
        scale: factor of the output.
    """

    config: FeedForwardConfig | ExpertsConfig
    tensors: Mapping[str, Tensor]
    read: Reading = PLAIN
    scale: float = 1.0

    def expert(self, number: int) -> "FeedForwardView":
        """Return an expert of a mixture as a layer."""
        assert isinstance(self.config, ExpertsConfig)
        own = ("inner.", "gate.", "outer.")
        tensors = {
            name: part[number]
            for name, part in self.tensors.items()
            if name.startswith(own)
        }
        return FeedForwardView(self.config.expert, tensors, self.read, self.scale)

    def shared(self) -> "FeedForwardView":
        """Return the shared layer of a mixture."""
        assert isinstance(self.config, ExpertsConfig)
        assert self.config.shared is not None
        prefix = "shared."
        tensors = {
            name.removeprefix(prefix): part
            for name, part in self.tensors.items()
            if name.startswith(prefix)
        }
        return FeedForwardView(self.config.shared, tensors, self.read, self.scale)


# Names of the tensors of units; any other tensor has to be equal.
_OF_UNITS = frozenset(
    map(".".join, product(("inner", "gate", "outer"), ("weight", "bias")))
)


def same_numbers(a: FeedForwardView, b: FeedForwardView) -> bool:
    """Return True if two layers have equal tensors."""
    if not a.read.same_as(b.read) or a.scale != b.scale:
        return False
    return not different_tensors(a.tensors, b.tensors)


def different_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ; a missing bias is a bias of zeros."""
    found = []
    for name in dict.fromkeys((*a, *b)):
        one = a.get(name)
        other = b.get(name)
        if one is not None and other is not None:
            if not equal_numbers(one, other):
                found.append(name)
            continue
        there = other if one is None else one
        if there is None or not name.endswith("bias") or bool(there.any()):
            found.append(name)
    return found


def compare_feed_forward(a: FeedForwardView, b: FeedForwardView) -> LayerFindings:
    """Find the rewrites that lead from one layer to another, or the reasons against them."""
    found = LayerFindings()
    if isinstance(a.config, ExpertsConfig) and isinstance(b.config, ExpertsConfig):
        _compare_experts(a, b, found)
    elif isinstance(a.config, FeedForwardConfig) and isinstance(
        b.config, FeedForwardConfig
    ):
        _UnitSearch(a, b, found).compare()
    else:
        found.differ_in_size("one is a mixture of experts and the other is not")
    if not replace(a.read, turn=None).same_as(replace(b.read, turn=None)):
        found.steps["fold_other_norms"] = True
    if is_turned(a, b):
        found.steps["turn"] = True
    return found


def is_turned(a: FeedForwardView, b: FeedForwardView) -> bool:
    """Return True if two layers are compared in another basis of the stream."""
    return a.read.turn is not None or b.read.turn is not None


def _compare_experts(
    a: FeedForwardView, b: FeedForwardView, found: LayerFindings
) -> None:
    one = a.config
    other = b.config
    assert isinstance(one, ExpertsConfig)
    assert isinstance(other, ExpertsConfig)
    if one.num_experts != other.num_experts:
        found.differ_in_size(
            f"there are {one.num_experts} and {other.num_experts} experts"
        )
        return
    order = _match_experts(a, b)
    if order != [*range(one.num_experts)]:
        found.steps["experts"] = order
    rounds = rounded_rows(a.read, b.read, a.tensors["router.weight"].shape[1])[:, None]
    dtype = dtype_of(a, b, "router.weight")
    routed = [_router(view, dtype) for view in (a, b)]
    router_b = Rounded(routed[1].numbers[..., order], routed[1].squares[..., order])
    if not is_same(routed[0], router_b, rounds):
        found.reasons.append("the router differs")
    for number, partner in enumerate(order):
        own = LayerFindings()
        _UnitSearch(a.expert(number), b.expert(partner), own).compare()
        _take_over(own, found, f"expert {number}: ")
    if one.shared is not None and other.shared is not None:
        own = LayerFindings()
        _UnitSearch(a.shared(), b.shared(), own).compare()
        _take_over(own, found, "shared layer: ")
    elif (one.shared is None) != (other.shared is None):
        found.reasons.append("one has a shared layer and the other has not")
    rest = [_rest_of_experts(view, None if view is a else order) for view in (a, b)]
    gates = [view.tensors.get("shared_gate") for view in (a, b)]
    if gates[0] is not None and gates[1] is not None:
        mapped = [
            affine(Rounded.stored(gate, dtype_of(a, b, "shared_gate")).mT, None)
            .reading(view.read)
            .rows()
            for gate, view in zip(gates, (a, b), strict=True)
            if gate is not None
        ]
        if not is_same(mapped[0], mapped[1], rounds):
            found.reasons.append("the gate of the shared layer differs")
    elif gates != [None, None]:
        found.reasons.append("one has a gate of its shared layer and the other has not")
    found.reasons += [f"{name} differs" for name in different_tensors(*rest)]


def _rest_of_experts(
    view: FeedForwardView, order: list[int] | None
) -> dict[str, Tensor]:
    """Return the tensors besides units, maps of the router and the gate of the shared layer."""
    known = (
        "inner.",
        "gate.",
        "outer.",
        "shared.",
        "shared_gate",
        "router.weight",
        "router.bias",
    )
    found = {
        name: part for name, part in view.tensors.items() if not name.startswith(known)
    }
    of_experts = ("router.correction", "router.expert_scale")
    if order is None:
        return found
    return {
        name: part[order] if name in of_experts else part
        for name, part in found.items()
    }


def _router(view: FeedForwardView, dtype: torch.dtype) -> Rounded:
    """Return the router's map with its bias as last row, `[1, d_model + 1, experts]`."""
    weight = Rounded.stored(view.tensors["router.weight"], dtype).mT
    bias = view.tensors.get("router.bias")
    return (
        affine(weight, None if bias is None else Rounded.stored(bias, dtype))
        .reading(view.read)
        .rows()
    )


def _match_experts(a: FeedForwardView, b: FeedForwardView) -> list[int]:
    assert isinstance(a.config, ExpertsConfig)
    in_place = [*range(a.config.num_experts)]
    if a.config.groups > 1 or a.config.norm_eps is not None:
        return in_place
    signatures = [
        row_signature(_router(view, torch.float64).numbers[0].mT, 0) for view in (a, b)
    ]
    partners = match(*signatures).partners
    return partners if -1 not in partners else in_place


def _take_over(own: LayerFindings, found: LayerFindings, where: str) -> None:
    found.reasons += [f"{where}{reason}" for reason in own.reasons]
    found.steps |= own.steps
    found.has_other_sizes |= own.has_other_sizes
    if own.relative is not None:
        found.relative = max(found.relative or 0.0, own.relative)


def dtype_of(a: FeedForwardView, b: FeedForwardView, name: str) -> torch.dtype:
    """Return the finer dtype of a tensor of two layers; either layer may lack the tensor."""
    dtypes = [view.tensors[name].dtype for view in (a, b) if name in view.tensors]
    return finer(dtypes[0], dtypes[-1])


class _Units(NamedTuple):
    """The hidden units of a layer, with one row per unit."""

    inner: RowMap  # maps to the values of units
    gate: RowMap | None
    outer: RowMap  # maps from units to the output

    @property
    def maps(self) -> tuple[RowMap, ...]:
        return tuple(own for own in self if own is not None)

    @property
    def read_maps(self) -> tuple[RowMap, ...]:
        """The maps that read the input of the layer."""
        return self.maps[:-1]

    def chosen(self, order: Sequence[int] | Tensor) -> "_Units":
        """Return some units in a given order."""
        return _Units(
            self.inner.chosen(order),
            None if self.gate is None else self.gate.chosen(order),
            self.outer.chosen(order),
        )


class _UnitVerdicts(NamedTuple):
    """Verdicts on the maps of units, in the order of `_Units.maps`."""

    maps: tuple[RowVerdicts, ...]

    @property
    def explained(self) -> Tensor:
        """True for units with all differences explained by rounding."""
        return torch.stack([own.explained for own in self.maps]).all(dim=0)

    def replaced(self, places: Tensor, others: "_UnitVerdicts") -> "_UnitVerdicts":
        """Return the verdicts with the verdicts on some units replaced."""
        return _UnitVerdicts(
            tuple(
                RowVerdicts(
                    own.same.index_copy(0, places, new.same),
                    own.explained.index_copy(0, places, new.explained),
                )
                for own, new in zip(self.maps, others.maps, strict=True)
            )
        )


@final
class _UnitSearch:
    """The search for the rewrites between the hidden units of two layers."""

    def __init__(
        self, a: FeedForwardView, b: FeedForwardView, found: LayerFindings
    ) -> None:
        self.a = a
        self.b = b
        self.found = found
        assert isinstance(a.config, FeedForwardConfig)
        self.config = a.config

    def compare(self) -> None:
        rest = [
            {name: part for name, part in view.tensors.items() if name not in _OF_UNITS}
            for view in (self.a, self.b)
        ]
        self.found.reasons += [f"{name} differs" for name in different_tensors(*rest)]
        one, other = (self._active(self._units(view)) for view in (self.a, self.b))
        if one.inner.width != other.inner.width or one.outer.width != other.outer.width:
            self.found.differ_in_size("the widths of what is read or written differ")
            return
        if (one.gate is None) != (other.gate is None):
            self.found.differ_in_size("one layer is gated and the other is not")
            return
        if len(one.inner) != len(other.inner):
            self.found.differ_in_size(
                f"{len(one.inner)} hidden units of A and {len(other.inner)} of B are used"
            )
            return
        self._compare_out_bias()
        in_place = self._verdicts(one, other)
        partners = self._match(one, other, in_place.explained)
        if -1 in partners:
            self.found.reasons.append("hidden units of A and B cannot be matched")
            return
        order = torch.tensor(partners)
        moved = (order != torch.arange(len(order))).nonzero().flatten()
        verdicts = in_place
        if len(moved):
            self.found.steps["permute_units"] = True
            again = self._verdicts(one.chosen(moved), other.chosen(order[moved]))
            verdicts = in_place.replaced(moved, again)
            other = other.chosen(order)
        self._compare_units(one, other, verdicts)

    def _compare_units(
        self, one: _Units, other: _Units, verdicts: _UnitVerdicts
    ) -> None:
        """Compare the units of A with their partners."""
        if self._is_unfolded(one, other):
            self.found.reasons.append(
                "the norm before it differs, and its maps have not taken it up"
            )
        scales = self.a.scale, self.b.scale
        if scales[0] != scales[1]:
            stored = [_stored_rows(own.outer) for own in (one, other)]
            if factor_left_alone(stored[0], stored[1], scales):
                self.found.reasons.append(
                    f"the factor of the output is {scales[0]:g} and {scales[1]:g}, "
                    "and the outer map has not taken it up"
                )
        same = self._same_units(one, other, verdicts)
        if not bool(same.all()) and self.a.read.centred and self.b.read.centred:
            # Whatever moved by rounding alone was not rewritten.
            only_rounded = verdicts.maps[0].explained & ~same
            if not bool(only_rounded.any()) and self._are_centred(one, other):
                same = torch.ones_like(same)
                self.found.steps["centre"] = True
        if not bool(same.all()):
            off = int((~same).sum())
            self.found.reasons.append(
                f"no rewrite leads from A to B in {off:,} of {len(same):,} hidden units"
            )
            self.found.relative = max(
                change_of_rows(mine, theirs).relative
                for mine, theirs in zip(one.maps, other.maps, strict=True)
            )

    def _are_centred(self, one: _Units, other: _Units) -> bool:
        """Return True if all units are the same but for what a centred input cannot show."""
        if any(map(differ_in_few, one.read_maps, other.read_maps)):
            return False
        # A few units come first: all of them have to be the same.
        for count in (_FEW_UNITS, len(one.inner)):
            few = (own.chosen(range(count)[: len(own.inner)]) for own in (one, other))
            mine, theirs = map(_centred, few)
            verdicts = self._verdicts(mine, theirs, is_centred=True)
            if not bool(self._same_units(mine, theirs, verdicts).all()):
                return False
        return True

    def _units(self, view: FeedForwardView) -> _Units:
        gate = self._rows(view, "gate") if "gate.weight" in view.tensors else None
        outer = view.tensors["outer.weight"].mT.contiguous()
        dtype = dtype_of(self.a, self.b, "outer.weight")
        return _Units(
            self._rows(view, "inner"),
            gate,
            RowMap(outer, dtype, scale=view.scale, written=view.read.turn),
        )

    def _stored(self, view: FeedForwardView, name: str) -> Rounded:
        return Rounded.stored(view.tensors[name], dtype_of(self.a, self.b, name))

    def _rows(self, view: FeedForwardView, part: str) -> RowMap:
        weight = f"{part}.weight"
        bias = f"{part}.bias"
        own = RowMap(
            view.tensors[weight], dtype_of(self.a, self.b, weight), read=view.read
        )
        if bias not in view.tensors:
            return own
        of_bias = dtype_of(self.a, self.b, bias)
        return replace(own, bias=view.tensors[bias], bias_dtype=of_bias)

    def _is_unfolded(self, one: _Units, other: _Units) -> bool:
        """Return True if the norms differ in a channel, and the maps that read it do not."""
        if self.a.read.same_as(self.b.read):
            return False
        maps = ([own.unturned for own in units.read_maps] for units in (one, other))
        return bool(ignored_columns(*maps).any())

    def _active(self, units: _Units) -> _Units:
        """Leave out units with zero output."""
        adds = used_rows(units.outer, with_biases=False)
        is_linear = units.gate is not None and not self.config.offset
        if is_linear or (
            units.gate is None and self.config.activation in _ZERO_AT_ZERO
        ):
            adds = adds & used_rows(units.inner, with_biases=True)
        if bool(adds.all()):
            return units
        # A sparse activation depends on the mean over all channels, so all channels stay.
        if self.config.sparsity:
            return units
        self.found.steps["drop_units"] = True
        return units.chosen(adds.nonzero().flatten())

    @property
    def _scales(self) -> bool:
        """True if scaling a unit's inner map by c and its outer map by 1 / c keeps the function."""
        if self.config.gated:
            return self.config.offset == 0 and self.config.limit is None
        return self.config.activation == "relu"

    def _match(self, one: _Units, other: _Units, in_place: Tensor) -> list[int]:
        """Return the unit of B for each unit of A; −1 for a unit without a partner.

        `in_place`: units explained by rounding at equal indices. They keep their index: signatures could
        exchange near units.
        """
        partners = [*range(len(one.inner))]
        rest = (~in_place).nonzero().flatten()
        if self._is_sparse or not len(rest):
            return partners
        signatures = [self._signature(units.chosen(rest)) for units in (one, other)]
        places = rest.tolist()
        found = match(*signatures).partners
        for own, partner in zip(places, found, strict=True):
            partners[own] = places[partner] if partner >= 0 else -1
        return partners

    @property
    def _is_sparse(self) -> bool:
        return bool(self.config.sparsity)

    def _signature(self, units: _Units) -> Tensor:
        inner = row_signatures(units.inner, 0, with_biases=True)
        outer = row_signatures(units.outer, 1, with_biases=False)
        if self._scales:
            size = inner.norm(dim=1, keepdim=True).clamp(min=_TINY)
            sign = torch.ones_like(size)
            if self.config.gated:
                sign = torch.where(inner[:, :1] < 0, -1.0, 1.0)
            inner, outer = sign * inner / size, sign * outer * size
        parts = [inner, outer]
        if units.gate is not None:
            parts.append(row_signatures(units.gate, 2, with_biases=True))
        return torch.cat(parts, dim=1)

    def _verdicts(
        self, one: _Units, other: _Units, *, is_centred: bool = False
    ) -> _UnitVerdicts:
        """Compare the maps of units at equal indices."""
        rounds = is_centred | rounded_rows(self.a.read, self.b.read, one.inner.width)
        is_scaled = self.a.scale != self.b.scale or is_turned(self.a, self.b)
        found = [
            compare_rows(mine, theirs, rounds)
            for mine, theirs in zip(one.read_maps, other.read_maps, strict=True)
        ]
        of_outer = compare_rows(one.outer, other.outer, torch.tensor([is_scaled]))
        return _UnitVerdicts((*found, of_outer))

    def _same_units(
        self, one: _Units, other: _Units, verdicts: _UnitVerdicts
    ) -> Tensor:
        """Return for each unit of A whether it is the same as its partner."""
        inner, *gate, outer = (own.same for own in verdicts.maps)
        same = inner & outer
        # A unit with another gate is another unit, whatever the factor between its other maps is.
        has_same_gate = gate[0] if gate else torch.ones_like(same)
        left = (~same & has_same_gate).nonzero().flatten()
        if self._scales and len(left):
            same[left] = self._scaled_units(one.chosen(left), other.chosen(left))
        return same & has_same_gate

    def _scaled_units(self, one: _Units, other: _Units) -> Tensor:
        """Return for each unit whether a factor between its maps leads from A to B."""
        # A unit is like a head of width 1: multiply its inner map by c, divide its outer map by c.
        found = [
            self._are_scaled(*(_ScaledUnits.of(units, rows) for units in (one, other)))
            for rows in in_blocks(one.inner.indices, one.inner.width)
        ]
        same = torch.cat(found)
        if bool(same.any()):
            self.found.steps["scale_units"] = True
        return same

    def _are_scaled(self, one: "_ScaledUnits", other: "_ScaledUnits") -> Tensor:
        inner = _weights_of_rows(one.inner, other.inner)
        outer = _weights_of_rows(one.outer, other.outer)
        fitting = inner * (one.inner.numbers * other.inner.numbers).sum(1)
        fitting = fitting + outer * (one.outer.numbers * other.outer.numbers).sum(1)
        sizes = inner * one.inner.numbers.square().sum(
            1
        ) + outer * other.outer.numbers.square().sum(1)
        factor = (fitting / sizes.clamp(min=_TINY))[:, None]
        same = excess(one.inner.times(factor), other.inner).amax(1) <= 1
        same &= excess(other.outer.times(factor), one.outer).amax(1) <= 1
        # A factor near 1 does not count as a rewrite: it would absorb single differing entries.
        moved = (one.inner.numbers * (factor - 1)).square().sum(1)
        rounding = (one.inner.squares + other.inner.squares).sum(1)
        same &= moved > CLEAR**2 * rounding
        if not self.config.gated:
            same &= factor[:, 0] > 0
        return same

    def _compare_out_bias(self) -> None:
        biases = []
        for view in (self.a, self.b):
            width = view.tensors["outer.weight"].shape[0]
            own = (
                self._stored(view, "outer.bias")
                if "outer.bias" in view.tensors
                else Rounded.exact(torch.zeros(width))
            )
            own = own.times(view.scale)
            biases.append(
                own if view.read.turn is None else view.read.turn.written(own)
            )
        is_scaled = self.a.scale != self.b.scale or is_turned(self.a, self.b)
        if not is_same(biases[0], biases[1], is_scaled):
            self.found.reasons.append("the bias of the output differs")


def _centred(units: _Units) -> _Units:
    """Return units without what a centred input cannot show."""
    inner, *gate = (replace(own, centre=True) for own in units.read_maps)
    return _Units(inner, gate[0] if gate else None, units.outer)


def _stored_rows(own: RowMap) -> Rounded:
    """Return the stored rows of a map, without factors."""
    return Rounded.stored(own.weight, own.dtype)


class _ScaledUnits(NamedTuple):
    """Some units, with the biases of their inner maps as last entries."""

    inner: Rounded
    outer: Rounded

    @classmethod
    def of(cls, units: _Units, rows: slice | Tensor) -> "_ScaledUnits":
        return cls(units.inner.with_biases(rows), units.outer.rows(rows))


def _weights_of_rows(one: Rounded, other: Rounded) -> Tensor:
    squares = (one.squares + other.squares).mean(dim=1)
    size = (one.numbers.square() + other.numbers.square()).mean(dim=1)
    return 1 / torch.maximum(squares, 1e-20 * size).clamp(min=_TINY)
