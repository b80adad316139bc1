"""Everything that is measured of the heads of one attention layer, without ever forming a d × d matrix.

Each map is written W = Q R with orthonormal columns in Q. What is asked of the forms and of pairs of maps
then needs only the small triangles R and the small products Q_aᵀ Q_b. Both come from products W_aᵀ W_b in
float64, a few heads at a time, where the weights have at most float32's digits; from a QR of each map where
they have more, or where a map is too near to losing rank.

Positions decide what can be said of where a head looks. Rotary embeddings turn pairs of channels by the
distance of key and query, so W_Q W_Kᵀ is the form of tokens at distance 0 only. For rotary heads, energies of
the rotary pairs take the place of its singular values, and figures without such a counterpart are left out.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from triptych.core.algebra.legality import share_a_map
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.spectrum import Spectrum, or_one
from triptych.core.algebra.weights import SIDES, AttentionWeights, Chain, Link, Side
from triptych.seeing.similarity import MapSimilarity, Span, compare_maps, span
from triptych.threads import torch_threads

MapPair = Literal["qk", "qv", "kv"]
COMPARED: dict[MapPair, tuple[Side, Side]] = {"qk": ("q", "k"), "qv": ("q", "v"), "kv": ("k", "v")}
# Squaring a map squares its condition: with more than this (‖R‖ ‖R⁻¹‖ in Frobenius norms, never less than
# the condition), float64 would keep fewer digits than float32 has.
_LARGEST_CONDITION = 3e4
# Numbers of one map that a thread holds in float64 at a time, but for heads that are larger: few enough for
# memory that is used again.
_NUMBERS_AT_A_TIME = 1 << 20


@final
@dataclass(frozen=True)
class RotaryPairs:
    """Channels of queries and keys that turn together with the position."""

    first: tuple[int, ...]  # one channel of each pair
    second: tuple[int, ...]
    slow: tuple[bool, ...]  # whether a pair turns by less than a radian over the longest text
    factor: float = 1.0  # what these channels of queries and of keys are multiplied by as well

    @classmethod
    def from_rotation(cls, rotation: RotaryEmbedding, longest: int) -> "RotaryPairs":
        """The pairs that a rotation turns, in texts of at most `longest` tokens."""
        first, second = rotation.pairs
        return cls(
            first=tuple(first),
            second=tuple(second),
            slow=tuple((rotation.frequencies.abs() * rotation.reach(longest) < 1).tolist()),
            factor=rotation.factor,
        )


@final
@dataclass(frozen=True, eq=False)
class HeadMeasures:
    """What was measured of a layer's heads, in float64; NaN where a map is not finite."""

    qk: Spectrum  # of W_QK, or what takes its place
    ov: Spectrum  # of W_OV
    similarity: dict[MapPair, MapSimilarity | None]  # of the maps to queries, keys and values, in pairs
    norms: dict[Side, Float[Tensor, " heads"]]  # Frobenius norm of each map
    symmetry: Float[Tensor, " heads"] | None  # tr(A²)/‖A‖² of W_QK: 1 symmetric, −1 antisymmetric
    copying: Float[Tensor, " heads"] | None  # Σ Re λ / Σ |λ| of the eigenvalues of W_OV
    finite: Bool[Tensor, " heads"]  # whether all four maps are


def comparable(weights: AttentionWeights) -> frozenset[MapPair]:
    """The pairs of maps of a layer that can be compared.

    Queries of cross-attention read another text than keys and values do; of maps that share one, that is all
    there would be to see.
    """
    itself = weights.semantics.kind != "cross"
    return frozenset(
        pair
        for pair, (one, other) in COMPARED.items()
        if (itself or pair == "kv") and not share_a_map(weights.chain(one), weights.chain(other))
    )


