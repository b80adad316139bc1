"""Values of a file in float64, with the size of their rounding, propagated through exact rewrites.

A rewritten value was rounded once, to the dtype of its file. Two rewritten values are the same if such
roundings explain their difference.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from triptych.rewriting.rounding import MOST_TIMES, unit

_EPS = torch.finfo(torch.float64).eps


@final
@dataclass(frozen=True, eq=False)
class Rounded:
    """Values with the squares of their rounding errors.

    Attributes:
        numbers: values in float64.
        squares: sum of squares of the possible rounding errors of each value: half a unit in the last digit.
    """

    numbers: Tensor
    squares: Tensor

    @classmethod
    def stored(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> "Rounded":
        """Read a stored tensor, rounded to `dtype`; by default the dtype of the tensor."""
        numbers = tensor.double()
        dtype = tensor.dtype if dtype is None else dtype
        if not dtype.is_floating_point:
            return cls.exact(numbers)
        return cls(numbers, (unit(numbers.contiguous(), dtype) / 2).square())

    @classmethod
    def exact(cls, numbers: Tensor) -> "Rounded":
        return cls(
            numbers.double(), torch.zeros((), dtype=torch.float64).expand(numbers.shape)
        )

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def mT(self) -> "Rounded":
        return Rounded(self.numbers.mT, self.squares.mT)

    def times(self, factor: Tensor | float) -> "Rounded":
        """Multiply by exact factors, broadcast."""
        square = factor * factor
        return Rounded(self.numbers * factor, self.squares * square)

    def plus(self, other: "Rounded") -> "Rounded":
        return Rounded(self.numbers + other.numbers, self.squares + other.squares)

    def through(self, basis: Tensor) -> "Rounded":
        """Multiply by an exact matrix from the right."""
        return Rounded(self.numbers @ basis, self.squares @ basis.square())

    def __matmul__(self, other: "Rounded") -> "Rounded":
        squares = (
            self.squares @ other.numbers.square()
            + self.numbers.square() @ other.squares
        )
        return Rounded(self.numbers @ other.numbers, squares)

    def __getitem__(self, places: object) -> "Rounded":
        return Rounded(self.numbers[places], self.squares[places])  # type: ignore[index]

    def reshape(self, *shape: int) -> "Rounded":
        return Rounded(self.numbers.reshape(shape), self.squares.reshape(shape))

    def transpose(self, one: int, other: int) -> "Rounded":
        return Rounded(
            self.numbers.transpose(one, other), self.squares.transpose(one, other)
        )

    def repeat(self, times: int) -> "Rounded":
        """Repeat the rows of the first dimension, each one several times in succession."""
        return Rounded(
            self.numbers.repeat_interleave(times, dim=0),
            self.squares.repeat_interleave(times, dim=0),
        )

    def sum(self, dim: int) -> "Rounded":
        return Rounded(self.numbers.sum(dim), self.squares.sum(dim))

    def without_mean(self, dim: int) -> "Rounded":
        """Subtract the mean along a dimension."""
        mean = self.numbers.mean(dim, keepdim=True)
        count = self.numbers.shape[dim]
        return Rounded(
            self.numbers - mean,
            self.squares + self.squares.mean(dim, keepdim=True) / count,
        )


def stacked(parts: "list[Rounded]", dim: int) -> Rounded:
    """Concatenate along a dimension."""
    return Rounded(
        torch.cat([part.numbers for part in parts], dim),
        torch.cat([part.squares for part in parts], dim),
    )


def excess(one: Rounded, other: Rounded, further: Tensor | float = 0.0) -> Tensor:
    """Return the differences of entries, in units of the allowed rounding error: at most 1 if explained.

    `further`: squares of further errors, broadcast. The arithmetic of float64 counts as an error, too.
    """
    difference = (one.numbers - other.numbers).abs()
    scale = (
        torch.maximum(one.numbers.abs().amax(), other.numbers.abs().amax())
        if one.numbers.numel()
        else 0
    )
    squares = one.squares + other.squares + further
    allowed = MOST_TIMES * (squares + (4 * _EPS * scale) ** 2).sqrt()
    # Equal infinities count as equal; NaN is never explained.
    ratio = difference / allowed.clamp(min=torch.finfo(torch.float64).tiny)
    ratio = torch.where(one.numbers == other.numbers, 0.0, ratio)
    return ratio.nan_to_num(nan=torch.inf)


def is_same(one: Rounded, other: Rounded, rounded: Tensor | bool) -> bool:
    """Return True if values are equal, or explained by rounding where rewrites rounded them.

    `rounded`: mask of rounded values, broadcast.
    """
    if one.shape != other.shape:
        return False
    equal = one.numbers == other.numbers
    if bool(equal.all()):
        return True
    return bool((equal | rounded).all()) and float(excess(one, other).max()) <= 1


def finer(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype of two with the smaller rounding."""
    if not (one.is_floating_point and other.is_floating_point):
        return torch.float64
    return min(one, other, key=lambda dtype: torch.finfo(dtype).eps)
