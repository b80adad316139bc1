"""Chance levels of head measures: their values for random maps, as a reference for measured values.

Maps have independent normal entries. Means are over many draws of small maps and few draws of large maps,
which vary less: each mean is within 2 % of the exact mean, for every size.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from triptych.core.algebra.spectrum import Spectrum

_MOST_DRAWS = 8192
_FEWEST_DRAWS = 4
# Draws times squared width: limits the eigenvalue problems of all draws to less than a second.
_SIZE_OF_DRAWS = 1 << 16


@cache
def random_spectra(d: int, width: int) -> Spectrum:
    """Draw the spectra of forms L Rᵀ of random maps, both `[d, width]`; one spectrum per draw."""
    generator = np.random.default_rng(0)
    draws = _draws(width)
    left, right = (_random_triangles(generator, draws, d, width) for _ in range(2))
    return Spectrum(torch.linalg.svdvals(left @ right.mT))


@cache
def random_closeness(d: int, width: int) -> float:
    """Compute the mean cosine of the entries of two random maps after the best rotation between them."""
    one, other, left_out = _random_pairs(d, width)
    norms = (
        torch.linalg.matrix_norm(one)
        * (other.square().sum(dim=(-2, -1)) + left_out).sqrt()
    )
    return float((torch.linalg.svdvals(one.mT @ other).sum(dim=-1) / norms).mean())


@cache
def random_copying_spread(d: int, width: int) -> float:
    """Compute the standard deviation of Σ Re λ / Σ |λ| of a random W_OV of maps `[d, width]`, of mean 0."""
    one, other, _ = _random_pairs(d, width)
    eigenvalues = torch.linalg.eigvals(other.mT @ one)
    traces = eigenvalues.real.sum(dim=-1).square()
    scores = traces / eigenvalues.abs().sum(dim=-1).square()
    # The mean of squared traces is exactly d × width. Scores and squared traces share the sampling error of
    # few draws, so their ratio cancels it.
    return float((scores.mean() / traces.mean() * d * width).sqrt())


def random_symmetric_share(d: int) -> float:
    """Return ‖½(A + Aᵀ)‖²/‖A‖² of a `[d, d]` form A of random factors, on average and for every rank."""
    return (1 + 1 / d) / 2


def _draws(width: int) -> int:
    return min(_MOST_DRAWS, max(_FEWEST_DRAWS, _SIZE_OF_DRAWS // width**2))


def _random_pairs(d: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw R and QᵀB of pairs of random maps A = Q R and B, and ‖B‖² − ‖QᵀB‖²."""
    generator = np.random.default_rng(0)
    draws = _draws(width)
    rank = min(d, width)
    one = _random_triangles(generator, draws, d, width)
    other = generator.standard_normal((draws, rank, width))
    left_out = generator.standard_gamma((d - rank) * width / 2, draws) * 2
    return one, torch.from_numpy(other), torch.from_numpy(left_out)


def _random_triangles(
    generator: np.random.Generator, draws: int, d: int, width: int
) -> Tensor:
    """Draw R of random maps `[d, width]` without forming the maps (Bartlett's decomposition)."""
    diagonal = np.arange(min(d, width))
    found = np.triu(generator.standard_normal((draws, len(diagonal), width)), 1)
    found[:, diagonal, diagonal] = np.sqrt(
        generator.chisquare(d - diagonal, (draws, len(diagonal)))
    )
    return torch.from_numpy(found)