def measure_heads(
    weights: AttentionWeights, rotary_pairs: RotaryPairs | None = None, num_removed: int = 0
) -> HeadMeasures:
    """Measure every head of a layer, a few at a time on each of torch's threads.

    `num_removed` directions of the input are not in the maps (`centring`); chance counts the others only.
    """
    itself = weights.semantics.kind != "cross"
    pairs = comparable(weights)
    chunks = list(_chunks(weights))
    return _join(
        _on_threads(lambda chunk: _measured(_Cores(chunk, num_removed), itself, pairs, rotary_pairs), chunks)
    )


def _measured(
    parts: "_Cores", itself: bool, compared: Collection[MapPair], rotary_pairs: RotaryPairs | None
) -> HeadMeasures:
    values = parts.singular_values("q", "k")
    symmetry = None
    copying = None
    if rotary_pairs is not None:
        values = _with_rotary_pairs(parts, rotary_pairs)
    elif itself and (turned := parts.square_product("q", "k")) is not None:
        symmetry = (turned * turned.mT).sum(dim=(-2, -1)) / or_one(values.square().sum(dim=-1))
    # In cross-attention what is written is of another space than what is read.
    if itself and (turned := parts.square_product("v", "o")) is not None:
        eigenvalues = torch.linalg.eigvals(turned)
        copying = eigenvalues.real.sum(dim=-1) / or_one(eigenvalues.abs().sum(dim=-1))
    return HeadMeasures(
        qk=Spectrum(parts.known(values)),
        ov=Spectrum(parts.known(parts.singular_values("v", "o"))),
        similarity={pair: parts.compared(*COMPARED[pair]) if pair in compared else None for pair in COMPARED},
        norms={side: parts.known(torch.linalg.matrix_norm(parts.R[side])) for side in SIDES},
        symmetry=None if symmetry is None else parts.known(symmetry),
        copying=None if copying is None else parts.known(copying),
        finite=parts.finite,
    )


def _join(chunks: list[HeadMeasures]) -> HeadMeasures:
    """The measures of all heads, chunk after chunk."""

    def joined(of: Callable[[HeadMeasures], Tensor | None]) -> Tensor | None:
        parts = [of(chunk) for chunk in chunks]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if known else None

    def similarity(pair: MapPair) -> MapSimilarity | None:
        parts = [found for chunk in chunks if (found := chunk.similarity[pair]) is not None]
        return MapSimilarity(*map(torch.cat, zip(*parts, strict=True))) if parts else None

    return HeadMeasures(
        qk=Spectrum(torch.cat([chunk.qk.values for chunk in chunks])),
        ov=Spectrum(torch.cat([chunk.ov.values for chunk in chunks])),
        similarity={pair: similarity(pair) for pair in COMPARED},
        norms={side: torch.cat([chunk.norms[side] for chunk in chunks]) for side in SIDES},
        symmetry=joined(lambda chunk: chunk.symmetry),
        copying=joined(lambda chunk: chunk.copying),
        finite=torch.cat([chunk.finite for chunk in chunks]),
    )


