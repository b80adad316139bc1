"""Row counts for which the bits of a row of a matrix product do not depend on the other rows.

A library may change the order of summation with the number of rows, depending on the shape, the dtype, the
processor and the number of threads. Products of each shape are therefore compared on this machine, when a
shape is first used.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from triptych import thresholds

# Row counts compared at the first product, and at the first product with more rows than these.
_FEW = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32)
_MANY = (33, 64, 128, 200)
# Row counts compared to choose a layout: few, medium and many rows.
_FOR_LAYOUTS = (2, 32, 64)
# Number of different rows of a test weight; further rows repeat them.
_DIFFERENT = 64

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ProductShape:
    """Possible influences on a product's order of summation, except row and thread counts."""

    d_in: int
    d_out: int
    dtype: torch.dtype
    has_bias: bool
    layout: int  # number of rows for which packed weights are laid out

    def __str__(self) -> str:
        return f"{self.d_in} × {self.d_out}"


class RowCounts(NamedTuple):
    """Row counts with equal bits: `fewest` to `most`, and `sizes`."""

    fewest: int
    most: int  # `sys.maxsize` if all compared row counts give equal bits
    sizes: tuple[int, ...] = ()  # row counts above `most`, in descending order
    is_whole: bool = False  # True if large row counts have been compared, too

    def pieces(self, rows: int) -> list[int]:
        """Split `rows` into valid row counts; the last may be below `fewest`."""
        found = list[int]()
        for size in (*self.sizes, self.most):
            found += [size] * (rows // size)
            rows %= size
        return [*found, rows] if rows else found


# Constructor of the product of a shape from a weight and a bias.
MakeProduct = Callable[[ProductShape, Tensor, Tensor | None], Product]

# Results by shape and number of threads.
_FOUND: dict[tuple[ProductShape, int], RowCounts] = {}
_LAYOUTS: dict[tuple[ProductShape, int], int] = {}


def row_counts(shape: ProductShape, rows: int, make: MakeProduct) -> RowCounts:
    """Find row counts with equal bits for a shape, as far as needed for a product of `rows` rows."""
    key = shape, torch.get_num_threads()
    if key not in _FOUND:
        _FOUND[key] = alike(compared(shape, _FEW, make))
    if rows > _FEW[-1] and not _FOUND[key].is_whole:
        _FOUND[key] = _with_many(_FOUND[key], shape, make)
    return _FOUND[key]


def _with_many(few: RowCounts, shape: ProductShape, make: MakeProduct) -> RowCounts:
    """Compare large row counts, too, within the budget `thresholds.COMPARED_PRODUCTS`."""
    affordable = thresholds.COMPARED_PRODUCTS // (shape.d_in * shape.d_out)
    (_, first), *signs = compared(
        shape, (few.most, *(count for count in _MANY if count <= affordable)), make
    )
    same = [count for count, sign in signs if _same(sign, first)]
    if few.most == _FEW[-1] and len(same) == len(_MANY):
        return RowCounts(few.fewest, sys.maxsize, is_whole=True)
    # If a row count differs, row counts not compared may differ, too.
    return RowCounts(few.fewest, few.most, (*same[::-1], *few.sizes), is_whole=True)


def best_layout(shape: ProductShape, layouts: Sequence[int], make: MakeProduct) -> int:
    """Return the first layout with equal bits for few and many rows, or else the last layout."""
    key = shape, torch.get_num_threads()
    if key not in _LAYOUTS:
        for layout in layouts:
            _LAYOUTS[key] = layout
            signs = compared(replace(shape, layout=layout), _FOR_LAYOUTS, make)
            if all(_same(sign, signs[0][1]) for _, sign in signs):
                break
    return _LAYOUTS[key]


def compared(
    shape: ProductShape, counts: Sequence[int], make: MakeProduct
) -> list[tuple[int, Float[Tensor, " d_out"] | None]]:
    """Compute a row of the product for each row count; None if equal rows of a product differ in bits.

    All exact sums are 0. The results are rounding errors, which reveal the order of summation in any dtype.
    """
    # Entries of the row come in equal pairs, entries of a weight row in pairs of opposite sign.
    draw = torch.Generator().manual_seed(0)
    half = shape.d_in // 2
    odd = shape.d_in % 2
    places = torch.randperm(shape.d_in, generator=draw)
    drawn = torch.randn(1 + _DIFFERENT, half, generator=draw).to(shape.dtype)
    filling = drawn.new_zeros(_DIFFERENT, odd)
    row = torch.cat([drawn[0], drawn[0], filling[0]])[places]
    different = torch.cat([drawn[1:], -drawn[1:], filling], dim=1)[:, places]
    weight = different.repeat(-(-shape.d_out // _DIFFERENT), 1)[: shape.d_out]
    product = make(
        shape, weight, weight.new_zeros(shape.d_out) if shape.has_bias else None
    )
    found = list[tuple[int, Tensor | None]]()
    for count in counts:
        y = product(row.repeat(count, 1))
        found.append((count, y[0].clone() if bool((y == y[0]).all()) else None))
    return found


def alike(signs: Sequence[tuple[int, Tensor | None]]) -> RowCounts:
    """Find the longest run of row counts with equal bits, or the first of equally long runs."""
    best = list[int]()
    for start, (_, sign) in enumerate(signs):
        run = list[int]()
        for count, other in signs[start:]:
            if not _same(other, sign):
                break
            run.append(count)
        if len(run) > len(best):
            best = run
    if best[-1] == signs[-1][0]:
        return RowCounts(best[0], best[-1])
    # If a row count differs, only consecutive row counts form the range; larger equal ones become `sizes`.
    dense = [count for place, count in enumerate(best) if count == best[0] + place]
    return RowCounts(best[0], dense[-1], tuple(best[: len(dense) - 1 : -1]))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)
