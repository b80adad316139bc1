"""Values of a file in float64, with the size of their rounding, propagated through exact rewrites.

A rewritten value was rounded once, to the dtype of its file. Two rewritten values are the same if such
roundings explain their difference.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from triptych.rewriting.rounding import MOST_TIMES, unit

_EPS = torch.finfo(torch.float64).eps


@final
class Rounded:
    """Values with the squares of their rounding errors.

    Attributes:
        numbers: values in float64.
    """

    def __init__(self, numbers: Tensor, squares: Tensor | Callable[[], Tensor]) -> None:
        """`squares`: squares of the rounding errors, or a function to compute the squares on first use."""
        self.numbers = numbers
        self._squares = squares

    @property
    def squares(self) -> Tensor:
        """The sum of squares of the possible rounding errors of each value: half a unit in the last digit."""
        if not isinstance(self._squares, Tensor):
            self._squares = self._squares()
        return self._squares

    @property
    def lazy_squares(self) -> Callable[[], Tensor]:
        """A function to return the squares, with a reference to the values only if needed."""
        given = self._squares
        return (lambda: given) if isinstance(given, Tensor) else given

    def _changed(
        self, numbers: Tensor, change: Callable[[Tensor], Tensor]
    ) -> "Rounded":
        """Return new values, with a function of these squares as their squares."""
        squares = self.lazy_squares
        return Rounded(numbers, lambda: change(squares()))

    def _view(self, look: Callable[[Tensor], Tensor]) -> "Rounded":
        """Return a view of the values and of their squares, computed once for all views."""
        return Rounded(look(self.numbers), lambda: look(self.squares))

    @classmethod
    def stored(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> "Rounded":
        """Read a stored tensor, rounded to `dtype`; by default the dtype of the tensor."""
        dtype = tensor.dtype if dtype is None else dtype
        if not dtype.is_floating_point:
            return cls.exact(tensor)
        return cls(tensor.double(), lambda: _rounding(tensor, dtype))

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
        return self._view(lambda values: values.mT)

    def times(self, factor: Tensor | float) -> "Rounded":
        """Multiply by exact factors, broadcast."""
        if isinstance(factor, float) and factor == 1:
            return self
        return self._changed(
            self.numbers * factor, lambda squares: squares * (factor * factor)
        )

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

    def __getitem__(self, places: Any) -> "Rounded":
        return self._view(lambda values: values[places])

    def reshape(self, *shape: int) -> "Rounded":
        return self._view(lambda values: values.reshape(shape))

    def transpose(self, one: int, other: int) -> "Rounded":
        return self._view(lambda values: values.transpose(one, other))

    def repeat(self, times: int) -> "Rounded":
        """Repeat the rows of the first dimension, each one several times in succession."""
        return self._changed(
            self.numbers.repeat_interleave(times, dim=0),
            lambda squares: squares.repeat_interleave(times, dim=0),
        )

    def sum(self, dim: int) -> "Rounded":
        return Rounded(self.numbers.sum(dim), self.squares.sum(dim))

    def without_mean(self, dim: int) -> "Rounded":
        """Subtract the mean along a dimension."""
        mean = self.numbers.mean(dim, keepdim=True)
        count = self.numbers.shape[dim]
        return self._changed(
            self.numbers - mean,
            lambda squares: squares + squares.mean(dim, keepdim=True) / count,
        )


def _rounding(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the squares of half a unit in the last digit of stored values."""
    found: Tensor = (unit(stored.double().contiguous(), dtype) / 2).square()
    return found


def stacked(parts: Sequence[Rounded], dim: int) -> Rounded:
    """Concatenate along a dimension."""
    numbers = torch.cat([part.numbers for part in parts], dim)
    squares = [part.lazy_squares for part in parts]
    return Rounded(numbers, lambda: torch.cat([own() for own in squares], dim))


def largest(numbers: Tensor) -> Tensor:
    """Return the largest finite size of an entry, as a tensor without dimensions."""
    sizes = numbers.abs()
    if not sizes.numel():
        return torch.zeros((), dtype=numbers.dtype)
    found = sizes.amax()
    # The largest of all is finite in nearly every tensor, without entries to exclude.
    if bool(found.isfinite()):
        return found
    return sizes.where(sizes.isfinite(), 0.0).amax()


def excess(
    one: Rounded,
    other: Rounded,
    further: Tensor | float = 0.0,
    scale: Tensor | None = None,
) -> Tensor:
    """Return the differences of entries, in units of the allowed rounding error: at most 1 if explained.

    `further`: squares of further errors, broadcast. The arithmetic of float64 counts as an error, too: it is
    relative to `scale`, by default the largest entry.
    """
    difference = (one.numbers - other.numbers).abs()
    if scale is None:
        scale = torch.maximum(largest(one.numbers), largest(other.numbers))
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


def left_alone(one: Tensor, other: Tensor, now: Rounded, kept: Rounded) -> Tensor:
    """Return for each row of a map whether its stored values ignore a change of norms or factors.

    `one`, `other`: stored values of A and B, `[..., rows, width]`. `now`: effective values of A, with norms
    and factors folded in. `kept`: effective values in B if A's values were stored there. Stored values of a
    row have to differ in most entries where these two differ by more than rounding. A change below the
    rounding of a whole row counts as ignored, since folding it would not show.
    """
    moved = now.numbers != kept.numbers
    must = moved & ((now.numbers - kept.numbers).square() > kept.squares)
    done = must & (one != other)
    dims = [place for place in range(moved.ndim) if place != moved.ndim - 2]
    return moved.any(dim=dims) & (2 * done.sum(dim=dims) <= must.sum(dim=dims))


def factor_left_alone(
    one: Rounded, other: Rounded, factors: tuple[float, float]
) -> bool:
    """Return True if the stored values of A and B ignore the difference of the factors of their maps."""
    if factors[0] == factors[1] or one.shape != other.shape:
        return False
    now, kept = (one.reshape(1, -1).times(factor) for factor in factors)
    stored = one.numbers.reshape(1, -1), other.numbers.reshape(1, -1)
    return bool(left_alone(*stored, now, kept).any())


def equal_numbers(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have equal values, whatever their dtypes."""
    if one.shape != other.shape:
        return False
    return (
        torch.equal(one, other)
        if one.dtype == other.dtype
        else torch.equal(one.double(), other.double())
    )


def are_few(one: Tensor, other: Tensor) -> bool:
    """Return True if some entries differ, but at most half of them: rewrites of whole maps change most."""
    if one.shape != other.shape:
        return False
    differ = one != other
    return bool(differ.any()) and 2 * int(differ.sum()) <= differ.numel()


def finer(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype of two with the smaller rounding."""
    if not (one.is_floating_point and other.is_floating_point):
        return torch.float64
    return min(one, other, key=lambda dtype: torch.finfo(dtype).eps)
