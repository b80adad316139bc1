"""Comparison of an attention layer of A with its counterpart in B."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.legality import (
    CHANNELS_FREE,
    CHANNELS_OR_PAIRS,
    KEY_BIAS_BLIND,
    VALUE_BIAS_PASSES,
)
from triptych.core.algebra.semantics import (
    HEADS_OF,
    HeadGate,
    HeadNorm,
    HeadSide,
    Semantics,
)
from triptych.core.algebra.weights import (
    HEAD_SIDES,
    SIDES,
    AttentionWeights,
    Chain,
    Side,
)
from triptych.rewriting.differences.affine_maps import (
    PLAIN,
    AffineMap,
    Cut,
    Reading,
    chain_map,
    cut_at_norms,
    rounded_rows,
    unfolded_rows,
    with_channels,
)
from triptych.rewriting.differences.bases import (
    Factors,
    check_basis,
    check_identity,
    solve_basis,
    solve_planes,
)
from triptych.rewriting.differences.difference_records import (
    HeadDifference,
    SettingDifference,
)
from triptych.rewriting.differences.field_differences import (
    different_fields,
    same_number,
)
from triptych.rewriting.differences.matching import form_signature, match
from triptych.rewriting.differences.rounded import (
    Rounded,
    are_few,
    equal_numbers,
    factor_left_alone,
    finer,
    is_same,
)
from triptych.rewriting.differences.row_maps import (
    RowMap,
    RowVerdicts,
    compare_rows,
    ignored_columns,
)

# A value bias is a bias of the output wherever rows of weights sum to 1; a slot for it is not needed here.
_VALUE_BIAS = replace(
    VALUE_BIAS_PASSES,
    against={
        trait: why
        for trait, why in VALUE_BIAS_PASSES.against.items()
        if trait not in ("no_output_bias", "dropout")
    },
)
Freedom = Literal["any", "planes", "none"]
_NORMS = ("q_norm", "k_norm", "v_norm")
# Smallest square of a norm, relative to its bound by columns, exact to five digits from products of columns.
_LEAST_BY_PRODUCTS = 1e-10


@final
@dataclass(frozen=True, eq=False)
class LayerView:
    """An attention layer with its inputs.

    Attributes:
        weights: maps and semantics, without the norm before the layer.
        x: input of queries; also of keys and values, unless they read a memory.
        memory: input of keys and values in cross-attention.
        scale: factor of the output.
    """

    weights: AttentionWeights
    x: Reading = PLAIN
    memory: Reading = PLAIN
    scale: float = 1.0

    @property
    def semantics(self) -> Semantics:
        return replace(self.weights.semantics, dropout=0.0)

    @cached_property
    def still(self) -> AttentionWeights:
        """The layer without dropout."""
        return replace(self.weights, semantics=self.semantics)

    @cached_property
    def cut(self) -> Cut:
        return cut_at_norms(self.still)

    def read_by(self, side: HeadSide) -> Reading:
        """Return the input of the first map of a chain."""
        is_memory = side != "q" and self.weights.semantics.kind == "cross"
        return self.memory if is_memory else self.x

    def read_last(self, side: HeadSide) -> Reading:
        """Return what the maps after the last norm of a chain read: gain and shift of that norm."""
        before = self.cut.before[side]
        if not before:
            return self.read_by(side)
        found = before[-1].norm_map
        if found is None:
            return PLAIN
        return Reading(found.weight[0], None if found.bias is None else found.bias[0])

    def after_norms(self, side: HeadSide) -> Chain:
        """Return the stored maps after the last norm of a chain."""
        return self.still.chain(side)[len(self.cut.before[side]) :]


@dataclass
class LayerFindings:
    """Findings about a layer: reasons against its sameness, and rewrites by their keys."""

    reasons: list[str] = field(default_factory=list)
    settings: list[SettingDifference] = field(default_factory=list)
    steps: dict[str, Any] = field(default_factory=dict)
    heads: list[HeadDifference] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)
    relative: float | None = None
    has_other_sizes: bool = False

    def differ_in_size(self, reason: str) -> None:
        """Note that the parts cannot be compared number by number."""
        self.reasons.append(reason)
        self.has_other_sizes = True


def same_numbers(a: LayerView, b: LayerView) -> bool:
    """Return True if two layers have equal tensors and equal semantics."""
    one = a.still
    other = b.still
    if not (a.x.same_as(b.x) and a.memory.same_as(b.memory) and a.scale == b.scale):
        return False
    if one.num_heads != other.num_heads or one.d_model != other.d_model:
        return False
    orders = _orders_of_channels(one), _orders_of_channels(other)
    if orders[0] != orders[1]:
        one, other = (
            _in_pairs(own, order)
            for own, order in zip((one, other), orders, strict=True)
        )
    if [*_different_semantics(one.semantics, other.semantics, orders, "")]:
        return False
    chains = ((one.chain(side), other.chain(side)) for side in SIDES)
    return all(_equal_chains(*pair) for pair in chains) and _equal_or_zero(
        one.o_bias, other.o_bias
    )


def _equal_chains(one: Chain, other: Chain) -> bool:
    if len(one) != len(other):
        return False
    for mine, theirs in zip(one, other, strict=True):
        if mine.diagonal != theirs.diagonal or mine.weight.shape != theirs.weight.shape:
            return False
        if not equal_numbers(mine.weight, theirs.weight) or not _equal_or_zero(
            mine.bias, theirs.bias
        ):
            return False
        if [*different_fields(_plain_norm(mine.norm), _plain_norm(theirs.norm), "")]:
            return False
    return True


def _equal_or_zero(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None and other is None:
        return True
    if one is None or other is None:
        there = other if one is None else one
        return there is not None and not bool(there.any())
    return equal_numbers(one, other)


def _plain_norm(
    norm: HeadNorm | None, order: Sequence[int] | None = None
) -> HeadNorm | None:
    """Return a norm with its gain as weight, in float64, and its channels in another order."""
    if norm is None:
        return None

    def moved(part: Tensor) -> Tensor:
        if order is None:
            return part.double()
        rows = (
            part.double().view(-1, len(order))
            if norm.over == "all heads"
            else part.double()
        )
        return rows[..., torch.tensor(order)].reshape(part.shape)

    weight = None if norm.weight is None else moved(norm.gain(torch.float64))
    bias = None if norm.bias is None else moved(norm.bias)
    return replace(norm, weight=weight, bias=bias, offset=0.0)


def _orders_of_channels(weights: AttentionWeights) -> tuple[int, ...] | None:
    """Return the channels of queries, starting with rotary pairs; None without rotary positions."""
    rotary = weights.semantics.rotary
    if rotary is None:
        return None
    first, second = rotary.pairs
    turned = [*first, *second]
    rest = [
        channel for channel in range(weights.width("q")) if channel not in {*turned}
    ]
    return (*turned, *rest)


def _in_pairs(
    weights: AttentionWeights, order: tuple[int, ...] | None
) -> AttentionWeights:
    if order is None or not weights.q or not weights.k:
        return weights
    same = weights.q is weights.k
    q = with_channels(weights.q, order)
    return replace(weights, q=q, k=q if same else with_channels(weights.k, order))


def _different_semantics(
    one: Semantics,
    other: Semantics,
    orders: tuple[Sequence[int] | None, Sequence[int] | None],
    name: str,
    known: frozenset[str] = frozenset(),
) -> list[SettingDifference]:
    """Return differing fields except `known` fields; layouts of rotary pairs are compared as pairs."""
    found = [*different_fields(one, other, name, {*_NORMS, "rotary", *known})]
    at = f"{name}." if name else ""
    if "rotary" not in known:
        found += different_fields(
            one.rotary, other.rotary, f"{at}rotary", {"pairing", "start"}
        )
    moved = orders if orders[0] != orders[1] else (None, None)
    for side in _NORMS:
        if side not in known:
            channels = (None, None) if side == "v_norm" else moved
            mine = _plain_norm(getattr(one, side), channels[0])
            theirs = _plain_norm(getattr(other, side), channels[1])
            found += different_fields(mine, theirs, f"{at}{side}")
    return found


def _norm_of_heads(norm: HeadNorm | None, own: "_Heads", width: int) -> HeadNorm | None:
    """Return a norm with the numbers of heads in their order."""
    if norm is None or not norm.per_head:
        return norm

    def moved(rows: Tensor) -> Tensor:
        return rows.repeat_interleave(own.weights.num_heads // len(rows), dim=0)[
            own.kept
        ]

    return norm.with_own(width, moved)


class _Sides(NamedTuple):
    """The layers of A and B with the forms of their heads."""

    a: "_Heads"
    b: "_Heads"


@final
class _Heads:
    """The forms of the heads of one layer, with norms, scales and biases folded in."""

    def __init__(
        self, view: LayerView, order: tuple[int, ...] | None, dtype: torch.dtype
    ) -> None:
        self.view = view
        self.dtype = dtype
        behind = view.cut.behind
        self.order = order
        self.weights = _in_pairs(behind, order)
        self.kept = [*range(self.weights.num_heads)]
        self.scale = self.weights.scale
        self._factors = dict[tuple[object, ...], Rounded]()

    def map(self, side: Literal["q", "k", "v"], *, centre: bool) -> AffineMap:
        """Return the maps of all heads as they act on the plain stream, or on a norm within the chain."""
        found = chain_map(self.weights.chain(side), self.weights.d_model, self.dtype)
        if not self.view.cut.before[side]:
            found = found.reading(self.view.read_by(side), centre=centre)
        return found.repeat(self.weights.num_heads)

    def bias(self, side: Literal["q", "k", "v"]) -> Rounded:
        """Return the biases of all heads, with the shift of the input, `[heads, width]`."""
        key = "bias", side
        if key not in self._factors:
            self._factors[key] = self.map(side, centre=False).bias
        return self._factors[key]

    def out(self) -> Rounded:
        """Return W_O of every head, `[heads, width, d_out]`, with the factor of the output."""
        key = ("o",)
        if key not in self._factors:
            chain = chain_map(self.weights.o, self.weights.d_model, self.dtype)
            weight = chain.repeat(self.weights.num_heads).weight.times(self.view.scale)
            turn = self.view.x.turn
            self._factors[key] = weight if turn is None else turn.written(weight)
        return self._factors[key]

    def qk(self, *, centre: bool, scaled: bool, key_bias: bool) -> Factors:
        scale = self.scale if scaled else 1.0
        return Factors(
            self._kept(self._rows("q", centre, scale)),
            self._kept(self._rows("k", centre, with_bias=key_bias)),
        )

    def ov(self, *, centre: bool, value_bias: bool) -> Factors:
        return Factors(
            self._kept(self._rows("v", centre, with_bias=value_bias)),
            self._kept(self.out().mT),
        )

    def _rows(
        self,
        side: Literal["q", "k", "v"],
        centre: bool,
        scale: float = 1.0,
        *,
        with_bias: bool = True,
    ) -> Rounded:
        """Return the maps of all heads with their biases as last rows; without centring, maps are cached."""
        key = side, scale, with_bias
        if not centre and key in self._factors:
            return self._factors[key]
        found = self.map(side, centre=centre)
        own = found if with_bias else found.without_bias()
        rows = own.times(scale).rows()
        if not centre:
            self._factors |= {key: rows, ("bias", side): found.bias}
        return rows

    def row_map(self, side: Side, read: Reading = PLAIN) -> RowMap | None:
        """Return the stored maps of the kept heads after the last norm of a chain: one row per channel.

        None for several maps, or for a map without stored weights.
        """
        chain = self.weights.o if side == "o" else self.view.after_norms(side)
        if len(chain) != 1 or chain[0].diagonal or not chain[0].learned:
            return None
        if self.order is not None and side in ("q", "k"):
            chain = with_channels(chain, self.order)
        heads = torch.tensor(self.kept) * chain[0].copies // self.weights.num_heads
        weight = chain[0].weight[heads]
        rows = weight.flatten(0, 1) if side == "o" else weight.mT.flatten(0, 1)
        bias = chain[0].bias
        bias = None if bias is None else bias[heads].flatten()
        return RowMap(rows, self.dtype, bias, self.dtype, replace(read, turn=None))

    def factor_rows(
        self, side: Side, *, scaled: bool, with_bias: bool
    ) -> RowMap | None:
        """Return a factor of the forms, a row for each channel of the kept heads; None as in `row_map`."""
        if side == "o":
            found = self.row_map(side)
            return found and replace(
                found, scale=self.view.scale, written=self.view.x.turn
            )
        read = self.view.read_by(side)
        found = self.row_map(side, read)
        if found is None or self.view.cut.before[side]:
            return None
        scale = self.scale if scaled and side == "q" else 1.0
        if not with_bias:
            found = replace(found, bias=None)
            read = replace(read, shift=None)
        return replace(found, read=read, scale=scale, bias_scale=scale)

    def _kept(self, found: Rounded) -> Rounded:
        if self.kept == [*range(self.weights.num_heads)]:
            return found
        return found[self.kept]

    def o_bias(self, *, with_values: bool) -> Rounded:
        """Return the bias of the output, with the value biases folded in if `with_values`."""
        weights = self.weights
        d_out = weights.o[-1].d_out if weights.o else weights.d_model
        stored = weights.o_bias
        own = (
            Rounded.exact(torch.zeros(d_out))
            if stored is None
            else Rounded.stored(stored, self.dtype)
        )
        own = own.times(self.view.scale)
        if self.view.x.turn is not None:
            own = self.view.x.turn.written(own)
        if not with_values:
            return own
        value = self.bias("v")
        rows = value.reshape(*value.shape[:1], 1, value.shape[1])
        return own.plus((rows @ self.out()).sum(0).reshape(-1))


def compare_attention(a: LayerView, b: LayerView, name: str) -> LayerFindings:
    """Find the rewrites that lead from one layer to another, or the reasons against them."""
    return _Comparison(a, b, name).findings()


@final
class _Comparison:
    """The search for the rewrites between two layers."""

    def __init__(self, a: LayerView, b: LayerView, name: str) -> None:
        self.name = name
        self.found = LayerFindings()
        self.orders = _orders_of_channels(a.still), _orders_of_channels(b.still)
        # Values rounded to a coarser dtype differ from the original values.
        dtype = finer(a.weights.dtype, b.weights.dtype)
        self.a = _Heads(a, self.orders[0], dtype)
        self.b = _Heads(b, self.orders[1], dtype)
        self.pair = _Sides(self.a, self.b)
        self.views = a, b
        if same_number(self.a.scale, self.b.scale):
            self.b.scale = self.a.scale

    def findings(self) -> LayerFindings:
        sizes = self._sizes(self.a), self._sizes(self.b)
        if sizes[0] != sizes[1]:
            self.found.differ_in_size(f"its widths are {sizes[0]} and {sizes[1]}")
            return self.found
        self._compare_semantics()
        self._compare_before_norms()
        self._drop_zero_heads()
        self._keep_heads_with_partners()
        self._compare_heads()
        self._compare_output_bias()
        self._note_steps()
        return self.found

    def _sizes(self, heads: _Heads) -> tuple[int, ...]:
        """Return the widths of the inputs and of the output: rewrites never change them."""
        weights = heads.weights
        read = (
            chain[0].d_in if chain else weights.d_model
            for chain in (weights.q, weights.k, weights.v)
        )
        return (*read, weights.o[-1].d_out if weights.o else weights.d_model)

    # Bases allowed inside a head.

    @cached_property
    def freedom_qk(self) -> Freedom:
        if any(CHANNELS_OR_PAIRS.why_not(own.weights) for own in self.pair):
            return "none"
        if all(own.weights.semantics.rotary is None for own in self.pair):
            return "any"
        return (
            "planes"
            if all(own.weights.q and own.weights.k for own in self.pair)
            else "none"
        )

    @cached_property
    def freedom_ov(self) -> Freedom:
        return (
            "none"
            if any(CHANNELS_FREE["ov"].why_not(own.weights) for own in self.pair)
            else "any"
        )

    @cached_property
    def planes(self) -> int:
        """Number of rotary pairs; 0 where no basis of pairs is looked for."""
        rotary = self.a.weights.semantics.rotary
        return (
            0
            if rotary is None or self.freedom_qk != "planes"
            else len(rotary.frequencies)
        )

    @cached_property
    def drops_key_bias(self) -> bool:
        return not any(KEY_BIAS_BLIND.why_not(own.weights) for own in self.pair)

    @cached_property
    def moves_value_bias(self) -> bool:
        return not any(_VALUE_BIAS.why_not(own.weights) for own in self.pair)

    @cached_property
    def moves_scale(self) -> bool:
        return self.freedom_qk != "none"

    @cached_property
    def rounds(self) -> dict[str, Tensor]:
        """Rows rounded by a rewrite, per chain (q, k, v, o): all other rows have to be equal to the bit."""
        one, other = self.views
        found: dict[str, Tensor] = {}
        for side in HEAD_SIDES:
            rows = self._sizes(self.a)[HEAD_SIDES.index(side)]
            by_norm = rounded_rows(one.read_last(side), other.read_last(side), rows)
            is_scaled = side == "q" and self.a.scale != self.b.scale
            found[side] = by_norm | (is_scaled or self._are_other_factors(side))
        is_scaled = one.scale != other.scale or self.is_turned
        found["o"] = torch.tensor([is_scaled or self._are_other_factors("o")])
        return found

    def _are_other_factors(self, side: Side) -> bool:
        """Return True if the maps of a chain were multiplied, split, or have another basis between them.

        Such rewrites change most entries of two maps at least.
        """
        chains = [own.weights.chain(side) for own in self.pair]
        if len(chains[0]) != len(chains[1]):
            return True
        if len(chains[0]) < 2:
            return False
        # A rewrite changes two neighbouring maps: a single changed map is an edit.
        changed = 0
        for links in zip(*chains, strict=True):
            weights = [
                link.repeat(own.weights.num_heads).weight[own.kept]
                for link, own in zip(links, self.pair, strict=True)
            ]
            changed += _most_differ(weights[0], weights[1])
        return changed > 1

    @property
    def is_turned(self) -> bool:
        """True if the layers are compared in another basis of the stream."""
        return any(view.x.turn is not None for view in self.views)

    def _require_folded(self) -> None:
        """Require changed maps wherever the norm before them or their factor changed."""
        for side in HEAD_SIDES:
            readings = self.views[0].read_last(side), self.views[1].read_last(side)
            if not readings[0].same_as(readings[1]) and self._is_unfolded(
                side, readings
            ):
                self.found.reasons.append(
                    f"the norm before {side} differs, and {side} has not taken it up"
                )
        scales = self.a.scale, self.b.scale
        if (
            scales[0] != scales[1]
            and self.moves_scale
            and all(self._leaves_alone(side, scales) for side in ("q", "k"))
        ):
            self.found.reasons.append(
                f"the scale is {scales[0]:g} and {scales[1]:g}, and no map has taken it up"
            )
        factors = self.views[0].scale, self.views[1].scale
        if factors[0] != factors[1] and self._leaves_alone("o", factors):
            self.found.reasons.append(
                f"the factor of the output is {factors[0]:g} and {factors[1]:g}, "
                "and the output map has not taken it up"
            )

    def _is_unfolded(self, side: HeadSide, readings: tuple[Reading, Reading]) -> bool:
        """Return True if the q, k or v maps ignore a difference of the norms before them."""
        # If a chain is empty, the basis absorbs the norm.
        free = self.freedom_ov if side == "v" else self.freedom_qk
        if free == "any" and not all(own.weights.chain(side) for own in self.pair):
            return False
        rows = self._unfolded_rows(side, readings)
        # Dropped biases, and biases folded into the bias of the output, lack the shift of a norm.
        passes = {"q": False, "k": self.drops_key_bias, "v": self.moves_value_bias}
        return bool((rows[:-1] if passes[side] else rows).any())

    def _unfolded_rows(
        self, side: HeadSide, readings: tuple[Reading, Reading]
    ) -> Tensor:
        """Return for each row of the q, k or v maps, and for the bias, whether it ignores the norms."""
        width = self._sizes(self.a)[HEAD_SIDES.index(side)]
        plain = [
            own.row_map(side, reading)
            for own, reading in zip(self.pair, readings, strict=True)
        ]
        maps = [own for own in plain if own is not None]
        shapes = [own.weight.shape for own in maps]
        if len(maps) == 2 and shapes[0] == shapes[1] and maps[0].width == width:
            return ignored_columns(maps[:1], maps[1:])
        one, other = (self._stored(own, side) for own in self.pair)
        if one.weight.shape[1] != width:
            return torch.tensor([False])
        return unfolded_rows(one, other, readings)

    def _leaves_alone(self, side: Side, factors: tuple[float, float]) -> bool:
        """Return True if the q, k or o maps ignore a difference of factors."""
        one, other = (self._stored(own, side).weight for own in self.pair)
        return factor_left_alone(one, other, factors)

    def _stored(self, own: _Heads, side: Side) -> AffineMap:
        """Return the maps of the kept heads after the last norm of a chain, as stored."""
        chain = own.weights.o if side == "o" else own.view.after_norms(side)
        if own.order is not None and side in ("q", "k") and chain:
            chain = with_channels(chain, own.order)
        found = chain_map(chain, own.weights.d_model, own.dtype)
        return found.repeat(own.weights.num_heads).select(own.kept)

    def _stored_bias(self, own: _Heads, side: HeadSide) -> Rounded:
        """Return the biases of the kept heads after the last norm of a chain, as stored."""
        plain = own.row_map(side, PLAIN)
        if plain is None:
            return self._stored(own, side).bias
        return plain.biases().reshape(len(own.kept), -1)

    # The meaning besides the maps.

    def _compare_semantics(self) -> None:
        one, other = (own.weights.semantics for own in self.pair)
        known = frozenset(HEADS_OF)
        if self.moves_scale:
            known |= {"scale"}
        self.found.settings += _different_semantics(
            one, other, self.orders, self.name, known
        )
        for name in HEADS_OF:
            mine = getattr(one, name)
            theirs = getattr(other, name)
            if (mine is None) != (theirs is None) or type(mine) is not type(theirs):
                self.found.settings.append(
                    SettingDifference(
                        f"{self.name}.{name}", _there(mine), _there(theirs)
                    )
                )

    def _compare_before_norms(self) -> None:
        """Compare the maps before norms within chains: a norm fixes the basis of their channels."""
        for side in HEAD_SIDES:
            chains = [view.cut.before[side] for view in self.views]
            if len(chains[0]) != len(chains[1]):
                self.found.reasons.append(
                    f"{side} has {len(chains[0])} and {len(chains[1])} normalised maps"
                )
                continue
            if not chains[0]:
                continue
            maps = [
                self._mapped_before(view, side, own.dtype)
                for view, own in zip(self.views, self.pair, strict=True)
            ]
            readings = [view.read_by(side) for view in self.views]
            for number, (mine, theirs) in enumerate(zip(*maps, strict=True)):
                rows = mine.weight.shape[1]
                rounds = (
                    rounded_rows(readings[0], readings[1], rows)
                    if number == 0
                    else torch.zeros(rows + 1).bool()
                )
                if not is_same(mine.rows(), theirs.rows(), rounds[:, None]):
                    self.found.reasons.append(
                        f"map {number + 1} of {side}, before a norm, differs"
                    )
            for mine_link, theirs_link in zip(*chains, strict=True):
                one, other = (
                    _without_gain(link.norm) for link in (mine_link, theirs_link)
                )
                self.found.settings += different_fields(
                    one, other, f"{self.name}.{side}.norm"
                )

    def _mapped_before(
        self, view: LayerView, side: HeadSide, dtype: torch.dtype
    ) -> list[AffineMap]:
        chain = view.cut.before[side]
        found = [chain_map((link,), view.weights.d_model, dtype) for link in chain]
        return [found[0].reading(view.read_by(side)), *found[1:]]

    # Heads.

    def _drop_zero_heads(self) -> None:
        for own in self.pair:
            ov = own.ov(centre=False, value_bias=not self.moves_value_bias)
            adds = ov.left.numbers.flatten(1).any(dim=1) & ov.right.numbers.flatten(
                1
            ).any(dim=1)
            own.kept = [
                head for head, used in zip(own.kept, adds.tolist(), strict=True) if used
            ]
        if (
            self.a.weights.num_heads != self.b.weights.num_heads
            and self._all_kept_equal
        ):
            self.found.steps["prune_heads"] = (
                self.a.weights.num_heads,
                self.b.weights.num_heads,
            )

    def _keep_heads_with_partners(self) -> None:
        """Leave out heads without a counterpart, where one model has more heads than the other."""
        counts = len(self.a.kept), len(self.b.kept)
        if counts[0] == counts[1]:
            return
        self.found.reasons.append(
            f"{counts[0]} heads of A and {counts[1]} of B add something to the output"
        )
        signatures = self._signatures()
        # Heads with signatures of different widths cannot be matched.
        if signatures[0].shape[1] != signatures[1].shape[1] or not all(counts):
            self.found.has_other_sizes = True
            return
        partners = match(*signatures).partners
        pairs = [pair for pair in enumerate(partners) if pair[1] != -1]
        alone = {*range(counts[0])} - {own for own, _ in pairs}
        self.found.heads += [
            HeadDifference(self.a.kept[own], None, "near") for own in sorted(alone)
        ]
        self.a.kept = [self.a.kept[own] for own, _ in pairs]
        self.b.kept = [self.b.kept[partner] for _, partner in pairs]

    @property
    def _all_kept_equal(self) -> bool:
        return len(self.a.kept) == len(self.b.kept)

    def _forms(self, own: _Heads, *, centre: bool) -> tuple[Factors, Factors]:
        qk = own.qk(
            centre=centre, scaled=self.moves_scale, key_bias=not self.drops_key_bias
        )
        return qk, own.ov(centre=centre, value_bias=not self.moves_value_bias)

    def _compare_heads(self) -> None:
        if not self.a.kept:
            return
        self._match()
        self._require_folded()
        forms = self._forms(self.a, centre=False), self._forms(self.b, centre=False)
        same, only_rounded = self._verdicts(forms, is_centred=False)
        # Whatever moved by rounding alone was not rewritten.
        is_open = not all(same) and not any(only_rounded)
        if is_open and any(
            view.x.centred or view.memory.centred for view in self.views
        ):
            centred_forms = (
                self._forms(self.a, centre=True),
                self._forms(self.b, centre=True),
            )
            again, _ = self._verdicts(centred_forms, is_centred=True)
            if all(again) and not _are_few_entries(*forms):
                same = again
                self.found.steps["centre"] = True
        self._compare_parts_of_heads(same)
        self._record_heads(forms, same)

    def _match(self) -> None:
        """Order the heads of B like the heads of A, by invariants under a change of basis."""
        signatures = self._signatures()
        if signatures[0].shape[1] != signatures[1].shape[1]:
            return
        order = match(*signatures).partners
        moved = [self.b.kept[partner] for partner in order]
        if moved != self.b.kept:
            self.found.steps["permute_heads"] = moved
        self.b.kept = moved

    def _signatures(self) -> list[Tensor]:
        """Return invariants of the heads of A and of B under a change of basis, `[heads, values]`."""
        found = []
        for own in self.pair:
            qk, ov = self._forms(own, centre=False)
            planes = self.planes if qk.left.shape[-1] >= 2 * self.planes else 0
            found.append(
                torch.cat([form_signature(qk, planes), form_signature(ov)], dim=1)
            )
        return found

    def _verdicts(
        self,
        forms: tuple[tuple[Factors, Factors], tuple[Factors, Factors]],
        *,
        is_centred: bool,
    ) -> tuple[list[bool], list[bool]]:
        """Return for each head of A whether it is its partner, and whether only rounding moved it."""
        (qk_a, ov_a), (qk_b, ov_b) = forms
        rounds = self.rounds
        qk = self._one_form(
            qk_a,
            qk_b,
            (rounds["q"] | is_centred, rounds["k"] | is_centred),
            "qk",
            is_centred=is_centred,
        )
        ov = self._one_form(
            ov_a,
            ov_b,
            (rounds["v"] | is_centred, rounds["o"]),
            "ov",
            is_centred=is_centred,
        )
        same = [mine and theirs for mine, theirs in zip(qk[0], ov[0], strict=True)]
        return same, [mine or theirs for mine, theirs in zip(qk[1], ov[1], strict=True)]

    def _one_form(
        self,
        a: Factors,
        b: Factors,
        rounds: tuple[Tensor, Tensor],
        which: Literal["qk", "ov"],
        *,
        is_centred: bool,
    ) -> tuple[list[bool], list[bool]]:
        """Return for each head whether a form is the same, and whether only rounding moved it."""
        freedom = self.freedom_qk if which == "qk" else self.freedom_ov
        count = len(a.left.numbers)
        same = [False] * count
        only_rounded = [False] * count
        left_open = [*range(count)]
        in_place = None if is_centred else self._in_place(which, rounds)
        if in_place is not None:
            alike = in_place.explained.tolist()
            same = in_place.same.tolist()
            only_rounded = (in_place.explained & ~in_place.same).tolist()
            left_open = [head for head in range(count) if not alike[head]]
        elif a.left.shape == b.left.shape:
            alike = check_identity(a, b).explained.tolist()
            for head in (head for head in range(count) if alike[head]):
                # Values not rounded by a rewrite have to be equal.
                same[head] = all(
                    bool(
                        (
                            (mine.numbers[head] == theirs.numbers[head])
                            | rounded[:, None]
                        ).all()
                    )
                    for rounded, mine, theirs in zip(rounds, a, b, strict=True)
                )
                only_rounded[head] = not same[head]
            left_open = [head for head in range(count) if not alike[head]]
        if not left_open or freedom == "none":
            return same, only_rounded
        one, other = (
            Factors(own.left[left_open], own.right[left_open]) for own in (a, b)
        )
        for head, explained in zip(
            left_open, self._with_basis(one, other, freedom).tolist(), strict=True
        ):
            same[head] = explained
            if explained:
                self.found.steps.setdefault(f"basis {which}", []).append(
                    self.a.kept[head]
                )
        return same, only_rounded

    def _in_place(
        self, which: Literal["qk", "ov"], rounds: tuple[Tensor, Tensor]
    ) -> RowVerdicts | None:
        """Compare the factors of a form channel by channel; None unless the factors are single maps."""
        found = list[RowVerdicts]()
        with_bias = {"k": not self.drops_key_bias, "v": not self.moves_value_bias}
        sides: tuple[Side, Side] = ("q", "k") if which == "qk" else ("v", "o")
        for side, rounded in zip(sides, rounds, strict=True):
            rows = [
                own.factor_rows(
                    side, scaled=self.moves_scale, with_bias=with_bias.get(side, True)
                )
                for own in self.pair
            ]
            maps = [own for own in rows if own is not None]
            if len(maps) < 2 or maps[0].weight.shape != maps[1].weight.shape:
                return None
            of_rows = compare_rows(maps[0], maps[1], rounded)
            heads = len(self.a.kept), -1
            found.append(
                RowVerdicts(
                    of_rows.same.view(heads).all(dim=1),
                    of_rows.explained.view(heads).all(dim=1),
                )
            )
        return RowVerdicts(
            found[0].same & found[1].same, found[0].explained & found[1].explained
        )

    def _with_basis(self, a: Factors, b: Factors, freedom: Freedom) -> Tensor:
        if freedom == "planes":
            if a.left.shape != b.left.shape:
                return torch.zeros(len(a.left.numbers), dtype=torch.bool)
            found = check_basis(a, b, solve_planes(a, b, self.planes))
            return found.explained & found.is_another
        found = check_basis(a, b, solve_basis(a, b))
        explained = found.explained & found.is_another
        if a.left.shape[-1] != b.left.shape[-1] and not bool(explained.all()):
            # A factor of lower rank than its width: the basis leads the other way.
            explained = explained | check_basis(b, a, solve_basis(b, a)).explained
        return explained

    def _compare_parts_of_heads(self, same: list[bool]) -> None:
        """Compare what each head has besides its maps, in the order of the match."""
        one, other = (own.weights.semantics for own in self.pair)
        for name in sorted(HEADS_OF):
            if name in _NORMS:
                self._compare_norms(name)
                continue
            mine = getattr(one, name)
            theirs = getattr(other, name)
            if mine is None or type(mine) is not type(theirs):
                continue
            if isinstance(mine, HeadGate):
                self._compare_gates(mine, theirs)
                continue
            left, right = (
                _selected(part, own.kept)
                for part, own in zip((mine, theirs), self.pair, strict=True)
            )
            self.found.settings += different_fields(left, right, f"{self.name}.{name}")

    def _compare_norms(self, name: str) -> None:
        """Compare norms of queries, keys or values, with the numbers of heads in their order."""
        moved = (
            self.orders
            if self.orders[0] != self.orders[1] and name != "v_norm"
            else (None, None)
        )
        norms = []
        for own, channels in zip(self.pair, moved, strict=True):
            norm = getattr(own.weights.semantics, name)
            if (
                norm is not None
                and norm.over == "all heads"
                and len(own.kept) != own.weights.num_heads
            ):
                self.found.reasons.append(
                    f"{name} is over all heads, also over those that add nothing"
                )
            width = own.weights.width(HEADS_OF[name])
            norms.append(_norm_of_heads(_plain_norm(norm, channels), own, width))
        self.found.settings += different_fields(
            norms[0], norms[1], f"{self.name}.{name}"
        )

    def _compare_gates(self, one: HeadGate, other: HeadGate) -> None:
        gates = []
        for gate, own in zip((one, other), self.pair, strict=True):
            chosen = gate.select_heads(own.kept)
            if chosen is None:
                self.found.reasons.append("no head that adds something is gated")
                return
            weight = Rounded.stored(chosen.weight, own.dtype)
            rows = weight.reshape(1, -1, weight.shape[-1]).mT
            bias = (
                None if chosen.bias is None else Rounded.stored(chosen.bias, own.dtype)
            )
            zero = Rounded.exact(torch.zeros(1, rows.shape[-1]))
            mapped = AffineMap(rows, zero if bias is None else bias.reshape(1, -1))
            gates.append(
                (mapped.reading(own.view.x).rows(), chosen.whole, chosen.per_channel)
            )
        rounds = rounded_rows(self.views[0].x, self.views[1].x, self.a.weights.d_model)[
            :, None
        ]
        if gates[0][1:] != gates[1][1:] or not is_same(
            gates[0][0], gates[1][0], rounds
        ):
            self.found.reasons.append("gates of heads differ")

    def _record_heads(
        self,
        forms: tuple[tuple[Factors, Factors], tuple[Factors, Factors]],
        same: list[bool],
    ) -> None:
        (qk_a, ov_a), (qk_b, ov_b) = forms
        relative = list[float]()
        for place, (head, other) in enumerate(zip_longest(self.a.kept, self.b.kept)):
            if same[place]:
                self.found.heads.append(HeadDifference(head, other, "same function"))
                continue
            qk = _relative(qk_a, qk_b, place)
            ov = _relative(ov_a, ov_b, place)
            relative += [qk, ov]
            self.found.heads.append(HeadDifference(head, other, "near", qk, ov))
        if not all(same):
            self.found.relative = max(relative)
            off = [
                str(head)
                for head, held in zip(self.a.kept, same, strict=True)
                if not held
            ]
            some = ", ".join(off[:6]) + (", …" if len(off) > 6 else "")
            heads = f"head{'s' * (len(off) > 1)} {some}"
            self.found.reasons.append(f"no rewrite leads from A to B in {heads}")
            self._record_bounds(
                forms, [place for place, held in enumerate(same) if not held]
            )

    def _record_bounds(
        self,
        forms: tuple[tuple[Factors, Factors], tuple[Factors, Factors]],
        places: list[int],
    ) -> None:
        """Bound what the difference does to scores and to outputs, for a normalised input."""
        if self.freedom_qk != "any" or any(view.cut.before["q"] for view in self.views):
            return
        (qk_a, ov_a), (qk_b, ov_b) = forms
        width = self.a.weights.d_model
        scores = max(
            float(_difference(qk_a, qk_b, place).spectral_norm()) for place in places
        )
        outputs = sum(
            float(_difference(ov_a, ov_b, place).spectral_norm()) for place in places
        )
        self.found.bounds = {"scores": width * scores, "output": width**0.5 * outputs}

    def _compare_output_bias(self) -> None:
        plain = [own.o_bias(with_values=False) for own in self.pair]
        is_scaled = self.views[0].scale != self.views[1].scale or self.is_turned
        if not self.moves_value_bias or self._have_equal_values():
            if not is_same(plain[0], plain[1], is_scaled):
                self.found.reasons.append("the bias of the output differs")
            return
        # Value biases add up to a bias of the output, whatever the basis of the values is.
        totals = [own.o_bias(with_values=True) for own in self.pair]
        is_moved = _most_differ(plain[0].numbers, plain[1].numbers)
        of_norm = bool(self.rounds["v"][-1]) and _most_differ(
            *(self._stored(own, "v").bias.numbers for own in self.pair)
        )
        is_rewritten = self._are_other_factors("v") or "basis ov" in self.found.steps
        rounds = is_moved or is_scaled or of_norm or is_rewritten
        if not is_same(totals[0], totals[1], rounds):
            self.found.reasons.append("the biases of values or of the output differ")
        elif is_moved:
            self.found.steps["fold_value_bias"] = True

    def _have_equal_values(self) -> bool:
        values = [own.bias("v").numbers[own.kept] for own in self.pair]
        return (
            values[0].shape == values[1].shape
            and torch.equal(*values)
            and torch.equal(*map(_constant_of_dropped_heads, self.pair))
        )

    def _note_steps(self) -> None:
        steps = self.found.steps
        one, other = self.views
        if not (one.x.same_as(other.x) and one.memory.same_as(other.memory)):
            same_gains = all(
                replace(mine, turn=None).same_as(replace(theirs, turn=None))
                for mine, theirs in ((one.x, other.x), (one.memory, other.memory))
            )
            steps |= {} if same_gains else {"fold_norm": True}
            steps |= {"turn": True} if self.is_turned else {}
        if self.a.scale != self.b.scale and self.moves_scale:
            steps["scale"] = (self.a.scale, self.b.scale)
        if self.drops_key_bias:
            stored = [
                bool(self._stored_bias(own, "k").numbers.any()) for own in self.pair
            ]
            effective = [own.bias("k")[own.kept] for own in self.pair]
            is_moved = "basis qk" not in steps and not is_same(
                effective[0], effective[1], rounded=True
            )
            if stored[0] != stored[1] or is_moved:
                steps["drop_key_bias"] = True
        copies = [
            (own.weights.copies("k"), own.weights.copies("v")) for own in self.pair
        ]
        if copies[0] != copies[1]:
            steps["repeat_kv_heads"] = tuple(copies)
        lengths = [
            tuple(len(view.weights.chain(side)) for side in SIDES)
            for view in self.views
        ]
        if lengths[0] != lengths[1]:
            steps["fold"] = lengths


def _most_differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or (
        not torch.equal(one, other) and not are_few(one, other)
    )


def _constant_of_dropped_heads(own: _Heads) -> Tensor:
    """Return what heads without weights of values still add to the output: their value biases through W_O."""
    dropped = [*{*range(own.weights.num_heads)} - {*own.kept}]
    values = own.bias("v").numbers[dropped]
    return (values[:, None] @ own.out().numbers[dropped]).sum(dim=0)


def _are_few_entries(
    one: tuple[Factors, Factors], other: tuple[Factors, Factors]
) -> bool:
    """Return True if any map of the inputs differs in a few entries only."""
    (qk, ov), (qk_b, ov_b) = one, other
    pairs = (qk.left, qk_b.left), (qk.right, qk_b.right), (ov.left, ov_b.left)
    return any(
        are_few(mine.numbers[:, :-1], theirs.numbers[:, :-1]) for mine, theirs in pairs
    )


def _there(value: object) -> str:
    return "none" if value is None else type(value).__name__


def _without_gain(norm: HeadNorm | None) -> HeadNorm | None:
    """Return a norm without weight and bias, after they were folded into the next map."""
    return norm and replace(norm, weight=None, bias=None, offset=0.0)


def _selected(part: Any, order: list[int]) -> Any:
    return part[order] if isinstance(part, Tensor) else part.select_heads(order)


def _difference(a: Factors, b: Factors, place: int) -> BilinearForm:
    one, other = (
        BilinearForm(own.left.numbers[place], own.right.numbers[place])
        for own in (a, b)
    )
    return one - other


def _relative(a: Factors, b: Factors, place: int) -> float:
    """Return the Frobenius norm of the difference of two forms relative to that of the first."""
    found = relative_by_products(a, b, place)
    return relative_of_forms(a, b, place) if found is None else found


def relative_of_forms(a: Factors, b: Factors, place: int) -> float:
    size = float(BilinearForm(a.left.numbers[place], a.right.numbers[place]).norm())
    apart = float(_difference(a, b, place).norm())
    return apart / size if size else float("inf") if apart else 0.0


def relative_by_products(a: Factors, b: Factors, place: int) -> float | None:
    """Return the relative difference of two forms from products of columns; None if they are too coarse.

    ‖L Rᵀ‖² is the sum of the entries of (Lᵀ L) ∘ (Rᵀ R). Its error is about ε (Σ ‖l_i‖ ‖r_i‖)².
    """
    left = a.left.numbers[place], b.left.numbers[place]
    right = a.right.numbers[place], b.right.numbers[place]
    if left[0].shape != left[1].shape or right[0].shape != right[1].shape:
        return None
    size = _product_norm(left[0], right[0])
    # L_a R_aᵀ − L_b R_bᵀ = (L_a − L_b) R_aᵀ + L_b (R_a − R_b)ᵀ: both terms are small for near factors.
    apart = _product_norm(
        torch.cat([left[0] - left[1], left[1]], dim=1),
        torch.cat([right[0], right[0] - right[1]], dim=1),
    )
    return None if size is None or apart is None else apart / size


def _product_norm(left: Tensor, right: Tensor) -> float | None:
    products = left.mT @ left, right.mT @ right
    square = float((products[0] * products[1]).sum())
    # ‖L Rᵀ‖ is at most the sum of the norms of its terms, products of a column of L and a column of R.
    most = float((products[0].diagonal() * products[1].diagonal()).sqrt().sum())
    is_exact = square > _LEAST_BY_PRODUCTS * most**2
    return square**0.5 if is_exact and square < float("inf") else None
