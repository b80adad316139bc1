"""Similarity of two maps: measures of the matrices as stored, and of their column spaces.

A head's basis is an arbitrary choice of the training run (the gauge): measures of entries depend on this
choice, measures of column spaces only on the head. Both kinds of measures are reported and labelled.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class MapSimilarity(NamedTuple):
    """Similarity of two maps, for every head."""

    cosine: Float[
        Tensor, " heads"
    ]  # cosine of the entries, −1 to 1; depends on the basis
    procrustes: Float[
        Tensor, " heads"
    ]  # cosine of the entries after the best rotation, 0 to 1
    cka: Float[Tensor, " heads"]  # linear CKA, with rows as examples
    angles: Float[
        Tensor, "heads k"
    ]  # principal angles of the column spaces, ascending, in radians
    overlap: Float[
        Tensor, " heads"
    ]  # mean squared cosine of the principal angles, 0 to 1
    chance: Float[Tensor, " heads"]
    p_value: Float[
        Tensor, " heads"
    ]  # probability of at least this overlap for random subspaces

    @property
    def times_chance(self) -> Float[Tensor, " heads"]:
        """Ratio of the overlap to its chance level."""
        return self.overlap / self.chance

    @property
    def excess(self) -> Float[Tensor, " heads"]:
        """Overlap above chance, relative to the largest possible overlap above chance.

        0 is chance and 1 the same subspace, for all sizes. But the largest `times_chance` depends on
        the sizes: it is the width of the input divided by the width of the larger map. NaN for a map reading
        the whole input.
        """
        left = 1 - self.chance
        return ((self.overlap - self.chance) / left).where(left > 0, torch.nan)


class Span(NamedTuple):
    """Factors of a map W = Q R, with orthonormal columns in Q, for comparisons."""

    R: Float[Tensor, "heads k width"]
    basis: Float[
        Tensor, "heads k r"
    ]  # basis of the column space, as combinations of the columns of Q
    rank: Int[Tensor, " heads"]  # rank of every map

    @property
    def is_full(self) -> bool:
        """True if the columns of Q span the column space of the map."""
        return bool((self.rank == self.basis.shape[-2]).all())


def span(R: Float[Tensor, "heads k width"], d: int) -> Span:
    """Return the span of a map from its R; `d` is the height of the map."""
    U, S, _ = torch.linalg.svd(R, full_matrices=False)
    kept = S.gt(S[..., :1] * max(d, R.shape[-1]) * torch.finfo(S.dtype).eps)
    return Span(R, U * kept[..., None, :], kept.sum(dim=-1))


def compare_maps(
    one: Span, other: Span, between: Float[Tensor, "heads k other_k"], d: int
) -> MapSimilarity:
    """Compare two maps of every head reading the same `d` channels, given their spans."""
    product = one.R.mT @ between @ other.R
    norm = torch.linalg.matrix_norm
    norms = norm(one.R) * norm(other.R)
    of_spaces = (
        between
        if one.is_full and other.is_full
        else one.basis.mT @ between @ other.basis
    )
    cosines = torch.linalg.svdvals(of_spaces).clamp(max=1.0)
    # Maps may have more rows than `d`: identities, or rounding where a norm removes directions.
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
        cka=norm(product).square()
        / (norm(one.R.mT @ one.R) * norm(other.R.mT @ other.R)),
        angles=cosines.acos().masked_fill(place >= smaller[:, None], math.nan),
        overlap=shared / smaller,
        chance=larger.to(shared.dtype) / d,
        p_value=chance_of_as_much(shared, *ranks, d),
    )


def chance_of_as_much(
    shared: Float[Tensor, " heads"],
    p: Int[Tensor, " heads"],
    q: Int[Tensor, " heads"],
    d: int,
) -> Float[Tensor, " heads"]:
    """Return the probability that random subspaces share at least `shared`.

    The subspaces have `p` and `q` dimensions out of `d`. tr(P Q), the sum of the squared cosines, is Pillai's
    trace of a multivariate analysis of variance. Its distribution is approximated by the beta distribution of
    equal mean and variance, exact if one subspace is a line. In very few dimensions the tail is far too
    small: `docs/explanation/similarity.md`.
    """
    found = torch.ones_like(shared)
    for one, other in {*zip(p.tolist(), q.tolist(), strict=True)}:
        # Large subspaces share at least p + q − d dimensions, plus the overlap of their complements.
        common = max(one + other - d, 0)
        few, many = sorted((d - one, d - other) if common else (one, other))
        if few:
            here = (p == one) & (q == other)
            share = ((shared[here].double() - common) / few).clamp(0, 1)
            odds, log_tails = _overlap_tails(few, many, d)
            place = torch.searchsorted(odds, share.logit()).clamp(1, len(odds) - 1)
            part = (
                (share.logit() - odds[place - 1]) / (odds[place] - odds[place - 1])
            ).clamp(0, 1)
            tail = log_tails[place - 1].lerp(log_tails[place], part).exp()
            found[here] = torch.where(share == 1, 0.0, tail).to(found.dtype)
    return found


@cache
def _overlap_tails(few: int, many: int, d: int) -> tuple[Tensor, Tensor]:
    """Tabulate log odds of tr(P Q) / few, in steps of 1/100 of their deviation, and log tails."""
    mean = many / d
    variance = 2 * mean * (d - few) * (1 - mean) / (few * (d - 1) * (d + 2))
    a = mean * (mean * (1 - mean) / variance - 1)
    b = a * (1 - mean) / mean
    steps = (
        torch.linspace(-60, 60, 12001, dtype=torch.float64)
        * math.sqrt(variance)
        / (mean * (1 - mean))
    )
    odds = math.log(mean / (1 - mean)) + steps
    log_density = a * torch.nn.functional.logsigmoid(
        odds
    ) + b * torch.nn.functional.logsigmoid(-odds)
    log_tails = log_density.flip(0).logcumsumexp(0).flip(0)
    return odds, log_tails - log_tails[0]


def sketches(
    left: Float[Tensor, "forms d r"], right: Float[Tensor, "forms other_d r"]
) -> Float[Tensor, "forms numbers"]:
    """Compute a sketch of length 1 per form A = left rightᵀ: products of two sketches estimate the cosine."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(left.dtype, torch.float32)
    x, y = (
        torch.randn(_SKETCH, factor.shape[1], generator=generator).to(
            left.device, dtype
        )
        for factor in (left, right)
    )
    # The forms themselves are never computed: x A yᵀ from the factors.
    found = torch.stack(
        [
            ((x @ one.to(dtype)) * (y @ other.to(dtype))).sum(dim=-1)
            for one, other in zip(left, right, strict=True)
        ]
    )
    lengths: Tensor = torch.linalg.vector_norm(found, dim=-1, keepdim=True)
    normal: Tensor = found / lengths.clamp(min=1e-30)
    return normal


def similar(
    sketched: Float[Tensor, "forms numbers"], at_least: float, most: int
) -> list[tuple[int, int]]:
    """Return pairs i < j of forms with a cosine of possibly `at_least`, of either sign: the `most` likeliest.

    Products of a few rows at a time are in memory.
    """
    # A running selection of the best pairs limits the memory.
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
    """Return ⟨A, B⟩ / (‖A‖ ‖B‖) of two products of factors without forming them; 0 if a product is zero."""
    l, r, m, s = (factor.double() for factor in (left, right, other_left, other_right))  # noqa: E741
    norms = math.sqrt(_inner(l, r, l, r) * _inner(m, s, m, s))
    return _inner(l, r, m, s) / norms if norms else 0.0


# The product of two sketches has a standard error of about √2 / √_SKETCH; three times this error is rare.
_SKETCH = 128
_ROWS_AT_A_TIME = 512
_SKETCH_MARGIN = 0.38


def _inner(
    left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor
) -> float:
    """Return Σ A_ij B_ij of A = left rightᵀ and B = other_left other_rightᵀ."""
    return float(((left.mT @ other_left) * (right.mT @ other_right)).sum())
