"""How alike two maps are: measures of the matrices as written, and of the subspaces they span.

A head's basis is the training run's choice (the gauge): what compares entries says something about that
choice, what compares column spaces says something about the head. Both are given, and which is which.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class MapSimilarity(NamedTuple):
    """Two maps of every head side by side.

    Attributes:
        cosine: of the entries, −1 to 1; depends on the basis. NaN where the shapes differ.
        procrustes: the same after the best rotation of one of them, 0 to 1: does not depend on rotations.
        cka: of the rows as examples, 0 to 1 (Kornblith et al. 2019, arXiv 1905.00414, linear, uncentred):
            does not depend on rotations either.
        angles: principal angles of the column spaces, ascending, in radians; NaN past the ranks.
        overlap: mean squared cosine of the principal angles, 0 to 1: does not depend on the basis.
        chance: what the overlap is on average for random subspaces of the same dimensions.
        p_value: how probable an overlap as large or larger is for random subspaces; normal approximation.
    """

    cosine: Float[Tensor, " heads"]
    procrustes: Float[Tensor, " heads"]
    cka: Float[Tensor, " heads"]
    angles: Float[Tensor, "heads k"]
    overlap: Float[Tensor, " heads"]
    chance: Float[Tensor, " heads"]
    p_value: Float[Tensor, " heads"]

    @property
    def times_chance(self) -> Float[Tensor, " heads"]:
        """The overlap over its chance level."""
        return self.overlap / self.chance


class Span(NamedTuple):
    """What of a map W = Q R, with orthonormal columns in Q, is needed to compare it.

    Attributes:
        R: `[heads, k, width]`.
        basis: of the column space, as combinations of the columns of Q; those past the rank are zero.
        rank: of every map.
    """

    R: Float[Tensor, "heads k width"]
    basis: Float[Tensor, "heads k r"]
    rank: Int[Tensor, " heads"]


def span(R: Float[Tensor, "heads k width"], d: int) -> Span:
    """The span of a map from its R; `d` is the height of the map."""
    U, S, _ = torch.linalg.svd(R, full_matrices=False)
    kept = S.gt(S[..., :1] * max(d, R.shape[-1]) * torch.finfo(S.dtype).eps)
    return Span(R, U * kept[..., None, :], kept.sum(dim=-1))


def map_similarity(
    one: Float[Tensor, "heads d one_width"], other: Float[Tensor, "other_heads other_d other_width"]
) -> MapSimilarity:
    """Compare two maps that read the same input, head by head.

    Args:
        one: a map of every head; finite.
        other: another, of as many heads and of the same d.

    Raises:
        ValueError: they do not read the same input, or are not finite.
    """
    if one.shape[:2] != other.shape[:2]:
        raise ValueError(
            f"maps {list(one.shape)} and {list(other.shape)} have no common input: heads and d must agree"
        )
    if not (bool(one.isfinite().all()) and bool(other.isfinite().all())):
        raise ValueError("a map has entries that are not finite (NaN or infinite)")
    dtype = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    (Q_one, R_one), (Q_other, R_other) = (torch.linalg.qr(W.to(dtype)) for W in (one, other))
    d = one.shape[1]
    return compare(span(R_one, d), span(R_other, d), Q_one.mT @ Q_other, d)


def compare(one: Span, other: Span, between: Float[Tensor, "heads k other_k"], d: int) -> MapSimilarity:
    """The same of maps known by their spans.

    Args:
        one: of a map Q R of every head.
        other: of another, Q' R'.
        between: QᵀQ'.
        d: height of both maps.
    """
    product = one.R.mT @ between @ other.R
    norms = _norm(one.R) * _norm(other.R)
    cosines = torch.linalg.svdvals(one.basis.mT @ between @ other.basis).clamp(max=1.0)
    smaller, larger = torch.minimum(one.rank, other.rank), torch.maximum(one.rank, other.rank)
    place = torch.arange(cosines.shape[-1], device=cosines.device)
    shared = cosines.square().sum(dim=-1)
    alike = one.R.shape[-1] == other.R.shape[-1]
    return MapSimilarity(
        cosine=product.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / norms
        if alike
        else torch.full_like(norms, math.nan),
        procrustes=torch.linalg.svdvals(product).sum(dim=-1) / norms,
        cka=_norm(product).square() / (_norm(one.R.mT @ one.R) * _norm(other.R.mT @ other.R)),
        angles=cosines.acos().masked_fill(place >= smaller[:, None], math.nan),
        overlap=shared / smaller,
        chance=larger.to(shared.dtype) / d,
        p_value=_chance_of_as_much(shared, one.rank, other.rank, d),
    )


def near_copies(
    left: Float[Tensor, "forms d r"], right: Float[Tensor, "forms d r"], at_least: float, seed: int = 0
) -> list[tuple[int, int, float]]:
    """Pairs of forms A_i = left_i right_iᵀ whose cosine ⟨A_i, A_j⟩ / (‖A_i‖ ‖A_j‖) is large, by its size.

    All pairs are first compared through random numbers xᵀ A y, whose products are those of the forms on
    average; only what comes near is worked out. A pair that just reaches `at_least` may be missed.

    Args:
        left: the first factor of every form.
        right: the second.
        at_least: cosines of at least this size are given, of either sign.
        seed: of the random numbers.

    Returns:
        Places i < j and the cosine, the largest size first.
    """
    forms, d, _ = left.shape
    if forms < 2:
        return []
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(_SKETCHES, d, generator=generator).to(left.dtype).to(left.device) for _ in range(2))
    sketches = torch.stack([((x @ l) * (y @ r)).sum(dim=-1) for l, r in zip(left, right, strict=True)])  # noqa: E741
    sketches = sketches / sketches.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    near = (sketches @ sketches.mT).abs() > at_least - _SKETCH_MARGIN
    found = []
    for i, j in near.triu(1).nonzero().tolist():
        cosine = float(_inner(left[i], right[i], left[j], right[j]))
        norms = math.sqrt(
            float(_inner(left[i], right[i], left[i], right[i]) * _inner(left[j], right[j], left[j], right[j]))
        )
        if norms > 0 and abs(cosine / norms) >= at_least:
            found.append((i, j, cosine / norms))
    return sorted(found, key=lambda pair: -abs(pair[2]))


# Random numbers a form; the cosine of two sketches is off by about 2 / √ of that, and three times as much is
# rare.
_SKETCHES = 2048
_SKETCH_MARGIN = 0.15


def _inner(l_one: Tensor, r_one: Tensor, l_other: Tensor, r_other: Tensor) -> Tensor:
    """⟨L R'ᵀ, L' R''ᵀ⟩ without either product."""
    return ((l_one.mT @ l_other) * (r_one.mT @ r_other)).sum()


def _chance_of_as_much(shared: Tensor, p: Tensor, q: Tensor, d: int) -> Tensor:
    """Upper tail of tr(P Q) for random projections of ranks p and q in d dimensions.

    Mean p q / d, variance 2 p q (d − p)(d − q) / (d² (d − 1)(d + 2)), and near to normal.
    """
    p, q = p.double(), q.double()
    mean = p * q / d
    variance = 2 * p * q * (d - p) * (d - q) / (d**2 * max(d - 1, 1) * (d + 2))
    z = (shared.double() - mean) / variance.clamp(min=1e-30).sqrt()
    tail = 0.5 * torch.special.erfc(z / math.sqrt(2))
    # Where one space is everything there is nothing to be surprised at.
    return torch.where(variance > 0, tail, 1.0).to(shared.dtype)


def _norm(x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.matrix_norm(x)
    return found
