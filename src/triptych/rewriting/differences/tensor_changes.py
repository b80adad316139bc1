"""Explanations of how one tensor became another: rounded, on a grid, changed by a low rank, pruned, mixed.

Every function compares two tensors and returns its evidence, or None without a fit. Matrices are `[out, in]`,
as in `torch.nn.Linear`. Stored entries are rounded: they are known up to the spacing of their dtype
(`spacing`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

FORMATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
# Largest numbers of float8: scales of quantisers bring the largest entry there.
_LARGEST = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}
# Common group sizes of quantisers, in entries of a row.
_GROUPS = (1024, 512, 256, 128, 64, 32, 16)
_SAMPLED_GROUPS = 64
_FEW_ROWS = 8
_FEW_GROUPS = 3
_MOST_LEVELS = 256
_CODEBOOK = 16
# Least logarithm of the odds against a fit by chance, over all sampled groups.
_SURE = 24.0
_SURE_OF_EACH = 6.0
_MOST_GROUPS = 0.45
# Largest rank of a low-rank change, relative to the smaller dimension.
_LOW = 0.25
_DENSE = 0.9
_MARGIN = 1.15
_SKETCHED = 600
_MOST_RANK = 288
# A product of low rank is a sum, computed in float32 at the least.
_TERMS = 64
# Entries converted to float64 at a time.
_ENTRIES_AT_A_TIME = 1 << 18


def spacing(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of a floating-point dtype at each entry, in float64."""
    about = torch.finfo(dtype)
    numbers = numbers.double().abs().clamp(min=about.smallest_normal)
    _, exponents = torch.frexp(numbers)
    return torch.ldexp(torch.full_like(numbers, about.eps), exponents - 1)


def coarsest(numbers: Tensor) -> torch.dtype:
    """Return the coarsest dtype of 16 bits or more with exact values for all entries of a tensor."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype.itemsize < numbers.dtype.itemsize and all(
            torch.equal(part.to(dtype).to(part.dtype), part)
            for part, _ in _part_and_all(numbers, numbers)
        ):
            return dtype
    return numbers.dtype


def rounded_to(before: Tensor, after: Tensor) -> str | None:
    """Return the format whose rounding of `before` gives `after`, nearest or towards zero."""
    if before.shape != after.shape:
        return None
    wide = torch.float64 if before.dtype == torch.float64 else torch.float32
    for name, rounded in _ROUNDINGS.items():
        # A part is compared first: most formats fail there.
        if all(
            torch.equal(rounded(old.to(wide)).to(wide), new.to(wide))
            for old, new in _part_and_all(before, after)
        ):
            return name
    if after.ndim < 2 or after.shape[-1] < _GROUPS[-2]:
        return None
    if after.dtype.itemsize == 1:
        after = after.to(wide)
    of_rows = after.abs().amax(dim=-1, keepdim=True).to(wide)
    for name, largest in _LARGEST.items():
        if _is_scaled(after, of_rows / largest, FORMATS[name]):
            before = before.to(wide)
            after = after.to(wide)
            scale = after.abs().amax(dim=-1, keepdim=True) / largest
            if _is_near(
                before, after, scale * largest * torch.finfo(FORMATS[name]).eps
            ):
                return f"{name} with scales"
    return None


def _cut_off(numbers: Tensor) -> Tensor:
    return (numbers.float().contiguous().view(torch.int32) & -(1 << 16)).view(
        torch.float32
    )


_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: partial(Tensor.to, dtype=dtype) for name, dtype in FORMATS.items()},
    "bfloat16, cut off instead of rounded": _cut_off,
}


def _part_and_all(before: Tensor, after: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a few rows of two tensors, and then the whole tensors."""
    if before.ndim > 1:
        yield before[:_FEW_ROWS], after[:_FEW_ROWS]
    yield before, after


def _is_scaled(after: Tensor, of_rows: Tensor, dtype: torch.dtype) -> bool:
    """Return True if a matrix is numbers of `dtype` times a scale, of the matrix or of each row."""
    every = len(after) // _FEW_ROWS + 1
    for scales in (of_rows.amax().expand_as(of_rows), of_rows):
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
        # Some rows are compared first: few matrices have such entries.
        if _on_multiples(after[::every].to(scales.dtype), scales[::every], dtype) and (
            _on_multiples(after.to(scales.dtype), scales, dtype)
        ):
            distinct = (after / scales).abs().flatten()[: 1 << 16].to(dtype).float()
            return (
                len(torch.unique(distinct)) > _CODEBOOK
            )  # fewer: a grid is the simpler explanation
    return False


