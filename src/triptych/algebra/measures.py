"""Everything that is measured of the heads of one attention layer, without ever forming a d × d matrix.

Each map is written W = Q R with orthonormal columns in Q. What is asked of the forms and of pairs of maps
then needs only the small triangles R and the small products Q_aᵀ Q_b. Both come from products W_aᵀ W_b in
float64, a few heads at a time, where the weights have at most float32's digits; from a QR of each map where
they have more, or where a map is too near to losing rank.

What a head does with positions decides what may be said of where it looks. Rotary channels turn in planes
by the distance of key and query, so W_Q W_Kᵀ is the form of no pair but one at distance 0: energies of
planes take the place of its singular values, and what has no such counterpart is left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from triptych.algebra.similarity import MapSimilarity, Span, compare, span
from triptych.algebra.spectrum import Spectrum, or_one
from triptych.algebra.weights import SIDES, AttentionWeights, Side

Pair = Literal["qk", "qv", "kv"]
_COMPARED: dict[Pair, tuple[Side, Side]] = {"qk": ("q", "k"), "qv": ("q", "v"), "kv": ("k", "v")}
# Squaring a map squares its condition: with more than this, float64 would keep fewer digits than float32 has.
_LARGEST_CONDITION = 1e4
# Numbers in float64 of one map that are held at a time.
_NUMBERS_AT_A_TIME = 1 << 23


@final
@dataclass(frozen=True)
class Planes:
    """Channels of queries and keys that turn together with the position.

    Attributes:
        first: channel of each plane; likewise `second`.
        slow: whether a plane turns by less than a radian over the longest text: then it is as good as fixed.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    slow: tuple[bool, ...]


@final
@dataclass(frozen=True, eq=False)
class HeadMeasures:
    """What was measured of a layer's heads, in float64; NaN where a map is not finite.

    Attributes:
        qk: the spectrum of W_QK, or what takes its place.
        ov: that of W_OV.
        similarity: of the maps to queries, keys and values, in pairs; None where they read different inputs.
        norms: Frobenius norm of each map.
        symmetry: tr(A²)/‖A‖² of W_QK: 1 symmetric, −1 antisymmetric; None for rotary heads and others whose
            queries and keys cannot change places.
        copying: Σ Re λ / Σ |λ| of the eigenvalues of W_OV: 1 where what is read is written back, −1 where
            it is taken away; None if it is not square.
        finite: whether all four maps are.
    """

    qk: Spectrum
    ov: Spectrum
    similarity: dict[Pair, MapSimilarity | None]
    norms: dict[Side, Float[Tensor, " heads"]]
    symmetry: Float[Tensor, " heads"] | None
    copying: Float[Tensor, " heads"] | None
    finite: Bool[Tensor, " heads"]


def measure_heads(weights: AttentionWeights, planes: Planes | None = None) -> HeadMeasures:
    """Measure every head of a layer.

    Args:
        weights: its maps; biases and norms are left out, and what stands between two links is passed over.
        planes: the rotary ones; None for a head that looks where its form says, whatever the distance.
    """
    parts = _Parts(weights)
    itself = weights.traits.kind != "cross"
    values, symmetry, copying = parts.singular_values("q", "k"), None, None
    if planes is not None:
        values = _with_planes(parts, planes)
    elif itself and (turned := parts.turned("q", "k")) is not None:
        symmetry = (turned * turned.mT).sum(dim=(-2, -1)) / or_one(values.square().sum(dim=-1))
    if (turned := parts.turned("v", "o")) is not None:
        eigenvalues = torch.linalg.eigvals(turned)
        copying = eigenvalues.real.sum(dim=-1) / or_one(eigenvalues.abs().sum(dim=-1))
    return HeadMeasures(
        qk=Spectrum(parts.known(values)),
        ov=Spectrum(parts.known(parts.singular_values("v", "o"))),
        # Queries of cross-attention read another text than keys and values do: nothing to compare.
        similarity={
            pair: parts.compared(one, other) if itself or pair == "kv" else None
            for pair, (one, other) in _COMPARED.items()
        },
        norms={side: parts.known(torch.linalg.matrix_norm(parts.R[side])) for side in SIDES},
        symmetry=None if symmetry is None else parts.known(symmetry),
        copying=None if copying is None else parts.known(copying),
        finite=parts.finite,
    )


