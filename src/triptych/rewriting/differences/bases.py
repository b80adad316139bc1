"""Bases inside heads and hidden units, solved from both factors of a form.

Two factorisations L_a R_aᵀ and L_b R_bᵀ of one form differ by a basis G: L_a G = L_b and R_b Gᵀ = R_a. These
equations are linear in G. Conversely, whatever G satisfies them, the forms are equal: L_a R_aᵀ = L_a G R_bᵀ =
L_b R_bᵀ. So the equations alone verify a basis.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from triptych.rewriting.differences.rounded import Rounded, excess, largest

# Steps of refinement of a solution, since normal equations square the condition of the factors.
_REFINEMENTS = 2
# Least change of a factor by another basis, in units of its rounding.
CLEAR = 16
# Rows of a factor compared first.
_FIRST_ROWS = 64
_TINY = torch.finfo(torch.float64).tiny


class Factors(NamedTuple):
    """Factors of the forms of heads, left rightᵀ, of shape `[heads, rows, width]`."""

    left: Rounded
    right: Rounded


class FoundBasis(NamedTuple):
    """Bases of heads, with the distances of the rewritten factors of A from the factors of B."""

    basis: Tensor  # `[heads, width of a, width of b]`
    left: Tensor  # largest excess of each head's left factor over rounding, `[heads]`; at most 1 if explained
    right: Tensor
    is_another: Tensor  # False for heads with the basis of A up to rounding, `[heads]`

    @property
    def explained(self) -> Tensor:
        """True for heads with equal factors up to rounding."""
        return (self.left <= 1) & (self.right <= 1)


def solve_basis(a: Factors, b: Factors) -> Tensor:
    """Return the bases that fit both factors of each head best."""
    # A factor without a stored map, such as the input itself, is exact: it determines the basis.
    if _are_exact(a.right, b.right):
        transposed: Tensor = torch.linalg.lstsq(
            b.right.numbers, a.right.numbers
        ).solution
        return transposed.mT
    if _are_exact(a.left, b.left):
        basis: Tensor = torch.linalg.lstsq(a.left.numbers, b.left.numbers).solution
        return basis
    weights = _weight(a.left, b.left), _weight(a.right, b.right)
    left = a.left.numbers, b.left.numbers
    right = a.right.numbers, b.right.numbers
    basis = torch.zeros(
        left[0].shape[0], left[0].shape[-1], left[1].shape[-1], dtype=torch.float64
    )
    of_left = torch.linalg.eigh(weights[0] * (left[0].mT @ left[0]))
    of_right = torch.linalg.eigh(weights[1] * (right[1].mT @ right[1]))
    sums = of_left.eigenvalues[:, :, None] + of_right.eigenvalues[:, None, :]
    least = sums.abs().amax(dim=(-2, -1), keepdim=True) * 1e-13
    inverse = torch.where(sums > least, 1 / sums.clamp(min=_TINY), 0.0)
    for _ in range(1 + _REFINEMENTS):
        missing = weights[0] * (left[0].mT @ (left[1] - left[0] @ basis))
        missing = missing + weights[1] * (
            (right[0] - right[1] @ basis.mT).mT @ right[1]
        )
        turned = of_left.eigenvectors.mT @ missing @ of_right.eigenvectors
        basis = (
            basis + of_left.eigenvectors @ (turned * inverse) @ of_right.eigenvectors.mT
        )
    return basis


def _are_exact(one: Rounded, other: Rounded) -> bool:
    is_rounded = bool(one.squares.any() or other.squares.any())
    return not is_rounded and bool(other.numbers.any())


def solve_planes(a: Factors, b: Factors, planes: int) -> Tensor:
    """Return the bases that commute with rotary positions and fit best.

    The first `planes` channels and the next as many are the two channels of rotary pairs: for each pair, a
    basis is a complex number. Further channels are not rotated, and have any basis among them.
    """
    weights = _weight(a.left, b.left), _weight(a.right, b.right)
    left = _complex(a.left.numbers, planes), _complex(b.left.numbers, planes)
    right = _complex(a.right.numbers, planes), _complex(b.right.numbers, planes)
    fitting = weights[0][..., 0] * (left[0].conj() * left[1]).sum(dim=1)
    fitting = fitting + weights[1][..., 0] * (right[1] * right[0].conj()).sum(dim=1)
    sizes = weights[0][..., 0] * left[0].abs().square().sum(dim=1)
    sizes = sizes + weights[1][..., 0] * right[1].abs().square().sum(dim=1)
    numbers = fitting / sizes.clamp(min=_TINY)
    width = a.left.shape[-1]
    basis = torch.zeros(len(numbers), width, b.left.shape[-1], dtype=torch.float64)
    first = torch.arange(planes)
    basis[:, first, first] = numbers.real
    basis[:, first, planes + first] = numbers.imag
    basis[:, planes + first, first] = -numbers.imag
    basis[:, planes + first, planes + first] = numbers.real
    if width > 2 * planes:
        rest = [
            Factors(*(part[:, :, 2 * planes :] for part in factors))
            for factors in (a, b)
        ]
        basis[:, 2 * planes :, 2 * planes :] = solve_basis(*rest)
    return basis


def check_basis(a: Factors, b: Factors, basis: Tensor) -> FoundBasis:
    """Check bases: L_a G = L_b and R_b Gᵀ = R_a, up to the rounding of the factors."""
    left = _excess(a.left, basis, b.left)
    right = _excess(b.right, basis.mT, a.right)
    # A basis near that of A would absorb single differing entries.
    is_another = torch.tensor([True]).expand(len(basis))
    if basis.shape[-2] == basis.shape[-1]:
        change = basis - torch.eye(basis.shape[-1], dtype=basis.dtype)
        is_another = _is_moved(a.left, b.left, change) | _is_moved(
            b.right, a.right, change.mT
        )
    return FoundBasis(basis, left, right, is_another)


def _is_moved(one: Rounded, other: Rounded, change: Tensor) -> Tensor:
    """Return for each head whether a change of basis moves a factor by clearly more than rounding."""
    moved = (one.numbers @ change).square().sum(dim=(-2, -1))
    rounding = (one.squares + other.squares).sum(dim=(-2, -1))
    # A factor without rounding changes with the norm before it, and shows no basis.
    return (rounding > 0) & (moved > CLEAR**2 * rounding)


def check_identity(a: Factors, b: Factors) -> FoundBasis:
    """Check whether the factors are the same up to rounding, without another basis."""
    width = a.left.shape[-1]
    basis = torch.eye(width, dtype=torch.float64).expand(len(a.left.numbers), -1, -1)
    left = _excess_in_place(a.left, b.left)
    right = _excess_in_place(a.right, b.right)
    return FoundBasis(basis, left, right, torch.tensor([False]).expand(len(basis)))


def _excess_in_place(one: Rounded, other: Rounded) -> Tensor:
    """Return the largest excess of each head's factor; only of its first rows if they exceed the rounding."""
    scale = torch.maximum(largest(one.numbers), largest(other.numbers))
    first = slice(0, _FIRST_ROWS)
    rest = slice(_FIRST_ROWS, None)
    found = excess(one[:, first], other[:, first], scale=scale).amax(dim=(-2, -1))
    for head in (found <= 1).nonzero().flatten().tolist():
        mine = one[head, rest]
        theirs = other[head, rest]
        if mine.numbers.numel():
            beyond = excess(mine, theirs, scale=scale).amax()
            found[head] = torch.maximum(found[head], beyond)
    return found


