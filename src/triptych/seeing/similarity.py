"""How alike two maps are: measures of the matrices as written, and of the subspaces they span.

A head's basis is the training run's choice (the gauge): what compares entries says something about that
choice, what compares column spaces says something about the head. Both are given, and which is which.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class MapSimilarity(NamedTuple):
    """Two maps of every head side by side."""

    cosine: Float[Tensor, " heads"]  # of the entries, −1 to 1; depends on the basis
    procrustes: Float[Tensor, " heads"]  # the same after the best rotation of one of them, 0 to 1
    cka: Float[Tensor, " heads"]  # of the rows as examples
    angles: Float[Tensor, "heads k"]  # principal angles of the column spaces, ascending, in radians
    overlap: Float[Tensor, " heads"]  # mean squared cosine of the principal angles, 0 to 1
    chance: Float[Tensor, " heads"]
    p_value: Float[Tensor, " heads"]  # how probable an overlap as large or larger is for random subspaces

    @property
    def times_chance(self) -> Float[Tensor, " heads"]:
        """The overlap over its chance level."""
        return self.overlap / self.chance

    @property
    def excess(self) -> Float[Tensor, " heads"]:
        """The overlap above its chance level, as a share of the most that it can be above it.

        0 is chance and 1 the same subspace, whatever the sizes are. The largest `times_chance` depends on
        them: the width of the input divided by the width of the larger map. NaN where a map reads the whole
        input.
        """
        left = 1 - self.chance
        return ((self.overlap - self.chance) / left).where(left > 0, torch.nan)


class Span(NamedTuple):
    """What of a map W = Q R, with orthonormal columns in Q, is needed to compare it."""

    R: Float[Tensor, "heads k width"]
    basis: Float[Tensor, "heads k r"]  # of the column space, as combinations of the columns of Q
    rank: Int[Tensor, " heads"]  # of every map

    @property
    def is_full(self) -> bool:
        """Whether the columns of Q span the column space of the map."""
        return bool((self.rank == self.basis.shape[-2]).all())


def span(R: Float[Tensor, "heads k width"], d: int) -> Span:
    """The span of a map from its R; `d` is the height of the map."""
    U, S, _ = torch.linalg.svd(R, full_matrices=False)
    kept = S.gt(S[..., :1] * max(d, R.shape[-1]) * torch.finfo(S.dtype).eps)
    return Span(R, U * kept[..., None, :], kept.sum(dim=-1))


def compare_maps(one: Span, other: Span, between: Float[Tensor, "heads k other_k"], d: int) -> MapSimilarity:
    """Compare two maps of every head that read the same `d` channels, known by their spans."""
    product = one.R.mT @ between @ other.R
    norm = torch.linalg.matrix_norm
    norms = norm(one.R) * norm(other.R)
    of_spaces = between if one.is_full and other.is_full else one.basis.mT @ between @ other.basis
    cosines = torch.linalg.svdvals(of_spaces).clamp(max=1.0)
    # The maps may have more rows than the `d` channels: identities, and rounding where a norm removes some.
    ranks = one.rank.clamp(max=d), other.rank.clamp(max=d)
    smaller = torch.minimum(*ranks)
    larger = torch.maximum(*ranks)
    place = torch.arange(cosines.shape[-1], device=cosines.device)
    shared = torch.minimum(cosines.square().sum(dim=-1), smaller)
    same_width = one.R.shape[-1] == other.R.shape[-1]
    return MapSimilarity(
        cosine=product.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / norms
        if same_width
        else torch.full_like(norms, math.nan),
        procrustes=torch.linalg.svdvals(product).sum(dim=-1) / norms,
        cka=norm(product).square() / (norm(one.R.mT @ one.R) * norm(other.R.mT @ other.R)),
        angles=cosines.acos().masked_fill(place >= smaller[:, None], math.nan),
        overlap=shared / smaller,
        chance=larger.to(shared.dtype) / d,
        p_value=chance_of_as_much(shared, *ranks, d),
    )


def chance_of_as_much(
    shared: Float[Tensor, " heads"], p: Int[Tensor, " heads"], q: Int[Tensor, " heads"], d: int
) -> Float[Tensor, " heads"]:
    """Probability that random subspaces of `p` and `q` dimensions out of `d` share as much as `shared`.

    tr(P Q), the sum of the squared cosines, is Pillai's trace of a multivariate analysis of variance. Its law
    is replaced by the beta law of the same mean and variance, which is exact where one subspace is a line. In
    very few dimensions the tail is far too small: `docs/explanation/similarity.md`.
    """
    found = torch.ones_like(shared)
    for one, other in {*zip(p.tolist(), q.tolist(), strict=True)}:
        # Subspaces too large to avoid each other share p + q − d dimensions and what their complements do.
        common = max(one + other - d, 0)
        few, many = sorted((d - one, d - other) if common else (one, other))
        if few:
            here = (p == one) & (q == other)
            share = ((shared[here].double() - common) / few).clamp(0, 1)
            odds, log_tails = _overlap_tails(few, many, d)
            place = torch.searchsorted(odds, share.logit()).clamp(1, len(odds) - 1)
            part = ((share.logit() - odds[place - 1]) / (odds[place] - odds[place - 1])).clamp(0, 1)
            tail = log_tails[place - 1].lerp(log_tails[place], part).exp()
            found[here] = torch.where(share == 1, 0.0, tail).to(found.dtype)
    return found


@cache
def _overlap_tails(few: int, many: int, d: int) -> tuple[Tensor, Tensor]:
    """Log odds of tr(P Q) / few in steps of 1/100 of their deviation, and the logarithms of their tails."""
    mean = many / d
    variance = 2 * mean * (d - few) * (1 - mean) / (few * (d - 1) * (d + 2))
    a = mean * (mean * (1 - mean) / variance - 1)
    b = a * (1 - mean) / mean
    steps = torch.linspace(-60, 60, 12001, dtype=torch.float64) * math.sqrt(variance) / (mean * (1 - mean))
    odds = math.log(mean / (1 - mean)) + steps
    log_density = a * torch.nn.functional.logsigmoid(odds) + b * torch.nn.functional.logsigmoid(-odds)
    log_tails = log_density.flip(0).logcumsumexp(0).flip(0)
    return odds, log_tails - log_tails[0]


def sketches(
    left: Float[Tensor, "forms d r"], right: Float[Tensor, "forms other_d r"]
) -> Float[Tensor, "forms numbers"]:
    """A hundred numbers of every form A = left rightᵀ, of length 1: products of two are near the cosine."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(left.dtype, torch.float32)
    x, y = (
        torch.randn(_SKETCH, factor.shape[1], generator=generator).to(left.device, dtype)
        for factor in (left, right)
    )
    found = torch.stack(
        [
            ((x @ one.to(dtype)) * (y @ other.to(dtype))).sum(dim=-1)
            for one, other in zip(left, right, strict=True)
        ]
    )
    lengths: Tensor = torch.linalg.vector_norm(found, dim=-1, keepdim=True)
    normal: Tensor = found / lengths.clamp(min=1e-30)
    return normal