def _on_multiples(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
    back = (numbers / scales).to(dtype).to(numbers.dtype) * scales
    # bfloat16 is the coarsest dtype that such products are stored in, much finer than float8.
    return _is_near(numbers, back, 2 * spacing(numbers, torch.bfloat16))


def _is_near(before: Tensor, after: Tensor, most: Tensor) -> bool:
    return bool(((after - before).abs() <= most).all())


@final
@dataclass(frozen=True)
class Grid:
    """Levels that the entries of each group lie on."""

    levels: int
    group: (
        int | None
    )  # consecutive entries of a row with one scale; None for whole rows
    is_even: bool  # True for levels in equal steps

    def __str__(self) -> str:
        where = "rows" if self.group is None else f"groups of {self.group}"
        kind = "a grid" if self.is_even else "a table"
        return f"{kind} of at most {self.levels} levels by {where}"


def on_grid(before: Tensor, after: Tensor, stored: torch.dtype) -> Grid | None:
    """Return the coarsest grid that a matrix lies on, and the matrix before does not."""
    if before.shape != after.shape or after.ndim != 2:
        return None
    columns = after.shape[1]
    sizes = (
        None,
        *(size for size in _GROUPS if size < columns and columns % size == 0),
    )
    grids = list[tuple[int, Callable[..., Grid | None], Grid]]()
    for find in (_even_grid, _table):
        for group in sizes:
            grid = find(_groups(after, group), group, stored)
            if grid is not None:
                grids.append((grid.levels, find, grid))
    # Quantisation keeps a matrix near: its error is below the matrix itself, by far for 4 bits and more.
    if not grids or relative_change(before, after) > 0.7:
        return None
    _, find_best, found = min(
        grids, key=lambda one: one[0]
    )  # the first is even, with large groups
    own = find_best(_groups(before, found.group), found.group, stored)
    return None if own is not None and own.levels <= found.levels else found


def _groups(matrix: Tensor, group: int | None) -> Tensor:
    """Return a sample of the groups of a matrix, spread over all of it, in float64."""
    of_row = 1 if group is None else matrix.shape[1] // group
    count = len(matrix) * of_row
    step = max(1, count // _SAMPLED_GROUPS)
    # An odd step visits groups at all positions within a row.
    sampled = torch.arange(0, count, step | 1)
    groups = matrix.unflatten(1, (of_row, -1))  # type: ignore[no-untyped-call]
    found: Tensor = groups[sampled // of_row, sampled % of_row].double()
    return found


def _even_grid(groups: Tensor, group: int | None, stored: torch.dtype) -> Grid | None:
    if groups.shape[1] < _GROUPS[-1]:
        return None
    # Try a few groups first: they all fail if the values are not on a grid.
    few = groups[:: len(groups) // _FEW_GROUPS + 1]
    if all(_levels(row, stored) is None for row in few):
        return None
    fitting = [found for row in groups if (found := _levels(row, stored)) is not None]
    # Groups of coarse dtypes can have an unclear step; nearly all groups fail if the group size is wrong.
    if len(fitting) < _MOST_GROUPS * len(groups):
        return None
    count = max(found.levels for found in fitting)
    odds = sum(found.odds for found in fitting)
    if count < 2 or odds < _SURE or odds < _SURE_OF_EACH * len(fitting):
        return None
    return Grid(1 << (count - 1).bit_length(), group, is_even=True)


def _table(groups: Tensor, group: int | None, stored: torch.dtype) -> Grid | None:
    if groups.shape[1] < 2 * _CODEBOOK:
        return None
    count = 1
    for row in groups:
        count = max(count, len(torch.unique(row)))
        if count > _CODEBOOK:
            return None
    return Grid(1 << (count - 1).bit_length(), group, is_even=False)


class _Levels(NamedTuple):
    levels: int  # steps from the lowest to the highest entry, plus 1
    odds: float  # logarithm of the odds against random entries


def _levels(row: Tensor, stored: torch.dtype) -> _Levels | None:
    """Return the levels of one group, if its entries lie in equal steps up to rounding."""
    values = torch.unique(row)
    if len(values) == 1:
        return _Levels(1, 0.0)
    largest = values.abs().max()
    # Levels are computed in at least float32, and then rounded.
    near = 0.7 * spacing(values, stored) + 4 * spacing(largest, torch.float32)
    exact = values.abs() <= largest / 4
    if int(exact.sum()) < 4:
        exact = torch.ones_like(exact)
    start = values[exact]
    gaps = start.diff()
    clear = gaps > 4 * near[exact][1:]
    if not bool(clear.any()):
        return None
    least = float(gaps[clear].min())
    for parts in (1, 2, 3):
        step = least / parts
        if float((values[-1] - values[0]) / step) > 2 * _MOST_LEVELS:
            return None
        # Gaps between small entries are exact and few steps wide: errors of the step do not add up.
        number = torch.cat(
            [torch.zeros(1, dtype=torch.float64), (gaps / step).round().cumsum(0)]
        )
        step, first = _fitted(number, start, near[exact])
        number = ((values - first) / step).round()
        step, first = _fitted(number, values, near)
        error = (values - first - number * step).abs()
        count = int(number[-1] - number[0]) + 1
        if bool((error <= near).all()) and count <= _MOST_LEVELS:
            # A random entry is within `near` of a level with probability 2 near / step.
            chances = (2 * near / step).clamp(min=1e-6, max=1.0)
            return _Levels(count, -float(chances[2:].log().sum()))
    return None


def _fitted(number: Tensor, values: Tensor, near: Tensor) -> tuple[float, float]:
    """Fit a straight line to values known up to `near`: its step and first level."""
    weight = near.pow(-2) / near.pow(-2).sum()
    middle = (weight * number).sum()
    centred = weight * (number - middle)
    step = float((centred * values).sum() / (centred * number).sum())
    return step, float((weight * values).sum() - step * middle)


@final
@dataclass(frozen=True)
class LowRank:
    """A change of low rank: `after = before + product`, up to rounding."""

    rank: int
    share: float  # Frobenius norm of the change, relative to the matrix before


def low_rank(before: Tensor, after: Tensor, stored: torch.dtype) -> LowRank | None:
    """Return the rank of a change; None if the change is not of low rank, or of few rows or columns.

    The rank counts singular values above the rounding of stored entries; the remainder must be as small as
    rounding.
    """
    if before.shape != after.shape or after.ndim != 2:
        return None
    most = min(_MOST_RANK, int(_LOW * min(after.shape)))
    if most < 1:
        return None
    count = _rank_of_part(before, after, stored, most)
    if count is None:
        return None
    change = after.double() - before.double()
    rounding = _rounding_of_sum(before, after, stored)
    basis = _range(change, count + 8)
    inner = basis.mT @ change
    values = torch.linalg.svdvals(inner)
    rank = int((values > _edge(rounding)).sum())
    if not 1 <= rank <= most:
        return None
    left = (change.square().sum() - values[:rank].square().sum()).clamp(min=0).sqrt()
    if float(left) > 1.6 * float(rounding.sum().sqrt()):
        return None
    # Permuted heads and single rows have a low rank as well. A product of dense factors changes all rows and
    # columns.
    changed = change != 0
    if min(_share(changed.any(dim=0)), _share(changed.any(dim=1))) < _DENSE:
        return None
    return LowRank(rank, float(change.norm() / before.double().norm()))


def _share(held: Tensor) -> float:
    return float(held.double().mean())


def _rounding_of_sum(before: Tensor, after: Tensor, stored: torch.dtype) -> Tensor:
    """Return the variances of the rounding of `after`, a sum, and perhaps of the product in it."""
    before = before.double()
    after = after.double()
    found = spacing(torch.maximum(before.abs(), after.abs()), stored).square() / 12
    found += _TERMS * spacing(after - before, torch.float32).square() / 12
    return found


def _rank_of_part(
    before: Tensor, after: Tensor, stored: torch.dtype, most: int
) -> int | None:
    """Return the rank of a submatrix, a lower bound for the matrix; None if it is too large."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        torch.randperm(size, generator=generator)[:_SKETCHED].sort().values
        for size in after.shape
    )
    before, after = (own[rows][:, columns].double() for own in (before, after))
    values = torch.linalg.svdvals(after - before)
    rank = int((values > _edge(_rounding_of_sum(before, after, stored))).sum())
    return rank if rank <= most else None


def _edge(variances: Tensor) -> float:
    """Bound the singular values of a random matrix with independent entries of these variances.

    Source: Bandeira and van Handel 2016, arXiv 1408.6185, theorem 1.1.
    """
    return _MARGIN * float(
        variances.sum(dim=0).max().sqrt() + variances.sum(dim=1).max().sqrt()
    )


def _range(matrix: Tensor, count: int) -> Tensor:
    """Return an orthonormal basis of the columns of a matrix of low rank.

    Source: Halko et al. 2011, arXiv 0909.4061, algorithm 4.4.
    """
    generator = torch.Generator().manual_seed(0)
    count = min(count, *matrix.shape)
    sample = torch.randn(
        matrix.shape[1], count, generator=generator, dtype=matrix.dtype
    )
    found, _ = torch.linalg.qr(matrix @ sample)
    again, _ = torch.linalg.qr(matrix.mT @ found)
    basis: Tensor = torch.linalg.qr(matrix @ again).Q
    return basis


@final
@dataclass(frozen=True)
class Pruned:
    """Entries that became zero, while all others stayed."""

    share: float  # fraction of all entries
    structure: str  # "rows", "columns", "2 of 4", or "" for single entries


def pruned(before: Tensor, after: Tensor) -> Pruned | None:
    """Return the share and structure of pruned entries; the remaining entries must be equal."""
    if before.shape != after.shape:
        return None
    gone = (after == 0) & (before != 0)
    if not bool(gone.any()) or not torch.equal(
        after, torch.where(gone, 0.0, before).to(after.dtype)
    ):
        return None
    return Pruned(float(gone.double().mean()), _structure(after == 0, gone))


def _structure(zero: Tensor, gone: Tensor) -> str:
    if zero.ndim == 2:
        if bool((gone.any(dim=1) <= zero.all(dim=1)).all()):
            return "rows"
        if bool((gone.any(dim=0) <= zero.all(dim=0)).all()):
            return "columns"
        if zero.shape[1] % 4 == 0 and bool(
            (zero.view(len(zero), -1, 4).sum(-1) >= 2).all()
        ):
            return "2 of 4"
    return ""


@final
@dataclass(frozen=True)
class Mixture:
    """A combination of two tensors: `own · before + other · third`."""

    own: float
    other: float


def mixture(
    before: Tensor, third: Tensor, after: Tensor, stored: torch.dtype
) -> Mixture | None:
    """Return the combination of `before` and `third` that `after` is, up to the rounding of its entries."""
    if not before.shape == third.shape == after.shape:
        return None
    first, second, made = (one.double().flatten() for one in (before, third, after))
    gram = torch.stack([first.dot(first), first.dot(second), second.dot(second)])
    # Least squares of two unknowns; the solution is not unique for parallel tensors.
    determinant = float(gram[0] * gram[2] - gram[1].square())
    if determinant <= 1e-14 * float(gram[0] * gram[2]):
        return None
    one, other = first.dot(made), second.dot(made)
    own = float(gram[2] * one - gram[1] * other) / determinant
    share = float(gram[0] * other - gram[1] * one) / determinant
    error = (made - own * first - share * second).abs()
    largest = torch.maximum(torch.maximum(first.abs(), second.abs()), made.abs())
    if (
        bool((error > 1.5 * spacing(largest, stored)).any())
        or min(abs(own), abs(share)) < 1e-3
    ):
        return None
    return Mixture(own, share)


def added_one(before: Tensor, after: Tensor, stored: torch.dtype) -> float | None:
    """Return 1 or −1 if gains differ by that: the 1 of `1 + w` was lost, or is there twice."""
    if before.shape != after.shape or before.ndim != 1:
        return None
    for one in (1.0, -1.0):
        error = (after.double() - before.double() - one).abs()
        near = spacing(
            torch.maximum(after.double().abs(), before.double().abs() + 1), stored
        )
        if bool((error <= near).all()):
            return one
    return None


def is_transposed(before: Tensor, after: Tensor) -> bool:
    """Return True if a square matrix is that before, transposed."""
    if before.ndim != 2 or after.shape != before.shape:
        return False
    return torch.equal(before.mT.to(after.dtype), after)


def rotary_order(before: Tensor, after: Tensor, heads: int, turned: int) -> str | None:
    """Return how the rows of each head were permuted between two layouts of rotary pairs.

    `before`, `after`: maps `[heads · width, d_in]`, or biases. `turned`: number of rotated leading channels.
    """
    if before.shape != after.shape or len(before) % heads:
        return None
    width = len(before) // heads
    halves = torch.arange(turned).view(2, -1)
    rest = torch.arange(turned, width)
    from_halves = torch.cat([halves.mT.flatten(), rest])
    to_halves = torch.cat([torch.arange(turned).view(-1, 2).mT.flatten(), rest])
    old = before.unflatten(0, (heads, width)).to(after.dtype)  # type: ignore[no-untyped-call]
    new = after.unflatten(0, (heads, width))  # type: ignore[no-untyped-call]
    if torch.equal(old[:, from_halves], new):
        return "pairs of halves → neighbouring pairs"
    if torch.equal(old[:, to_halves], new):
        return "neighbouring pairs → pairs of halves"
    return None


def is_tiled(before: Tensor, after: Tensor, groups: int, copies: int) -> bool:
    """Return True if key-value heads were copied in the order 0 1 0 1, where 0 0 1 1 is meant.

    `before`: `[groups · width, d_in]`. `after`: `[copies · width, d_in]`.
    """
    if (
        copies <= groups
        or copies % groups
        or groups == 1
        or before.shape[1:] != after.shape[1:]
    ):
        return False
    old = before.unflatten(0, (groups, -1))  # type: ignore[no-untyped-call]
    new = after.unflatten(0, (copies, -1))  # type: ignore[no-untyped-call]
    if old.shape[1:] != new.shape[1:]:
        return False
    return torch.equal(torch.cat([old] * (copies // groups)).to(new.dtype), new)


def same_start(before: Tensor, after: Tensor) -> int | None:
    """Return the number of equal leading rows of two tables, if it is the length of the shorter table."""
    if (
        before.ndim != 2
        or before.shape[1:] != after.shape[1:]
        or len(before) == len(after)
    ):
        return None
    rows = min(len(before), len(after))
    return rows if torch.equal(before[:rows].to(after.dtype), after[:rows]) else None


def relative_change(before: Tensor, after: Tensor) -> float:
    """Return the Frobenius norm of the change relative to that of the tensor before."""
    sizes = norms_of_rows(before, after)
    norm = float(sizes.before.norm())
    change = float(sizes.change.norm())
    return change / norm if norm else (float("inf") if change else 0.0)


class RowNorms(NamedTuple):
    """Norms of the rows of a tensor, and of their changes; a vector or a number is one row."""

    before: Tensor
    change: Tensor


def norms_of_rows(before: Tensor, after: Tensor) -> RowNorms:
    """Return the norms of rows in float64, with some rows converted at a time."""
    old, new = (
        own.flatten(1) if own.ndim > 1 else own.reshape(1, -1)
        for own in (before, after)
    )
    size = max(1, _ENTRIES_AT_A_TIME // max(old.shape[1], 1))
    parts = [
        (mine.double().norm(dim=1), (theirs.double() - mine.double()).norm(dim=1))
        for mine, theirs in zip(
            torch.split(old, size), torch.split(new, size), strict=True
        )
    ]
    return RowNorms(*map(torch.cat, zip(*parts, strict=True)))


def scaled(before: Tensor, after: Tensor, stored: torch.dtype) -> float | None:
    """Return the factor that a tensor was multiplied by."""
    if before.shape != after.shape:
        return None
    factor = None
    for mine, theirs in _part_and_all(before, after):
        old = mine.double()
        new = theirs.double()
        energy = float(old.square().sum())
        if not energy:
            return None
        factor = float((old * new).sum()) / energy
        error = (new - factor * old).abs()
        if bool(
            (error > 1.5 * spacing(torch.maximum(old.abs(), new.abs()), stored)).any()
        ):
            return None
    return factor


def num_different(before: Tensor, after: Tensor) -> int:
    """Count the entries that differ between two tensors of one shape."""
    wide = torch.promote_types(before.dtype, after.dtype)
    return int((before.to(wide) != after.to(wide)).sum())


def is_spread(before: Tensor, after: Tensor, most: float) -> bool:
    """Return True if most rows changed, and all by less than a share `most` of the row.

    Training changes matrices in this way. A permutation of heads changes some rows completely.
    """
    if before.ndim < 2:
        before = before.reshape(-1, 1)
        after = after.reshape(-1, 1)
    sizes = norms_of_rows(before, after)
    shares = sizes.change / sizes.before.clamp(min=1e-30)
    return (
        float((shares > 0).double().mean()) > 0.5
        and float(shares.quantile(0.99)) <= most
    )
