"""How probable it is that random subspaces share as much as two subspaces do.

For random projections P and Q of ranks p and q in d dimensions, tr(P Q) is the sum of the squared cosines of
the principal angles. It is the Pillai–Bartlett trace of a multivariate analysis of variance. Its squared
cosines are those of the Jacobi ensemble, which a bidiagonal matrix of independent beta variables has, too
(Edelman & Sutton 2008, doi 10.1007/s10208-006-0215-9): the sum of its squared entries has the law of tr(P Q).
Along the diagonal each entry depends on its neighbours only, so the moment generating function is a product
of small matrices. Tails come from it by a saddlepoint approximation (Lugannani & Rice 1980, in the form of
Barndorff-Nielsen 1986), which keeps its relative error far out.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.algebra.spectrum import or_one

_NODES = 24
# From that many standard deviations below the mean to that many above, more where the law is skewed.
_LOWEST, _HIGHEST, _PLACES = -5, 9, 70
_STEP = 0.01


def chance_of_as_much(
    shared: Float[Tensor, " heads"], p: Int[Tensor, " heads"], q: Int[Tensor, " heads"], d: int
) -> Float[Tensor, " heads"]:
    """Upper tail of tr(P Q) at `shared`, for random subspaces of `p` and `q` dimensions out of `d`.

    Off by at most an eighth where it is above 10⁻⁴, and of the right order below; exact if one of the
    subspaces, or of their complements, is a line.
    """
    found = torch.ones_like(shared)
    for one, other in {*zip(p.tolist(), q.tolist(), strict=True)}:
        here = (p == one) & (q == other)
        found[here] = _tail(shared[here].double(), one, other, d).to(found.dtype)
    return found


def _tail(shared: Tensor, p: int, q: int, d: int) -> Tensor:
    # Subspaces too large to avoid each other share p + q − d dimensions, and as much as their complements do.
    common = max(p + q - d, 0)
    if common:
        p, q = d - p, d - q
    few, many = min(p, q), max(p, q)
    free = (shared - common).clamp(0, few)
    if few == 0:  # one space is everything, or nothing: there is nothing to be surprised at
        return torch.ones_like(free)
    if few == 1:
        return _tail_of_a_line(free, many, d)
    return _table(few, many, d).tail(free)


def _tail_of_a_line(shared: Tensor, q: int, d: int) -> Tensor:
    """Of the squared cosine of a random line with a subspace of q dimensions: a beta variable's."""
    a, b = q / 2, (d - q) / 2
    above, below = _beyond(shared, a, b), _beyond(1 - shared, b, a)
    return torch.where(shared > q / d, above, 1 - below).clamp(0, 1)


def _beyond(at: Tensor, a: float, b: float) -> Tensor:
    """The share of a Beta(a, b) variable above `at`: exact but for rounding where that is above its mean."""
    nodes, weights = _beta_rules(torch.tensor([b]), torch.tensor([1.0]), 64)
    # ∫ x^(a−1) (1−x)^(b−1) from `at` to 1, with 1 − x = (1 − at) t.
    inner = ((1 - (1 - at[:, None]) * nodes[0]) ** (a - 1) * weights[0]).sum(dim=-1)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return ((1 - at).log() * b - log_beta).exp() * inner / b


@final
@dataclass(frozen=True, eq=False)
class _Table:
    """Of tr(P Q) at many places: with which normal deviate its tail is reached.

    Attributes:
        places: ascending.
        deviates: of the same tails, ascending.
        most: the largest that tr(P Q) can be.
        slope: −d log(tail) / d place at the last of them.
    """

    places: Float[Tensor, " places"]
    deviates: Float[Tensor, " places"]
    most: int
    slope: float

    def tail(self, at: Float[Tensor, " heads"]) -> Float[Tensor, " heads"]:
        """Between two places the deviate is linear; past the last the tail falls to 0 at the end."""
        last = self.places[-1]
        right = torch.searchsorted(self.places, at).clamp(1, len(self.places) - 1)
        left = right - 1
        part = (at - self.places[left]) / (self.places[right] - self.places[left])
        deviate = self.deviates[left] + part.clamp(0, 1) * (self.deviates[right] - self.deviates[left])
        to_go = self.most - last
        beyond = ((self.most - at).clamp(max=to_go) / to_go) ** (self.slope * to_go)
        tail: Tensor = torch.special.ndtr(-deviate) * beyond
        return tail


