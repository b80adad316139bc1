"""Matching of heads, hidden units and experts by invariants under a change of basis."""

from typing import NamedTuple

import torch
from torch import Tensor

from triptych.rewriting.differences.bases import Factors

# Random directions by which the forms of heads are compared.
_PROBES = 4
_SEED = 66
_ROWS_AT_A_TIME = 1024


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
    for start in range(0, len(a), _ROWS_AT_A_TIME):
        distances = torch.cdist(a[start : start + _ROWS_AT_A_TIME], b)
        least = distances.min(dim=1)
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


def _one_by_one(a: Tensor, b: Tensor) -> Match:
    """Match the pairs of least distance first, where several rows share one nearest row."""
    distances = torch.cdist(a, b)
    size = distances.amax().clamp(min=torch.finfo(torch.float64).tiny)
    # Among pairs of nearly equal distance, prefer equal indices.
    place = 1e-9 * (torch.arange(len(a))[:, None] != torch.arange(len(b))[None])
    left = distances / size + place
    partners = torch.full((len(a),), -1)
    found = torch.full((len(a),), float("inf"), dtype=distances.dtype)
    rows, columns = torch.arange(len(a)), torch.arange(len(b))
    while len(rows) and len(columns):
        # Rows that are each other's nearest are paired in any order of distance: all of them at once.
        nearest = left.argmin(dim=1)
        is_mutual = left.argmin(dim=0)[nearest] == torch.arange(len(rows))
        own, other = rows[is_mutual], columns[nearest[is_mutual]]
        partners[own] = other
        found[own] = distances[own, other]
        is_free = torch.ones(len(columns), dtype=torch.bool)
        is_free[nearest[is_mutual]] = False
        rows, columns = rows[~is_mutual], columns[is_free]
        left = left[~is_mutual][:, is_free]
    return Match(partners.tolist(), found.tolist())
