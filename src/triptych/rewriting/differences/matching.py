"""Matching of heads, hidden units and experts by invariants under a change of basis."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.rewriting.differences.bases import Factors

# Random directions by which the forms of heads are compared.
_PROBES = 4
_SEED = 66
_ROWS_AT_A_TIME = 256


def form_signature(form: Factors, planes: int = 0) -> Tensor:
    """Return basis-independent values of each form, `[heads, values]`.

    The values are Xᵀ L Rᵀ Y for random X and Y. Each pair of the first 2 · `planes` channels, rotated by
    position, contributes separate values.
    """
    left = probes(form.left.shape[1], 0).mT @ form.left.numbers
    right = probes(form.right.shape[1], 1).mT @ form.right.numbers
    parts = [(left[..., 2 * planes :] @ right[..., 2 * planes :].mT).flatten(1)]
    if planes:
        query = torch.complex(left[..., :planes], left[..., planes : 2 * planes])
        key = torch.complex(right[..., :planes], right[..., planes : 2 * planes])
        each = torch.einsum("hxf,hyf->hfxy", query, key.conj()).flatten(1)
        parts += [each.real, each.imag]
    return scaled_signature(torch.cat(parts, dim=1))


def probes(rows: int, number: int) -> Tensor:
    """Return random directions, `[rows, directions]`, the same in every call with one number."""
    generator = torch.Generator().manual_seed(_SEED + number)
    return torch.randn(rows, _PROBES, dtype=torch.float64, generator=generator)


def row_signature(rows: Tensor, number: int) -> Tensor:
    """Return a few random projections of each row, divided by the root mean square of their norms."""
    return scaled_signature(rows @ probes(rows.shape[-1], number))


def scaled_signature(found: Tensor) -> Tensor:
    """Divide signatures by the root mean square of their norms."""
    size = (
        found.square()
        .sum(dim=1)
        .mean()
        .sqrt()
        .clamp(min=torch.finfo(torch.float64).tiny)
    )
    return found / size


class Match(NamedTuple):
    """Partners in B of the rows of A, and the distances of partners relative to the size of all rows."""

    partners: list[int]
    distances: list[float]


def match(a: Tensor, b: Tensor) -> Match:
    """Match each row of A with at most one row of B in order of distance; equal rows keep their index.

    Rows of A without a partner have the partner −1.
    """
    nearest = list[Tensor]()
    near = list[Tensor]()
    for rows in _blocks(len(a)):
        least = torch.cdist(a[rows], b).min(dim=1)
        nearest.append(least.indices)
        near.append(least.values)
    partners: list[int] = torch.cat(nearest).tolist()
    # Equal rows keep their index where possible.
    for own in range(min(len(a), len(b))):
        if partners[own] != own and torch.equal(a[own], b[own]):
            partners[own] = own
    if len({*partners}) == len(a):
        return Match(partners, torch.cat(near).tolist())
    return _one_by_one(a, b)


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _ROWS_AT_A_TIME):
        yield slice(start, min(start + _ROWS_AT_A_TIME, count))


def _one_by_one(a: Tensor, b: Tensor) -> Match:
    """Match the pairs of least distance first, where several rows share one nearest row."""
    partners = torch.full((len(a),), -1)
    found = torch.full((len(a),), float("inf"), dtype=a.dtype)
    rows, columns = torch.arange(len(a)), torch.arange(len(b))
    size = _largest_distance(a, b)
    while len(rows) and len(columns):
        # Rows that are each other's nearest are paired in any order of distance: all of them at once.
        own, other, distances = _mutual(a[rows], b[columns], size, (rows, columns))
        partners[rows[own]] = columns[other]
        found[rows[own]] = distances
        rows = _without(rows, own)
        columns = _without(columns, other)
    return Match(partners.tolist(), found.tolist())


def _largest_distance(a: Tensor, b: Tensor) -> Tensor:
    tiny = torch.full((), torch.finfo(torch.float64).tiny, dtype=a.dtype)
    return torch.stack(
        [tiny, *(torch.cdist(a[rows], b).amax() for rows in _blocks(len(a)))]
    ).amax()


class _Mutual(NamedTuple):
    """Pairs of mutually nearest rows, and their distances."""

    rows: Tensor
    columns: Tensor
    distances: Tensor


def _mutual(
    a: Tensor, b: Tensor, size: Tensor, places: tuple[Tensor, Tensor]
) -> _Mutual:
    """Return the mutually nearest rows of two tables, from blocks of rows of their distances.

    `size`: largest distance. `places`: indices of the rows. Pairs of equal indices have precedence over pairs
    at nearly equal distance.
    """
    nearest = torch.zeros(len(a), dtype=torch.long)
    distances = torch.zeros(len(a), dtype=a.dtype)
    back = torch.zeros(len(b), dtype=torch.long)
    least = torch.full((len(b),), float("inf"), dtype=a.dtype)
    for rows in _blocks(len(a)):
        apart = torch.cdist(a[rows], b)
        left = apart / size + 1e-9 * (places[0][rows, None] != places[1])
        nearest[rows] = left.argmin(dim=1)
        distances[rows] = apart.gather(1, nearest[rows, None])[:, 0]
        lower = left.min(dim=0)
        is_nearer = lower.values < least
        back = torch.where(is_nearer, lower.indices + rows.start, back)
        least = torch.where(is_nearer, lower.values, least)
    own = (back[nearest] == torch.arange(len(a))).nonzero().flatten()
    return _Mutual(own, nearest[own], distances[own])


def _without(values: Tensor, places: Tensor) -> Tensor:
    kept = torch.ones(len(values), dtype=torch.bool)
    kept[places] = False
    return values[kept]