def _with_planes(parts: "_Parts", planes: Planes) -> Tensor:
    """Singular values of the channels that stay, and the roots of the energies of planes that turn.

    Plane f, seen as a pair of complex vectors u_f and v_f, has the mean square score ½ |xᵀu_f|² |yᵀv_f|² over
    distances: ½ ‖u_f‖² ‖v_f‖² for inputs without a preferred direction.
    """
    R_q, R_k = parts.R["q"], parts.R["k"]
    turning = [
        (a, b) for a, b, slow in zip(planes.first, planes.second, planes.slow, strict=True) if not slow
    ]
    first, second = [a for a, _ in turning], [b for _, b in turning]
    stays = sorted(set(range(R_q.shape[-1])) - {*first, *second})
    of_q, of_k = (R.square().sum(dim=-2) for R in (R_q, R_k))
    energies = (of_q[:, first] + of_q[:, second]) * (of_k[:, first] + of_k[:, second]) / 2
    values = energies.sqrt()
    if stays:
        fixed = torch.linalg.svdvals(R_q[..., stays] @ R_k[..., stays].mT)
        values = torch.cat([values, fixed[:, : len(stays)]], dim=-1)
    return values.sort(dim=-1, descending=True).values


class _Parts:
    """The small matrices that stand for the maps of all heads.

    Attributes:
        spans: of every map; of outputs, of the transposed map.
        R: `[heads, k, width]`, that of the span.
        finite: whether all four maps of a head are.
    """

    def __init__(self, weights: AttentionWeights) -> None:
        maps = {side: weights.multiplied(side).weight for side in SIDES}
        maps["o"] = maps["o"].mT
        self._d = {side: W.shape[1] for side, W in maps.items()}
        found = [_factorised(chunk) for chunk in _chunks(maps, weights.num_heads)]
        self.spans = {
            side: Span(*(torch.cat(parts) for parts in zip(*(c.spans[side] for c in found), strict=True)))
            for side in SIDES
        }
        self.R = {side: of.R for side, of in self.spans.items()}
        self._between = {
            pair: torch.cat([chunk.between[pair] for chunk in found]) for pair in found[0].between
        }
        self.finite: Bool[Tensor, " heads"] = torch.cat([chunk.finite for chunk in found])

    def known(self, values: Tensor) -> Tensor:
        """NaN in place of what is of a head that is not finite."""
        shape = (-1,) + (1,) * (values.ndim - 1)
        return values.where(self.finite.view(shape), math.nan)

    def singular_values(self, one: Side, other: Side) -> Tensor:
        """Of the form of two maps."""
        values: Tensor = torch.linalg.svdvals(self.R[one] @ self.R[other].mT)
        return values

    def turned(self, one: Side, other: Side) -> Tensor | None:
        """Small, with the traces and non-zero eigenvalues of a form and its powers; None if it has none."""
        between = self._between.get((one, other))
        return None if between is None else self.R[one] @ self.R[other].mT @ between.mT

    def compared(self, one: Side, other: Side) -> MapSimilarity | None:
        """Two maps that read the same; None if they do not."""
        between = self._between.get((one, other))
        if between is None:
            return None
        found = compare(self.spans[one], self.spans[other], between, self._d[one])
        return MapSimilarity(*map(self.known, found))


@final
@dataclass(frozen=True, eq=False)
class _Chunk:
    """What stands for the maps of a few heads."""

    spans: dict[Side, Span]
    between: dict[tuple[Side, Side], Tensor]
    finite: Tensor


_NEIGHBOURS: tuple[tuple[Side, Side], ...] = (("q", "k"), ("q", "v"), ("k", "v"), ("v", "o"))


