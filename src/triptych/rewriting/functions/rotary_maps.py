"""Rotary heads with maps of a lower rank: W_Q and W_K truncated before the rotation.

A key k becomes k̂ = k P_K + c_K with P_K of rank r, before the rotation, and a query q̂ = q P_Q + c_Q. The
mean error of the scores q R(m) kᵀ over all queries and distances m depends on k − k̂ through M:

    M = mean over m of R(m)ᵀ E[qᵀq] R(m),     E |q R(m) (k − k̂)ᵀ|² = tr(M E[(k − k̂)ᵀ(k − k̂)])

so the best k̂ of a rank is a truncated SVD in the metric M. For queries the rotation is reversed. Queries and
keys are fitted alternately, each time optimally for the current maps of the other.

Means cannot be subtracted: with rotary embeddings the softmax does not cancel a key bias. But the mean over
tokens does not use rank if a bias can store it (c, else 0), and only the variation is truncated.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from triptych.core.algebra.legality import ROTARY_PAIRS_MEET
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.rewriting.functions.metric import (
    PRIOR,
    ChannelChange,
    Metric,
    MetricWords,
    side_moments,
)
from triptych.rewriting.functions.rotary_pairs import RotaryHeads, mean_turn

_Turned = Literal["q", "k"]
# Number of alternating fits: the first gains most, the last gains almost zero.
_ROUNDS = 5


@final
@dataclass(frozen=True, eq=False)
class RotaryMapsMetric(Metric):
    """The mean square of scores over queries, keys and distances."""

    heads: RotaryHeads

    @property
    def said(self) -> MetricWords:
        width = self.heads.weights.multiplied("q").d_out
        words = (
            "W_Q and W_K: {ranks} of {most}, written back into {most} channels, which leaves out at most "
            "{worst:.3g} of the mean square of a head's scores"
        )
        return MetricWords(
            ROTARY_PAIRS_MEET, f"a map into {width} channels", width, words
        )

    def energies(self) -> Float[Tensor, "groups d_k"]:
        scores = _Scores.measure(self.heads, PRIOR)
        return scores.best("k", scores.identity).energies[:, 0]

    def change(self, ranks: Sequence[int]) -> ChannelChange:
        maps = _fit_both_sides(
            _Scores.measure(self.heads, PRIOR), self.heads.rotation, ranks
        )
        true = _Scores.measure(self.heads, 0.0)
        q = maps.q.flatten(0, 1)
        k = maps.k.flatten(0, 1)
        lost = true.error(maps).flatten()
        whole = true.mean_square().flatten()
        return ChannelChange(q[:, :-1], k[:, :-1], lost, whole, q[:, -1], k[:, -1])


class _Maps(NamedTuple):
    """[P; c] of queries and keys, mapping (q, 1) to q̂ and (k, 1) to k̂."""

    q: Float[Tensor, "groups members e d"]
    k: Float[Tensor, "groups 1 e d"]


class _Best(NamedTuple):
    """Factors of the best maps of queries or keys at any rank."""

    energies: Float[
        Tensor, "groups members d"
    ]  # energies of the directions, descending
    directions: Float[Tensor, "groups members d d"]  # directions as columns
    into: Float[
        Tensor, "groups members d d"
    ]  # maps to coordinates of the best ŷ of full rank
    back: Float[Tensor, "groups members d d"]  # maps coordinates of `into` to channels


@final
@dataclass(frozen=True, eq=False)
class _Scores:
    """Second moments of queries and keys, and their mixing by the rotation."""

    q: Float[
        Tensor, "groups members e e"
    ]  # E[(q, 1)ᵀ(q, 1)] of the query heads per key head
    k: Float[Tensor, "groups 1 e e"]
    free: frozenset[str]  # chains with a replaceable bias
    basis: Complex[
        Tensor, "d d"
    ]  # eigenvectors of R(m) as columns, with eigenvalues e^{imω}
    phases: Complex[Tensor, "d d"]  # mean of e^{im(ω_y − ω_x)}
    factor: Float[Tensor, " d"]  # square of the rotation's scale per channel

    @classmethod
    def measure(cls, heads: RotaryHeads, prior: float) -> "_Scores":
        weights = heads.weights
        rotation = heads.rotation
        q, k = (
            side_moments(weights, side, heads.moments, prior) for side in ("q", "k")
        )
        first, second = rotation.pairs
        factor = torch.ones(q.shape[-1] - 1, dtype=q.dtype, device=q.device)
        factor[first + second] = rotation.factor**2
        # Exponents ω of the eigenvectors: θ for the first channel of a pair, −θ for the second.
        turns = torch.zeros_like(factor)
        turns[first], turns[second] = (
            rotation.frequencies.to(turns),
            -rotation.frequencies.to(turns),
        )
        basis = torch.eye(len(factor), dtype=torch.complex128, device=q.device)
        half = 0.5**0.5
        basis[first, first], basis[second, first] = half, 1j * half
        basis[first, second], basis[second, second] = half, -1j * half
        return cls(
            q=q.unflatten(0, (weights.num_key_heads, -1)),  # type: ignore[no-untyped-call]
            k=k[:, None],
            free=frozenset(
                side
                for side in ("q", "k")
                if (chain := weights.chain(side)) and chain[-1].bias is not None
            ),
            basis=basis,
            phases=mean_turn(
                turns - turns[:, None],
                heads.longest,
                weights.semantics.kind == "causal",
            ),
            factor=factor,
        )

    @property
    def width(self) -> int:
        return len(self.factor)

    @property
    def identity(self) -> _Maps:
        eye = torch.eye(
            self.width + 1, self.width, dtype=self.q.dtype, device=self.q.device
        )
        return _Maps(
            *(eye.expand(*gram.shape[:2], -1, -1) for gram in (self.q, self.k))
        )

    def best(self, side: _Turned, maps: _Maps) -> _Best:
        """Compute the maps of least loss for queries or keys, given the current maps of the other.

        The error is E‖(y X − ŷ) A^½‖² plus a constant, with A the rotated new moments of the other and y X
        the best ŷ of full rank.
        """
        other, new = (self.k, maps.k) if side == "q" else (self.q, maps.q)
        moments = new.mT @ other @ new
        cross = other[..., :-1, :] @ new
        if side == "k":
            moments = moments.sum(dim=1, keepdim=True)
            cross = cross.sum(dim=1, keepdim=True)
        values, vectors = torch.linalg.eigh(self.seen(side, moments))
        alive = values > values[..., -1:] * self.width * torch.finfo(values.dtype).eps
        back = (
            vectors * (torch.where(alive, values, 1.0).rsqrt() * alive)[..., None, :]
        ).mT
        into = self.seen(side, cross) @ back.mT
        gram = self.q if side == "q" else self.k
        # Truncate only the variation about the mean if a bias can store the mean.
        mean = gram[..., -1:, :-1]
        varying = (
            gram[..., :-1, :-1] - mean.mT @ mean
            if side in self.free
            else gram[..., :-1, :-1]
        )
        energies, directions = torch.linalg.eigh(into.mT @ varying @ into)
        return _Best(energies.clamp(min=0.0).flip(-1), directions.flip(-1), into, back)

    def cut(self, side: _Turned, maps: _Maps, kept: Float[Tensor, "groups d"]) -> _Maps:
        """Return the best maps of queries or keys in the directions marked by 1 in `kept`, per group."""
        best = self.best(side, maps)
        directions = best.directions * kept[:, None, None, :]
        P = best.into @ directions @ directions.mT @ best.back
        whole = kept.bool().all(dim=-1)[:, None, None, None]
        P = torch.where(whole, torch.eye(self.width, dtype=P.dtype, device=P.device), P)
        mean = (self.q if side == "q" else self.k)[..., -1:, :-1]
        c = torch.zeros_like(mean)
        if side in self.free:
            c = torch.where(whole, c, mean @ (best.into @ best.back - P))
        return maps._replace(**{side: torch.cat([P, c], dim=-2)})

    def with_keys(self, P: Float[Tensor, "groups 1 d d"]) -> _Maps:
        """Project keys, preserving their mean if a bias can store it; queries are unchanged."""
        mean = self.k[..., -1:, :-1]
        c = mean - mean @ P if "k" in self.free else torch.zeros_like(mean)
        return self.identity._replace(k=torch.cat([P, c], dim=-2))

    def error(self, maps: _Maps) -> Float[Tensor, "groups members"]:
        """Compute the mean squared error of the scores of every head."""
        q = self.q
        k = self.k
        crossed = self._product(q[..., :-1, :] @ maps.q, k[..., :-1, :] @ maps.k)
        after = self._product(maps.q.mT @ q @ maps.q, maps.k.mT @ k @ maps.k)
        return (self.mean_square() - 2 * crossed + after).clamp(min=0.0)

    def mean_square(self) -> Float[Tensor, "groups members"]:
        return self._product(self.q[..., :-1, :-1], self.k[..., :-1, :-1])

    def seen(
        self, by: _Turned, gram: Float[Tensor, "*batch d d"]
    ) -> Float[Tensor, "*batch d d"]:
        """Average R(m)ᵀ G R(m) over m for keys reading query moments, or R(m) G R(m)ᵀ for queries."""
        phases = self.phases if by == "k" else self.phases.conj()
        turned = (self.basis.mH @ gram.to(self.basis.dtype) @ self.basis) * phases
        seen: Tensor = (self.basis @ turned @ self.basis.mH).real
        return self.factor[:, None] * seen * self.factor

    def _product(self, q: Tensor, k: Tensor) -> Float[Tensor, "groups members"]:
        """Compute E[(q R(m) kᵀ)(q' R(m) k'ᵀ)] from E[qᵀq'] and E[kᵀk']."""
        return (q * self.seen("q", k)).sum(dim=(-2, -1))


def _fit_both_sides(
    scores: _Scores, rotation: RotaryEmbedding, ranks: Sequence[int]
) -> _Maps:
    """Fit queries and keys alternately, starting from the best keys and from rotary pairs.

    The better result is kept for each group.
    """
    # 1 for the first channels of each group up to its rank, else 0.
    widths = torch.tensor(ranks, device=scores.q.device)[:, None]
    kept = (torch.arange(scores.width, device=scores.q.device) < widths).to(
        scores.q.dtype
    )
    pairs = _strongest_pairs(scores, rotation, ranks)
    ends = [scores.cut("k", scores.identity, kept), scores.with_keys(pairs[:, None])]
    for _ in range(_ROUNDS):
        ends = [scores.cut("k", scores.cut("q", maps, kept), kept) for maps in ends]
    ends = [scores.cut("q", maps, kept) for maps in ends]
    errors = torch.stack([scores.error(maps).sum(dim=1) for maps in ends])
    best = errors.argmin(dim=0)
    groups = torch.arange(len(best), device=best.device)
    return _Maps(*(torch.stack(side)[best, groups] for side in zip(*ends, strict=True)))


def _strongest_pairs(
    scores: _Scores, rotation: RotaryEmbedding, ranks: Sequence[int]
) -> Float[Tensor, "groups d d"]:
    """Return the projection on the strongest `rank // 2` pairs of a group, then on unrotated channels."""
    first, second = rotation.pairs
    q, k = (gram.diagonal(dim1=-2, dim2=-1) for gram in (scores.q, scores.k))
    # ½ E|q_f|² E|k_f|² of every pair, summed over the heads of a group.
    energies = (
        (q[..., first] + q[..., second]) * (k[..., first] + k[..., second])
    ).sum(dim=1) / 2
    order = energies.argsort(dim=-1, descending=True, stable=True)
    stays = sorted(set(range(scores.width)) - {*first, *second})
    kept = torch.zeros(len(ranks), scores.width, dtype=order.dtype, device=order.device)
    for group, rank in enumerate(ranks):
        strongest = order[group, : rank // 2].tolist()
        turned = [
            *itertools.chain.from_iterable(
                (first[pair], second[pair]) for pair in strongest
            )
        ]
        kept[group, (turned + stays)[:rank]] = 1
    return torch.diag_embed(kept.to(scores.q.dtype))