def similar(sketched: Float[Tensor, "forms numbers"], at_least: float, most: int) -> list[tuple[int, int]]:
    """Pairs i < j of forms whose cosine may be `at_least`, of either sign; the `most` likeliest, in order.

    A few rows of all products are held at a time.
    """
    best = sketched.new_empty(0)
    pairs = torch.empty(0, 2, dtype=torch.long)
    for start in range(0, len(sketched), _ROWS_AT_A_TIME):
        rows = sketched[start : start + _ROWS_AT_A_TIME]
        products = (rows @ sketched[start:].mT).abs().triu(1)
        places = (products > at_least - _SKETCH_MARGIN).nonzero()
        found = products[places[:, 0], places[:, 1]]
        best = torch.cat([best, found])
        pairs = torch.cat([pairs, places + start])
        order = best.argsort(descending=True, stable=True)[:most]
        best = best[order]
        pairs = pairs[order]
    return [(i, j) for i, j in pairs.tolist()]


def cosine_of_forms(
    left: Float[Tensor, "d r"],
    right: Float[Tensor, "other_d r"],
    other_left: Float[Tensor, "d s"],
    other_right: Float[Tensor, "other_d s"],
) -> float:
    """⟨A, B⟩ / (‖A‖ ‖B‖) of two products of factors, without forming either; 0 if one is zero."""
    l, r, m, s = (factor.double() for factor in (left, right, other_left, other_right))  # noqa: E741
    norms = math.sqrt(_inner(l, r, l, r) * _inner(m, s, m, s))
    return _inner(l, r, m, s) / norms if norms else 0.0


# The product of two sketches is off by about √2 / √ of their length; three times as much is rare.
_SKETCH = 128
_ROWS_AT_A_TIME = 512
_SKETCH_MARGIN = 0.38


def _inner(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor) -> float:
    """Σ A_ij B_ij of A = left rightᵀ and B = other_left other_rightᵀ."""
    return float(((left.mT @ other_left) * (right.mT @ other_right)).sum())
