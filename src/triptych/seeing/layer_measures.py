"""All measures of the heads of one attention layer, without forming a d × d matrix.

Each map is factored as W = Q R with orthonormal columns in Q. Measures of the forms and of pairs of maps then
need only the small triangles R and the small products Q_aᵀ Q_b. Weights of at most float32 precision need
only products W_aᵀ W_b in float64, a few heads at a time. More precise weights, and maps close to losing rank,
need a QR decomposition of each map.

Positions limit the measures of attention. Rotary embeddings rotate pairs of channels by the distance of key
and query, so W_Q W_Kᵀ is the form of tokens at distance 0 only. For rotary heads, energies of the rotary
pairs replace its singular values, and measures without such a counterpart are omitted.
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
COMPARED: dict[MapPair, tuple[Side, Side]] = {
    "qk": ("q", "k"),
    "qv": ("q", "v"),
    "kv": ("k", "v"),
}
# Squaring a map squares its condition number: above this bound (‖R‖ ‖R⁻¹‖ in Frobenius norms, at least the
# condition number), float64 would keep fewer digits than float32 has.
_LARGEST_CONDITION = 3e4
# Maximum entries of one map per thread in float64, except for larger heads: small enough for reused memory.
_NUMBERS_AT_A_TIME = 1 << 20


@final
@dataclass(frozen=True)
class RotaryPairs:
    """Channels of queries and keys rotated together with the position."""

    first: tuple[int, ...]  # first channel of each pair
    second: tuple[int, ...]
    slow: tuple[
        bool, ...
    ]  # True for pairs rotated by less than a radian over the longest text
    factor: float = 1.0  # additional factor of these channels in queries and keys

    @classmethod
    def from_rotation(cls, rotation: RotaryEmbedding, longest: int) -> "RotaryPairs":
        """Return the pairs of a rotation, in texts of at most `longest` tokens."""
        first, second = rotation.pairs
        return cls(
            first=tuple(first),
            second=tuple(second),
            slow=tuple(
                (rotation.frequencies.abs() * rotation.reach(longest) < 1).tolist()
            ),
            factor=rotation.factor,
        )


@final
@dataclass(frozen=True, eq=False)
class HeadMeasures:
    """Measures of a layer's heads, in float64; NaN for maps with non-finite values."""

    qk: Spectrum  # spectrum of W_QK, or its replacement for rotary heads
    ov: Spectrum  # spectrum of W_OV
    similarity: dict[
        MapPair, MapSimilarity | None
    ]  # similarity of the maps to queries, keys and values
    norms: dict[Side, Float[Tensor, " heads"]]  # Frobenius norm of each map
    symmetry: (
        Float[Tensor, " heads"] | None
    )  # tr(A²)/‖A‖² of W_QK: 1 symmetric, −1 antisymmetric
    copying: Float[Tensor, " heads"] | None  # Σ Re λ / Σ |λ| of the eigenvalues of W_OV
    finite: Bool[Tensor, " heads"]  # whether all four maps are finite


def comparable(weights: AttentionWeights) -> frozenset[MapPair]:
    """Return the comparable pairs of maps of a layer.

    Queries of cross-attention read another text than its keys and values. The comparison of tied maps would
    only show the tie.
    """
    itself = weights.semantics.kind != "cross"
    return frozenset(
        pair
        for pair, (one, other) in COMPARED.items()
        if (itself or pair == "kv")
        and not share_a_map(weights.chain(one), weights.chain(other))
    )


def measure_heads(
    weights: AttentionWeights,
    rotary_pairs: RotaryPairs | None = None,
    num_removed: int = 0,
) -> HeadMeasures:
    """Measure every head of a layer, in chunks on all torch threads.

    `num_removed` directions of the input are absent from the maps (`centring`); chance levels count the
    remaining directions.
    """
    itself = weights.semantics.kind != "cross"
    pairs = comparable(weights)
    chunks = list(_chunks(weights))
    return _join(
        _on_threads(
            lambda chunk: _measured(
                _Cores(chunk, num_removed), itself, pairs, rotary_pairs
            ),
            chunks,
        )
    )


