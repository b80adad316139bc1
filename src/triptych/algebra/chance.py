"""What measures of a head are when its maps are random: the level that others have to be seen against.

Maps with independent normal entries are drawn once for every size; one draw is near enough, since what is
measured is a mean over many channels.
"""

from functools import cache

import torch
from torch import Tensor

from triptych.algebra.spectrum import Spectrum

_DRAWS = 32


@cache
def random_spectrum(d: int, width: int) -> Spectrum:
    """Of a form L Rᵀ of random maps, `[d, width]` both."""
    left, right = _drawn(d, width)
    R_left, R_right = (torch.linalg.qr(one).R for one in (left, right))
    return Spectrum(torch.linalg.svdvals(R_left @ R_right.mT))


@cache
def random_closeness(d: int, width: int) -> float:
    """The cosine of the entries of two random maps after the best rotation of one of them."""
    one, other = _drawn(d, width)
    norms = torch.linalg.matrix_norm(one) * torch.linalg.matrix_norm(other)
    return float(torch.linalg.svdvals(one.mT @ other).sum() / norms)


@cache
def random_copying_spread(width: int) -> float:
    """The standard deviation of Σ Re λ / Σ |λ| of a random W_OV of this rank; its mean is 0."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(_DRAWS, width, width, generator=generator, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvals(found)
    scores = eigenvalues.real.sum(dim=-1) / eigenvalues.abs().sum(dim=-1)
    return float(scores.square().mean().sqrt())


def _drawn(d: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(d, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return one, other