@cache
def _table(p: int, q: int, d: int) -> _Table:
    spread = math.sqrt(2 * p * q * (d - p) * (d - q) / (d**2 * (d - 1) * (d + 2)))
    # Tilts that bring the mean of every squared cosine about where one wants it (the mode of Butler & Wood's
    # Laplace approximation, 2002, doi 10.1214/aos/1031689021), even on the scale of its log odds.
    steps = torch.linspace(_LOWEST, _HIGHEST, _PLACES, dtype=torch.float64)
    mean = q / d
    cosines = torch.sigmoid(math.log(mean / (1 - mean)) + steps * spread / (p * mean * (1 - mean)))
    tilts = (d - q) / 2 / (1 - cosines) - q / 2 / cosines
    step = _STEP / spread
    near = torch.stack([tilts - step, tilts, tilts + step])
    below, here, above = _log_moments(near.flatten(), p, q, d).view(3, -1)
    places, curvature = (above - below) / (2 * step), (above - 2 * here + below) / step**2
    signed = tilts.sign() * (2 * (tilts * places - here)).sqrt()
    deviates = signed + (tilts * curvature.sqrt() / signed).log() / signed
    # Where a tilt is too strong for the nodes the deviate does not grow any more, or is no number.
    grows = (deviates.diff() > 0) & (places.diff() > 0)
    middle = int(tilts.abs().argmin())
    last = middle + int(grows[middle:].long().cumprod(0).sum())
    first = middle - int(grows[:middle].flip(0).long().cumprod(0).sum())
    return _Table(places[first : last + 1], deviates[first : last + 1], most=p, slope=float(tilts[last]))


def _log_moments(tilts: Tensor, p: int, q: int, d: int) -> Tensor:
    """The logarithm of E exp(θ tr(P Q)) for every tilt θ; p ≤ q and p + q ≤ d.

    With x_i and y_i independent beta variables, the squared entries of the bidiagonal matrix sum to
    x_p + (1 − x_p) y_(p−1) + x_(p−1) (1 − y_(p−1)) + (1 − x_(p−1)) y_(p−2) + … + x_1 (1 − y_1).
    """
    place = torch.arange(1, p + 1, dtype=torch.float64)
    x, of_x = _beta_rules((q - p + place) / 2, (d - p - q + place) / 2, _NODES)
    y, of_y = _beta_rules(place / 2, (d - 2 * p + 1 + place) / 2, _NODES)
    tilts = tilts[:, None]
    log = torch.zeros_like(tilts)
    found = torch.ones_like(tilts).expand(-1, _NODES)

    def summed(over: Tensor, nodes: Tensor, weights: Tensor) -> Tensor:
        nonlocal log
        factors = (tilts[:, None] * (over[:, None] * nodes)).exp()
        sums: Tensor = (factors @ (weights * found)[:, :, None]).squeeze(-1)
        scale = sums.amax(dim=1, keepdim=True)
        log = log + scale.log()
        return sums / scale

    for i in range(p - 1):
        found = summed(1 - y[i], x[i], of_x[i])
        found = summed(1 - x[i + 1], y[i], of_y[i])
    found = summed(torch.ones(1, dtype=torch.float64), x[-1], of_x[-1])
    return (log + found.log()).squeeze(1)


def _beta_rules(a: Tensor, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Gauss's nodes and weights for means over Beta(a, b) variables: `[rules, count]` each.

    Source: Golub & Welsch 1969, with the recurrence of the Jacobi polynomials of exponents b − 1 and a − 1.
    """
    alpha, beta = b.double()[:, None] - 1, a.double()[:, None] - 1
    both = alpha + beta
    k = torch.arange(1, count, dtype=torch.float64)
    s = 2 * k + both
    centre = torch.cat([(beta - alpha) / (both + 2), (beta**2 - alpha**2) / (s * (s + 2))], dim=1)
    # The first is the general one after both + 1, which may be 0, is cancelled.
    side = 4 * k * (k + alpha) * (k + beta) * (k + both) / (s**2 * (s + 1) * or_one((s - 1).abs()))
    side[:, :1] = 4 * (1 + alpha) * (1 + beta) / ((2 + both) ** 2 * (3 + both))
    side = side.sqrt()
    nodes = torch.linalg.eigvalsh(
        torch.diag_embed(centre) + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    )
    # Orthonormal polynomials at the nodes; eigenvectors would lose the small weights, which tilts need.
    before, here = torch.zeros_like(nodes), torch.ones_like(nodes)
    squares = here.clone()
    for i in range(count - 1):
        back = side[:, i - 1 : i] if i else torch.zeros_like(side[:, :1])
        before, here = here, ((nodes - centre[:, i : i + 1]) * here - back * before) / side[:, i : i + 1]
        squares = squares + here.square()
    return (nodes + 1) / 2, 1 / squares