def _measured(
    parts: "_Cores",
    itself: bool,
    compared: Collection[MapPair],
    rotary_pairs: RotaryPairs | None,
) -> HeadMeasures:
    # The product is small, with the traces and eigenvalues of the form.
    values = parts.singular_values("q", "k")
    symmetry = None
    copying = None
    if rotary_pairs is not None:
        values = _with_rotary_pairs(parts, rotary_pairs)
    elif itself and (turned := parts.square_product("q", "k")) is not None:
        symmetry = (turned * turned.mT).sum(dim=(-2, -1)) / or_one(
            values.square().sum(dim=-1)
        )
    # In cross-attention, heads read and write in different spaces.
    if itself and (turned := parts.square_product("v", "o")) is not None:
        eigenvalues = torch.linalg.eigvals(turned)
        copying = eigenvalues.real.sum(dim=-1) / or_one(eigenvalues.abs().sum(dim=-1))
    return HeadMeasures(
        qk=Spectrum(parts.known(values)),
        ov=Spectrum(parts.known(parts.singular_values("v", "o"))),
        similarity={
            pair: parts.compared(*COMPARED[pair]) if pair in compared else None
            for pair in COMPARED
        },
        norms={
            side: parts.known(torch.linalg.matrix_norm(parts.R[side])) for side in SIDES
        },
        symmetry=None if symmetry is None else parts.known(symmetry),
        copying=None if copying is None else parts.known(copying),
        finite=parts.finite,
    )


def _join(chunks: list[HeadMeasures]) -> HeadMeasures:
    """Concatenate the measures of all heads, chunk after chunk."""

    # A measure missing in all chunks stays None.
    def joined(of: Callable[[HeadMeasures], Tensor | None]) -> Tensor | None:
        parts = [of(chunk) for chunk in chunks]
        known = [part for part in parts if part is not None]
        return torch.cat(known) if known else None

    def similarity(pair: MapPair) -> MapSimilarity | None:
        parts = [
            found for chunk in chunks if (found := chunk.similarity[pair]) is not None
        ]
        return (
            MapSimilarity(*map(torch.cat, zip(*parts, strict=True))) if parts else None
        )

    return HeadMeasures(
        qk=Spectrum(torch.cat([chunk.qk.values for chunk in chunks])),
        ov=Spectrum(torch.cat([chunk.ov.values for chunk in chunks])),
        similarity={pair: similarity(pair) for pair in COMPARED},
        norms={
            side: torch.cat([chunk.norms[side] for chunk in chunks]) for side in SIDES
        },
        symmetry=joined(lambda chunk: chunk.symmetry),
        copying=joined(lambda chunk: chunk.copying),
        finite=torch.cat([chunk.finite for chunk in chunks]),
    )