def _on_threads(work: Callable[["_Chunk"], HeadMeasures], chunks: "Sequence[_Chunk]") -> list[HeadMeasures]:
    """What `work` makes of every chunk, as many at a time as torch has threads, each on one of them."""
    threads = torch.get_num_threads()
    if threads == 1 or len(chunks) == 1:
        return [work(chunk) for chunk in chunks]
    with (
        torch_threads(1),
        ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        return list(pool.map(work, chunks))


def _with_rotary_pairs(parts: "_Cores", rotary_pairs: RotaryPairs) -> Tensor:
    """Singular values of the channels that stay, and the roots of the energies of the pairs that turn."""
    times = torch.ones(parts.R["q"].shape[-1], dtype=torch.float64)
    times[[*rotary_pairs.first, *rotary_pairs.second]] = rotary_pairs.factor
    R_q = parts.R["q"] * times
    R_k = parts.R["k"] * times
    turning = [
        (a, b)
        for a, b, slow in zip(rotary_pairs.first, rotary_pairs.second, rotary_pairs.slow, strict=True)
        if not slow
    ]
    first = [a for a, _ in turning]
    second = [b for _, b in turning]
    stays = sorted(set(range(R_q.shape[-1])) - {*first, *second})
    of_q, of_k = (R.square().sum(dim=-2) for R in (R_q, R_k))
    energies = (of_q[:, first] + of_q[:, second]) * (of_k[:, first] + of_k[:, second]) / 2
    values = energies.sqrt()
    if stays:
        fixed = torch.linalg.svdvals(R_q[..., stays] @ R_k[..., stays].mT)
        values = torch.cat([values, fixed[:, : len(stays)]], dim=-1)
    return values.sort(dim=-1, descending=True).values


class _Cores:
    """The small matrices that represent the maps of a few heads."""

    def __init__(self, chunk: "_Chunk", num_removed: int = 0) -> None:
        self._num_removed = num_removed
        # Products of half precision would round off what is measured.
        exact = {side: [link.mapped(Tensor.double) for link in chain] for side, chain in chunk.chains.items()}
        maps = {side: reduce(Link.then, chain).weight for side, chain in exact.items()}
        maps["o"] = maps["o"].mT
        self._d = {side: W.shape[1] for side, W in maps.items()}
        squares = {side: W.mT @ W for side, W in maps.items()}
        sound = {side: _squared_norms(square).isfinite() for side, square in squares.items()}
        self.finite: Bool[Tensor, " heads"] = torch.stack(
            [sound[side][chunk.places[side]] for side in SIDES]
        ).all(dim=0)
        for side in SIDES:
            if not bool(sound[side].all()):
                maps[side] = torch.where(sound[side][:, None, None], maps[side], 0.0)
                squares[side] = maps[side].mT @ maps[side]
        pairs = [pair for pair in _NEIGHBOURS if self._d[pair[0]] == self._d[pair[1]]]
        triangles = None if chunk.has_many_digits else _cholesky_triangles(squares)
        if triangles is None:
            frames = {side: torch.linalg.qr(W) for side, W in maps.items()}
            spans = {side: span(frame.R, self._d[side]) for side, frame in frames.items()}
            maps = {side: frame.Q for side, frame in frames.items()}
        else:
            spans = {side: _full_span(R, squares[side]) for side, (R, _) in triangles.items()}
        self._between = {pair: _products(maps, chunk.places, *pair) for pair in pairs}
        if triangles is not None:
            # Q_aᵀ Q_b = R_a⁻ᵀ (W_aᵀ W_b) R_b⁻¹.
            inverses = {side: inverse[chunk.places[side]] for side, (_, inverse) in triangles.items()}
            for (a, b), product in self._between.items():
                self._between[a, b] = inverses[a].mT @ product @ inverses[b]
        self.spans = {side: Span(*(part[chunk.places[side]] for part in of)) for side, of in spans.items()}
        self.R = {side: of.R for side, of in self.spans.items()}

    def known(self, values: Tensor) -> Tensor:
        """NaN in place of what is of a head that is not finite."""
        shape = (-1,) + (1,) * (values.ndim - 1)
        return values.where(self.finite.view(shape), math.nan)

    def singular_values(self, one: Side, other: Side) -> Tensor:
        """The singular values of the form of two maps."""
        values: Tensor = torch.linalg.svdvals(self.R[one] @ self.R[other].mT)
        return values

    def square_product(self, one: Side, other: Side) -> Tensor | None:
        """Small, with the traces and non-zero eigenvalues of a form and its powers; None if it has none."""
        between = self._between.get((one, other))
        return None if between is None else self.R[one] @ self.R[other].mT @ between.mT

    def compared(self, one: Side, other: Side) -> MapSimilarity | None:
        """Two maps that read the same; None if they do not."""
        between = self._between.get((one, other))
        if between is None:
            return None
        d = self._d[one] - self._num_removed
        found = compare_maps(self.spans[one], self.spans[other], between, d)
        return MapSimilarity(*map(self.known, found))


@final
@dataclass(frozen=True, eq=False)
class _Chunk:
    """A few heads."""

    chains: dict[Side, Chain]  # of each side, those copies of its maps that they use
    places: dict[Side, list[int]]  # which copy each head does
    has_many_digits: bool  # whether the weights have more digits than float32


_NEIGHBOURS: tuple[tuple[Side, Side], ...] = (("q", "k"), ("q", "v"), ("k", "v"), ("v", "o"))


def _chunks(weights: AttentionWeights) -> Iterator[_Chunk]:
    chains = {side: _float64_maps(weights, side) for side in SIDES}
    copies = {side: math.lcm(*(link.copies for link in chain)) for side, chain in chains.items()}
    heads = weights.num_heads
    largest = max(chain[0].d_in * chain[-1].d_out for chain in chains.values())
    count = max(1, _NUMBERS_AT_A_TIME // largest)
    for start in range(0, heads, count):
        read = {
            side: [head * copies[side] // heads for head in range(start, min(start + count, heads))]
            for side in SIDES
        }
        yield _Chunk(
            chains={
                side: tuple(_used(link, used[0], used[-1], copies[side]) for link in chains[side])
                for side, used in read.items()
            },
            places={side: [copy - used[0] for copy in used] for side, used in read.items()},
            has_many_digits=weights.dtype == torch.float64,
        )


def _float64_maps(weights: AttentionWeights, side: Side) -> Chain:
    """The maps of a side; several in float64, of whose product less than that would be taken for rank."""
    chain = weights.chain(side)
    if len(chain) < 2:
        return (Link(weights.multiplied(side).weight),)
    return tuple(Link(link.weight.double()) for link in chain)


def _used(link: Link, first: int, last: int, copies: int) -> Link:
    """What of a link the copies `first` to `last` of its chain's product are made of."""
    if link.copies == 1:
        return Link(link.weight)
    if link.copies == copies:
        return Link(link.weight[first : last + 1])
    return Link(link.weight[[copy * link.copies // copies for copy in range(first, last + 1)]])


def _products(maps: dict[Side, Tensor], places: dict[Side, list[int]], one: Side, other: Side) -> Tensor:
    """W_oneᵀ W_other of every head; heads that share both copies share the product."""
    pairs = list(zip(places[one], places[other], strict=True))
    products = {(i, j): maps[one][i].mT @ maps[other][j] for i, j in dict.fromkeys(pairs)}
    return torch.stack([products[pair] for pair in pairs])


def _cholesky_triangles(squares: dict[Side, Tensor]) -> dict[Side, tuple[Tensor, Tensor]] | None:
    """R of W = Q R from WᵀW, and R⁻¹; the identity for W = 0.

    None if a map is too near to losing rank for that.
    """
    found: dict[Side, tuple[Tensor, Tensor]] = {}
    for side, square in squares.items():
        eye = torch.eye(square.shape[-1], dtype=square.dtype)
        triangle, failed = torch.linalg.cholesky_ex(square.where(_alive(square), eye), upper=True)
        if bool(failed.any()):
            return None
        inverse = torch.linalg.solve_triangular(triangle, eye, upper=True)
        conditions = torch.linalg.matrix_norm(triangle) * torch.linalg.matrix_norm(inverse)
        if not bool((conditions < _LARGEST_CONDITION).all()):
            return None
        found[side] = triangle, inverse
    return found


def _full_span(triangle: Tensor, square: Tensor) -> Span:
    """The span of maps that are zero or have independent columns."""
    alive = _alive(square)
    basis = torch.eye(triangle.shape[-1], dtype=triangle.dtype) * alive
    return Span(triangle * alive, basis, alive[:, 0, 0] * triangle.shape[-1])


def _alive(square: Tensor) -> Tensor:
    """`[copies, 1, 1]`: whether a map differs from zero."""
    return _squared_norms(square)[:, None, None] > 0


def _squared_norms(square: Tensor) -> Tensor:
    """‖W‖² of every copy."""
    return square.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