def _excess(one: Rounded, basis: Tensor, other: Rounded) -> Tensor:
    """Return the largest excess of L G over rounding, for each head."""
    led = one.through(basis)
    # The basis was solved from rounded values: the rounding of a row with high leverage moved the basis.
    leverage = _leverage(one.numbers)[..., None]
    mean = (led.squares + other.squares).mean(dim=-2, keepdim=True)
    return excess(led, other, leverage * mean).amax(dim=(-2, -1))


def _leverage(rows: Tensor) -> Tensor:
    """Return the leverage of each row in least squares, between 0 and 1."""
    found = torch.linalg.eigh(rows.mT @ rows)
    values = found.eigenvalues[:, None, :]
    least = values.amax(dim=-1, keepdim=True) * 1e-13
    turned = (rows @ found.eigenvectors).square()
    return (
        torch.where(values > least, turned / values.clamp(min=_TINY), 0.0)
        .sum(dim=-1)
        .clamp(0, 1)
    )


def _weight(one: Rounded, other: Rounded) -> Tensor:
    """Return the weight of the equations of a factor for each head: the inverse of its mean rounding.

    The factors may have other widths: the rank of a factor may be lower than its width.
    """
    squares = _mean_of_heads(one.squares) + _mean_of_heads(other.squares)
    size = _mean_of_heads(one.numbers.square()) + _mean_of_heads(other.numbers.square())
    return 1 / torch.maximum(squares, 1e-20 * size).clamp(min=_TINY)


def _mean_of_heads(numbers: Tensor) -> Tensor:
    return numbers.mean(dim=(-2, -1), keepdim=True)


def _complex(numbers: Tensor, planes: int) -> Tensor:
    return torch.complex(numbers[..., :planes], numbers[..., planes : 2 * planes])