def _on_threads(
    work: Callable[["_Chunk"], HeadMeasures], chunks: "Sequence[_Chunk]"
) -> list[HeadMeasures]:
    """Apply `work` to every chunk, in parallel on torch's threads."""
    threads = torch.get_num_threads()
    if threads == 1 or len(chunks) == 1:
        return [work(chunk) for chunk in chunks]
    with (
        torch_threads(1),
        ThreadPoolExecutor(
            threads, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool,
    ):
        return list(pool.map(work, chunks))


def _with_rotary_pairs(parts: "_Cores", rotary_pairs: RotaryPairs) -> Tensor:
    """Return singular values of the unrotated channels, and roots of the energies of rotated pairs."""
    times = torch.ones(parts.R["q"].shape[-1], dtype=torch.float64)
    times[[*rotary_pairs.first, *rotary_pairs.second]] = rotary_pairs.factor
    R_q = parts.R["q"] * times
    R_k = parts.R["k"] * times
    # Pairs that hardly rotate count as unrotated.
    turning = [
        (a, b)
        for a, b, slow in zip(
            rotary_pairs.first, rotary_pairs.second, rotary_pairs.slow, strict=True
        )
        if not slow
    ]
    first = [a for a, _ in turning]
    second = [b for _, b in turning]
    stays = sorted(set(range(R_q.shape[-1])) - {*first, *second})
    of_q, of_k = (R.square().sum(dim=-2) for R in (R_q, R_k))
    energies = (
        (of_q[:, first] + of_q[:, second]) * (of_k[:, first] + of_k[:, second]) / 2
    )
    values = energies.sqrt()
    if stays:
        fixed = torch.linalg.svdvals(R_q[..., stays] @ R_k[..., stays].mT)
        values = torch.cat([values, fixed[:, : len(stays)]], dim=-1)
    return values.sort(dim=-1, descending=True).values


class _Cores:
    """The small matrices representing the maps of a few heads."""

    def __init__(self, chunk: "_Chunk", num_removed: int = 0) -> None:
        self._num_removed = num_removed
        # Products of half precision would round off what is measured.
        exact = {
            side: [link.mapped(Tensor.double) for link in chain]
            for side, chain in chunk.chains.items()
        }
        maps = {side: reduce(Link.then, chain).weight for side, chain in exact.items()}
        maps["o"] = maps["o"].mT
        self._d = {side: W.shape[1] for side, W in maps.items()}
        squares = {side: W.mT @ W for side, W in maps.items()}
        sound = {
            side: _squared_norms(square).isfinite() for side, square in squares.items()
        }
        self.finite: Bool[Tensor, " heads"] = torch.stack(
            [sound[side][chunk.places[side]] for side in SIDES]
        ).all(dim=0)
        # Non-finite maps become zero, so that decompositions of all other heads succeed.
        for side in SIDES:
            if not bool(sound[side].all()):
                maps[side] = torch.where(sound[side][:, None, None], maps[side], 0.0)
                squares[side] = maps[side].mT @ maps[side]
        pairs = [pair for pair in _NEIGHBOURS if self._d[pair[0]] == self._d[pair[1]]]
        triangles = None if chunk.has_many_digits else _cholesky_triangles(squares)
        if triangles is None:
            frames = {side: torch.linalg.qr(W) for side, W in maps.items()}
            spans = {
                side: span(frame.R, self._d[side]) for side, frame in frames.items()
            }
            maps = {side: frame.Q for side, frame in frames.items()}
        else:
            spans = {
                side: _full_span(R, squares[side]) for side, (R, _) in triangles.items()
            }
        self._between = {pair: _products(maps, chunk.places, *pair) for pair in pairs}
        if triangles is not None:
            # Q_aᵀ Q_b = R_a⁻ᵀ (W_aᵀ W_b) R_b⁻¹.
            inverses = {
                side: inverse[chunk.places[side]]
                for side, (_, inverse) in triangles.items()
            }
            for (a, b), product in self._between.items():
                self._between[a, b] = inverses[a].mT @ product @ inverses[b]
        self.spans = {
            side: Span(*(part[chunk.places[side]] for part in of))
            for side, of in spans.items()
        }
        self.R = {side: of.R for side, of in self.spans.items()}

    def known(self, values: Tensor) -> Tensor:
        """Replace values of heads with non-finite maps by NaN."""
        shape = (-1,) + (1,) * (values.ndim - 1)
        return values.where(self.finite.view(shape), math.nan)

    def singular_values(self, one: Side, other: Side) -> Tensor:
        """Return the singular values of the form of two maps."""
        values: Tensor = torch.linalg.svdvals(self.R[one] @ self.R[other].mT)
        return values

    def square_product(self, one: Side, other: Side) -> Tensor | None:
        """Return a small matrix with the traces and non-zero eigenvalues of a square form and its powers.

        For other forms the result is None.
        """
        between = self._between.get((one, other))
        return None if between is None else self.R[one] @ self.R[other].mT @ between.mT

    def compared(self, one: Side, other: Side) -> MapSimilarity | None:
        """Compare two maps of the same input; None if their inputs differ."""
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

    chains: dict[Side, Chain]  # maps of each chain used by these heads
    places: dict[Side, list[int]]  # index of each head's copy
    has_many_digits: bool  # whether the weights are more precise than float32


_NEIGHBOURS: tuple[tuple[Side, Side], ...] = (
    ("q", "k"),
    ("q", "v"),
    ("k", "v"),
    ("v", "o"),
)


def _chunks(weights: AttentionWeights) -> Iterator[_Chunk]:
    chains = {side: _float64_maps(weights, side) for side in SIDES}
    copies = {
        side: math.lcm(*(link.copies for link in chain))
        for side, chain in chains.items()
    }
    heads = weights.num_heads
    largest = max(chain[0].d_in * chain[-1].d_out for chain in chains.values())
    # Read as many heads as fit the memory limit, with their maps, and some on every thread.
    for_each_thread = math.ceil(heads / torch.get_num_threads())
    count = max(1, min(_NUMBERS_AT_A_TIME // largest, for_each_thread))
    for start in range(0, heads, count):
        read = {
            side: [
                head * copies[side] // heads
                for head in range(start, min(start + count, heads))
            ]
            for side in SIDES
        }
        yield _Chunk(
            chains={
                side: tuple(
                    _used(link, used[0], used[-1], copies[side])
                    for link in chains[side]
                )
                for side, used in read.items()
            },
            places={
                side: [copy - used[0] for copy in used] for side, used in read.items()
            },
            has_many_digits=weights.dtype == torch.float64,
        )


def _float64_maps(weights: AttentionWeights, side: Side) -> Chain:
    """Return the maps of a chain; several maps in float64, to keep rounding out of the product's rank."""
    chain = weights.chain(side)
    if len(chain) < 2:
        return (Link(weights.multiplied(side).weight),)
    return tuple(Link(link.weight.double()) for link in chain)


def _used(link: Link, first: int, last: int, copies: int) -> Link:
    """Return the part of a link used by the maps `first` to `last` of its chain's product."""
    if link.copies == 1:
        return Link(link.weight)
    if link.copies == copies:
        return Link(link.weight[first : last + 1])
    return Link(
        link.weight[[copy * link.copies // copies for copy in range(first, last + 1)]]
    )


def _products(
    maps: dict[Side, Tensor], places: dict[Side, list[int]], one: Side, other: Side
) -> Tensor:
    """Compute W_oneᵀ W_other of every head; heads sharing their maps share the product."""
    pairs = list(zip(places[one], places[other], strict=True))
    products = {
        (i, j): maps[one][i].mT @ maps[other][j] for i, j in dict.fromkeys(pairs)
    }
    return torch.stack([products[pair] for pair in pairs])


def _cholesky_triangles(
    squares: dict[Side, Tensor],
) -> dict[Side, tuple[Tensor, Tensor]] | None:
    """Compute R of W = Q R from WᵀW, and R⁻¹; the identity for W = 0.

    The result is None if a map is too close to losing rank.
    """
    # Cholesky's factor of WᵀW is R.
    found: dict[Side, tuple[Tensor, Tensor]] = {}
    for side, square in squares.items():
        eye = torch.eye(square.shape[-1], dtype=square.dtype)
        triangle, failed = torch.linalg.cholesky_ex(
            square.where(_alive(square), eye), upper=True
        )
        if bool(failed.any()):
            return None
        inverse = torch.linalg.solve_triangular(triangle, eye, upper=True)
        conditions = torch.linalg.matrix_norm(triangle) * torch.linalg.matrix_norm(
            inverse
        )
        if not bool((conditions < _LARGEST_CONDITION).all()):
            return None
        found[side] = triangle, inverse
    return found


def _full_span(triangle: Tensor, square: Tensor) -> Span:
    """Return the span of maps with independent columns, or of zero maps."""
    alive = _alive(square)
    basis = torch.eye(triangle.shape[-1], dtype=triangle.dtype) * alive
    return Span(triangle * alive, basis, alive[:, 0, 0] * triangle.shape[-1])


def _alive(square: Tensor) -> Tensor:
    """Return a mask `[maps, 1, 1]` of non-zero maps."""
    return _squared_norms(square)[:, None, None] > 0


def _squared_norms(square: Tensor) -> Tensor:
    """Return ‖W‖² of every copy."""
    return square.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
