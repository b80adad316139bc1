"""The singular values of a form, and measures of them."""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values and measures of them, computed without overflow and underflow."""

    values: Float[Tensor, "*batch k"]  # descending

    @property
    def spectral_norm(self) -> Float[Tensor, "*batch"]:
        """σ₁, the largest factor by which the form stretches a row."""
        return self.values[..., 0]

    @property
    def frobenius_norm(self) -> Float[Tensor, "*batch"]:
        """√Σσ²."""
        return self._relative.square().sum(dim=-1).sqrt() * self.values[..., 0]

    @property
    def condition(self) -> Float[Tensor, "*batch"]:
        """σ₁ over the smallest singular value; infinite if the smallest is 0 within rounding."""
        largest = self.values[..., 0]
        smallest = self.values[..., -1]
        lost = smallest <= largest * _ROUNDING
        return torch.where(lost, math.inf, largest / or_one(smallest))

    @property
    def effective_rank(self) -> Float[Tensor, "*batch"]:
        """Exponential of the entropy of σ/Σσ: 1 to k, and 0 if all singular values are 0.

        Source: Roy & Vetterli 2007, "The effective rank", EUSIPCO.
        """
        shares = self._relative / or_one(self._relative.sum(dim=-1, keepdim=True))
        entropy: Tensor = torch.special.entr(shares).sum(dim=-1)
        return entropy.exp() * self._is_nonzero

    @property
    def stable_rank(self) -> Float[Tensor, "*batch"]:
        """Σσ²/σ₁²: 1 to k, and 0 if all singular values are 0."""
        return self._relative.square().sum(dim=-1)

    @property
    def participation_ratio(self) -> Float[Tensor, "*batch"]:
        """(Σσ²)²/Σσ⁴: 1 to k, and 0 if all singular values are 0."""
        squares = self._relative.square()
        return squares.sum(dim=-1).square() / or_one(squares.square().sum(dim=-1))

    @property
    def kept(self) -> Float[Tensor, "*batch k"]:
        """Share of Σσ² in the first 1, 2, … singular values; 1 if all singular values are 0."""
        squares = self._relative.square()
        shares = squares.cumsum(dim=-1) / or_one(squares.sum(dim=-1, keepdim=True))
        return torch.where(self._is_nonzero[..., None], shares, 1.0)

    def rank(self, tolerance: float) -> Int[Tensor, "*batch"]:
        """Count the singular values above `tolerance` times the largest singular value."""
        return self.values.gt(self.values[..., :1] * tolerance).sum(dim=-1)

    def rank_within(self, loss: float) -> Int[Tensor, "*batch"]:
        """Return the lowest rank for a loss of at most this share of Σσ²; 0 if all singular values are 0."""
        kept = self.kept
        missing = kept.lt(1 - loss - _ROUNDING * math.sqrt(kept.shape[-1])).sum(dim=-1)
        return (missing + 1) * self._is_nonzero

    @property
    def _relative(self) -> Tensor:
        """σ/σ₁: its powers do not overflow, and the largest does not underflow."""
        return self.values / or_one(self.values[..., :1])

    @property
    def _is_nonzero(self) -> Tensor:
        return self.values[..., 0] > 0


# Tolerance of comparisons: a share reached within rounding is reached, and a value of 0 within rounding is 0.
_ROUNDING = 1e-12


def or_one(x: Tensor) -> Tensor:
    """Replace values up to 0 by 1, for use as divisors."""
    return torch.where(x > 0, x, 1.0)
