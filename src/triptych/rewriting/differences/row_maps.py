"""Maps with many rows, such as hidden units or tokens, compared some rows at a time.

Rows are converted to float64 while they are compared, so a map takes the memory of its stored values only.
Two tests precede the comparison of all entries with their rounding: a comparison of a few columns,
different in unrelated rows, and a bound of the rounding by the values alone, sufficient for most rows of a
rewritten map.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.rewriting.differences.affine_maps import PLAIN, AffineMap, Reading, affine
from triptych.rewriting.differences.matching import probes, scaled_signature
from triptych.rewriting.differences.rounded import (
    Rounded,
    equal_numbers,
    excess,
    largest,
    left_alone,
    stacked,
)
from triptych.rewriting.differences.turning import Turn
from triptych.rewriting.rounding import MOST_TIMES

# Entries converted to float64 at a time: they fit the processor's cache.
_ENTRIES_AT_A_TIME = 1 << 17
# Leading columns compared first.
_FIRST_COLUMNS = 128
# Share of a bound that the arithmetic of float64 cannot exceed.
_CERTAIN = 1 - 1e-6
_EPS = torch.finfo(torch.float64).eps
_ALL = slice(None)
_Indices = slice | Tensor


@final
@dataclass(frozen=True, eq=False)
class RowMap:
    """The rows of a map, `[rows, width]`, with one bias per row.

    Attributes:
        weight: stored rows.
        dtype: dtype with the rounding of the rows.
        bias: stored biases, `[rows]`; None for zeros.
        bias_dtype: dtype with the rounding of the biases.
        read: input of the rows.
        centre: True to remove what a centred input cannot show.
        scale: factor of the rows.
        bias_scale: factor of the biases.
        written: basis of the stream that the rows are written to; None for the basis they are stored in.
    """

    weight: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    bias_dtype: torch.dtype = torch.float64
    read: Reading = PLAIN
    centre: bool = False
    scale: float = 1.0
    bias_scale: float = 1.0
    written: Turn | None = None

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def is_plain(self) -> bool:
        """True if every entry is a stored entry times exact factors."""
        return self.read.turn is None and self.written is None and not self.centre

    @property
    def gain(self) -> Tensor:
        """Gain of the input in float64, `[width]`."""
        gain = self.read.gain
        return torch.ones(self.width, dtype=torch.float64) if gain is None else gain

    @property
    def unturned(self) -> "RowMap":
        """The rows in the basis of the stream used for storage."""
        return replace(self, read=replace(self.read, turn=None))

    def is_stored_as(self, other: "RowMap") -> bool:
        """Return True if two maps are plain, and have equal values and inputs."""
        if not (self.is_plain and other.is_plain and self.scale == other.scale):
            return False
        if not self.read.same_as(other.read) or self.weight.shape != other.weight.shape:
            return False
        # Products of 0 and infinity are not equal to themselves.
        if not bool((self.gain.isfinite() & (self.gain != 0)).all()):
            return False
        biases = self._stored_biases(_ALL).numbers, other._stored_biases(_ALL).numbers
        return torch.equal(*biases) and equal_numbers(self.weight, other.weight)

    def chosen(self, order: Sequence[int] | Tensor) -> "RowMap":
        """Return some rows in a given order."""
        index = torch.as_tensor(order, dtype=torch.long)
        if torch.equal(index, torch.arange(len(self))):
            return self
        bias = None if self.bias is None else self.bias[index]
        return replace(self, weight=self.weight[index], bias=bias)

    def part(self, start: int, stop: int) -> "RowMap":
        """Return consecutive rows."""
        bias = None if self.bias is None else self.bias[start:stop]
        return replace(self, weight=self.weight[start:stop], bias=bias)

    def numbers(self, rows: _Indices = _ALL, columns: _Indices = _ALL) -> Tensor:
        """Return the values of `rows`, without their biases, in float64."""
        if not self.is_plain:
            return self.rows(rows, columns).numbers
        found = self.weight[rows][:, columns].double()
        found = found if self.scale == 1 else found * self.scale
        return found if self.read.gain is None else found * self.read.gain[columns]

    def rows(self, rows: _Indices = _ALL, columns: _Indices = _ALL) -> Rounded:
        """Return the values of `rows`, without their biases, with their rounding."""
        if self.read.turn is not None or self.written is not None:
            return self._turned[rows][:, columns]
        if self.centre:
            return _as_rows(self._map(rows))[:, columns]
        return _as_rows(self._map(rows, columns))

    def biases(self, rows: _Indices = _ALL) -> Rounded:
        """Return the biases of `rows`, with the shift of the input, `[rows]`."""
        if self.read.shift is None:
            return self._stored_biases(rows)
        plain = replace(self, read=replace(self.read, turn=None), centre=False)
        indices = torch.arange(len(self))[rows]
        parts = [
            plain._map(some).bias.reshape(-1) for some in in_blocks(indices, self.width)
        ]
        return stacked(parts, 0)

    def with_biases(self, rows: _Indices = _ALL) -> Rounded:
        """Return the values of `rows` with their biases as last column."""
        return stacked([self.rows(rows), self.biases(rows).reshape(-1, 1)], 1)

    @property
    def indices(self) -> Tensor:
        return torch.arange(len(self))

    @cached_property
    def largest(self) -> Tensor:
        """The largest finite size of an entry or of a bias, in float64."""
        of_bias = largest(self.biases().numbers)
        if not self.is_plain:
            blocks = in_blocks(self.indices, self.width)
            return torch.stack(
                [of_bias, *map(largest, map(self.numbers, blocks))]
            ).amax()
        entries = _comparable(self.weight).abs()
        sizes = entries.amax(dim=0)
        if not bool(sizes.isfinite().all()):
            sizes = entries.where(entries.isfinite(), 0.0).amax(dim=0)
        # The largest entry of a column stays the largest under an exact factor.
        return torch.maximum(of_bias, largest(sizes.double() * self.scale * self.gain))

    def _stored_biases(self, rows: _Indices) -> Rounded:
        if self.bias is None:
            return Rounded.exact(torch.zeros(len(self.indices[rows])))
        return Rounded.stored(self.bias[rows], self.bias_dtype).times(self.bias_scale)

    def _map(self, rows: _Indices, columns: _Indices = _ALL) -> AffineMap:
        weight = Rounded.stored(self.weight[rows][:, columns], self.dtype)
        read = self.read
        if columns is not _ALL:
            # The shift adds to biases, which need all columns.
            gain = None if read.gain is None else read.gain[columns]
            read = replace(read, gain=gain, shift=None)
        found = affine(weight.times(self.scale).mT, self._stored_biases(rows))
        return found.reading(read, centre=self.centre)

    @cached_property
    def _turned(self) -> Rounded:
        """All rows in another basis of the stream: products are faster with many rows at once."""
        found = _as_rows(self._map(_ALL))
        return found if self.written is None else self.written.written(found)


def _as_rows(found: AffineMap) -> Rounded:
    return Rounded(found.weight.numbers[0], found.weight.squares[0]).mT


def in_blocks(indices: Tensor, width: int) -> Iterator[_Indices]:
    """Yield ascending indices of rows in blocks of limited size; consecutive indices as slices."""
    if not len(indices):
        return
    for part in torch.split(indices, max(1, _ENTRIES_AT_A_TIME // max(width, 1))):
        first = int(part[0])
        stop = int(part[-1]) + 1
        yield slice(first, stop) if stop - first == len(part) else part


def _comparable(stored: Tensor) -> Tensor:
    """Return stored values in a dtype with comparison, unlike float8."""
    return stored.float() if stored.dtype.itemsize == 1 else stored


def _where(held: Tensor) -> Tensor:
    return held.nonzero().flatten()


def used_rows(one: RowMap, *, with_biases: bool) -> Tensor:
    """Return for each row whether any of its entries is not 0, `[rows]`."""
    found = torch.zeros(len(one), dtype=torch.bool)
    for columns in (slice(0, _FIRST_COLUMNS), slice(_FIRST_COLUMNS, None)):
        for rows in in_blocks(_where(~found), len(range(one.width)[columns])):
            found[rows] = one.numbers(rows, columns).any(dim=1)
    return found | one.biases().numbers.bool() if with_biases else found


def row_signatures(one: RowMap, number: int, *, with_biases: bool) -> Tensor:
    """Return a few random projections of each row, divided by the root mean square of their norms."""
    directions = probes(one.width + with_biases, number)
    parts = [
        one.numbers(rows) @ directions[: one.width]
        for rows in in_blocks(one.indices, one.width)
    ]
    found = torch.cat(parts)
    if with_biases:
        found += one.biases().numbers[:, None] * directions[-1]
    return scaled_signature(found)


class RowVerdicts(NamedTuple):
    """Verdicts on the rows of two maps, `[rows]`."""

    same: Tensor  # equal, or explained at entries that a rewrite rounded
    explained: Tensor  # rounding explains all differences


def compare_rows(one: RowMap, other: RowMap, rounded: Tensor) -> RowVerdicts:
    """Compare each row of a map with the row of another map at the same index.

    `rounded`: columns, and the biases as last entry, that a rewrite rounded; or one value for all of them.
    """
    explained = explained_rows(one, other)
    if one.is_stored_as(other):
        return RowVerdicts(explained, explained)
    of_columns, of_biases = (
        (rounded[:-1], rounded[-1]) if len(rounded) > 1 else (rounded, rounded[0])
    )
    same = explained.clone()
    fixed = _ALL if len(rounded) == 1 else _where(~of_columns)
    if not bool(of_columns.all()):
        for rows in in_blocks(_where(same), one.width):
            equal = one.numbers(rows, fixed) == other.numbers(rows, fixed)
            same[rows] = equal.all(dim=1)
    if not bool(of_biases):
        same &= one.biases().numbers == other.biases().numbers
    return RowVerdicts(same, explained)


def explained_rows(one: RowMap, other: RowMap) -> Tensor:
    """Return for each row whether rounding explains its differences, as `rounded.excess` states it."""
    if one.is_stored_as(other):
        return torch.ones(len(one), dtype=torch.bool)
    pair = _RowPair(one, other)
    biases = one.biases(), other.biases()
    found = biases[0].numbers == biases[1].numbers
    if not bool(found.all()):
        found = excess(*biases, scale=pair.scale) <= 1
    # A few columns first: they differ in unrelated rows.
    for columns in (slice(0, _FIRST_COLUMNS), slice(_FIRST_COLUMNS, None)):
        for rows in in_blocks(_where(found), len(range(one.width)[columns])):
            found[rows] = pair.are_explained(rows, columns)
    return found


@final
class _RowPair:
    """Two maps with corresponding rows at equal indices."""

    def __init__(self, one: RowMap, other: RowMap) -> None:
        self.one = one
        self.other = other

    @cached_property
    def scale(self) -> Tensor:
        return torch.maximum(self.one.largest, self.other.largest)

    def are_explained(self, rows: _Indices, columns: slice) -> Tensor:
        found = self._are_near(rows, columns)
        left = _where(~found)
        if len(left):
            indices = self.one.indices[rows][left]
            one, other = (own.rows(indices, columns) for own in (self.one, self.other))
            found[left] = excess(one, other, scale=self.scale).amax(dim=1) <= 1
        return found

    def _are_near(self, rows: _Indices, columns: slice) -> Tensor:
        """Return True for rows that rounding certainly explains.

        The unit in the last digit of a value is at least half an epsilon of it. So the rounding of one map
        allows for a share of its entries, whatever the rounding of the other map is.
        """
        known = next((own for own in (self.other, self.one) if own.is_plain), None)
        one, other = (own.numbers(rows, columns) for own in (self.one, self.other))
        if known is None or not known.dtype.is_floating_point:
            return (one == other).all(dim=1)
        share = MOST_TIMES * torch.finfo(known.dtype).eps / 4 * _CERTAIN
        allowed = (other if known is self.other else one).abs() * share
        # With an infinite value, the remainder is NaN or -inf: not near.
        return (allowed - (one - other).abs() >= 0).all(dim=1)


class ChangeOfRows(NamedTuple):
    """Norms of the entries of a map and of their change."""

    size: float
    change: float

    @property
    def relative(self) -> float:
        return self.change / self.size if self.size else 0.0


def change_of_rows(one: RowMap, other: RowMap) -> ChangeOfRows:
    """Return the Frobenius norms of a map and of its difference from another map, with their biases."""
    biases = one.biases().numbers, other.biases().numbers
    size = biases[0].square().sum()
    change = (biases[0] - biases[1]).square().sum()
    for rows in in_blocks(one.indices, one.width):
        mine = one.numbers(rows)
        size += mine.square().sum()
        change += (mine - other.numbers(rows)).square().sum()
    return ChangeOfRows(float(size.sqrt()), float(change.sqrt()))


def differ_in_few(one: RowMap, other: RowMap) -> bool:
    """Return True if some entries differ, but at most half of them: rewrites of whole maps change most."""
    count = sum(
        int((one.numbers(rows) != other.numbers(rows)).sum())
        for rows in in_blocks(one.indices, one.width)
    )
    return 0 < 2 * count <= one.weight.numel()


def ignored_columns(ones: Sequence[RowMap], others: Sequence[RowMap]) -> Tensor:
    """Return for each column, and for the biases, whether stored rows ignore a change of norms or factors.

    `ones`, `others`: maps of A and B, with a single input for each model. The rule is the rule of
    `rounded.left_alone`, over the rows of all maps. Returns `[width + 1]`.
    """
    mine = ones[0]
    theirs = others[0]
    differ = (mine.gain != theirs.gain) | (mine.scale != theirs.scale)
    found = differ & ~_clearly_taken_up(ones, others)
    for columns in torch.split(_where(found), _FIRST_COLUMNS):
        found[columns] = _ignored(ones, others, columns)
    return torch.cat([found, _ignores_shift(ones, others)])


def _clearly_taken_up(ones: Sequence[RowMap], others: Sequence[RowMap]) -> Tensor:
    """Return True for columns in which most stored entries moved, and each move had to be stored.

    The unit in the last digit of a value is at most an epsilon of it. So a change of a factor by more than
    half an epsilon moves every value beyond its rounding.
    """
    dtypes = {own.dtype for own in ones}
    if not all(dtype.is_floating_point and dtype.itemsize < 8 for dtype in dtypes):
        return torch.zeros(ones[0].width, dtype=torch.bool)
    about = [torch.finfo(dtype) for dtype in dtypes]
    factors = [own.gain * own.scale for own in (ones[0], others[0])]
    moves = (factors[0] - factors[1]).abs() * _CERTAIN
    least = max(own.eps for own in about) / 2 * factors[1].abs()
    is_clear = moves > least + 4 * _EPS * (factors[0].abs() + factors[1].abs())
    is_clear &= moves.isfinite()
    normal = max(own.smallest_normal for own in about)
    total = sum(map(len, ones))
    count = torch.zeros(ones[0].width, dtype=torch.long)
    for one, other in zip(ones, others, strict=True):
        for rows in in_blocks(one.indices, one.width):
            before = _comparable(one.weight[rows])
            sizes = before.abs()
            is_moved = before != _comparable(other.weight[rows])
            moved = is_moved & (sizes >= normal)
            count += (moved & (sizes < torch.inf)).sum(dim=0)
        if bool((~is_clear | (2 * count > total)).all()):
            break
    return is_clear & (2 * count > total)


def _ignored(
    ones: Sequence[RowMap], others: Sequence[RowMap], columns: Tensor
) -> Tensor:
    pairs = [*zip(ones, others, strict=True)]
    stored = [
        torch.cat([own.weight[:, columns].double() for own in maps]).mT
        for maps in (ones, others)
    ]
    now = stacked([one.rows(_ALL, columns) for one, _ in pairs], 0)
    kept = stacked(
        [_read_as(one, other).rows(_ALL, columns) for one, other in pairs], 0
    )
    return left_alone(stored[0], stored[1], now.mT, kept.mT)


def _ignores_shift(ones: Sequence[RowMap], others: Sequence[RowMap]) -> Tensor:
    pairs = [*zip(ones, others, strict=True)]
    if all(
        one.read.shift is None
        and other.read.shift is None
        and one.bias_scale == other.bias_scale
        for one, other in pairs
    ):
        return torch.tensor([False])
    stored = [
        torch.cat(
            [replace(own, read=PLAIN, bias_scale=1.0).biases().numbers for own in maps]
        )
        for maps in (ones, others)
    ]
    now = stacked([one.biases() for one, _ in pairs], 0)
    kept = stacked([_read_as(one, other).biases() for one, other in pairs], 0)
    return left_alone(
        stored[0][None], stored[1][None], now.reshape(1, -1), kept.reshape(1, -1)
    )


def _read_as(one: RowMap, other: RowMap) -> RowMap:
    """Return the stored rows of a map with the input and the factors of another map."""
    return replace(one, read=other.read, scale=other.scale, bias_scale=other.bias_scale)