def _chunks(maps: dict[Side, Tensor], heads: int) -> Iterator[dict[Side, tuple[Tensor, Tensor]]]:
    """A few heads at a time: of each side the copies they use, and which copy each head does."""
    largest = max(W.shape[1] * W.shape[2] for W in maps.values())
    count = max(1, _NUMBERS_AT_A_TIME // largest)
    for start in range(0, heads, count):
        these = torch.arange(start, min(start + count, heads))
        chunk = {}
        for side, W in maps.items():
            copies, place = (these * W.shape[0] // heads).unique(return_inverse=True)  # type: ignore[no-untyped-call]
            chunk[side] = W[copies], place
        yield chunk


def _factorised(chunk: dict[Side, tuple[Tensor, Tensor]]) -> _Chunk:
    """R of every head's maps, and Q_aᵀQ_b of neighbours."""
    places = {side: place for side, (_, place) in chunk.items()}
    has_many_digits = any(W.dtype == torch.float64 for W, _ in chunk.values())
    maps = {side: W.double() for side, (W, _) in chunk.items()}
    squares = {side: W.mT @ W for side, W in maps.items()}
    energies = {side: square.diagonal(dim1=-2, dim2=-1).sum(dim=-1) for side, square in squares.items()}
    finite = torch.stack([energies[side].isfinite()[places[side]] for side in SIDES]).all(dim=0)
    for side, energy in energies.items():
        if not bool(energy.isfinite().all()):
            maps[side] = torch.where(energy.isfinite()[:, None, None], maps[side], 0.0)
            squares[side] = maps[side].mT @ maps[side]
    pairs = [pair for pair in _NEIGHBOURS if maps[pair[0]].shape[1] == maps[pair[1]].shape[1]]
    triangles = None if has_many_digits else _triangles(squares)
    if triangles is None:
        frames = {side: torch.linalg.qr(W) for side, W in maps.items()}
        spans = {side: span(frame.R, maps[side].shape[1]) for side, frame in frames.items()}
        maps = {side: frame.Q for side, frame in frames.items()}
    else:
        spans = {side: _full_span(triangle, squares[side]) for side, triangle in triangles.items()}
    between = {(a, b): maps[a].mT[places[a]] @ maps[b][places[b]] for a, b in pairs}
    if triangles is not None:
        # Q_aᵀ Q_b = R_a⁻ᵀ (W_aᵀ W_b) R_b⁻¹.
        for (a, b), product in between.items():
            left = torch.linalg.solve_triangular(triangles[a][places[a]].mT, product, upper=False)
            right = triangles[b][places[b]]
            between[a, b] = torch.linalg.solve_triangular(right, left, upper=True, left=False)
    of_heads = {side: Span(*(part[places[side]] for part in of)) for side, of in spans.items()}
    return _Chunk(of_heads, between, finite)


def _triangles(squares: dict[Side, Tensor]) -> dict[Side, Tensor] | None:
    """R of W = Q R from WᵀW, the identity for W = 0; None if a map is too near to losing rank for that."""
    found: dict[Side, Tensor] = {}
    for side, square in squares.items():
        alive = _alive(square)
        eye = torch.eye(square.shape[-1], dtype=square.dtype)
        triangle, failed = torch.linalg.cholesky_ex(square.where(alive, eye), upper=True)
        if bool(failed.any()):
            return None
        values = torch.linalg.svdvals(triangle)
        if bool((values[:, 0] > _LARGEST_CONDITION * values[:, -1]).any()):
            return None
        found[side] = triangle
    return found


def _full_span(triangle: Tensor, square: Tensor) -> Span:
    """Of maps that are zero or have all their columns independent."""
    alive = _alive(square)
    basis = torch.eye(triangle.shape[-1], dtype=triangle.dtype) * alive
    return Span(triangle * alive, basis, alive[:, 0, 0] * triangle.shape[-1])


def _alive(square: Tensor) -> Tensor:
    """`[copies, 1, 1]`: whether a map differs from zero."""
    return square.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[:, None, None] > 0
