"""Rewrites of rotary heads that treat each rotary pair separately.

Pair f of a head is two complex vectors, u_f = (W_Q)_a + i (W_Q)_b of queries and v_f of keys, with a and b
the channels rotated together. At distance m its score is Re(x u_f · (y v_f)* · e^{imθ_f}). The complex form
Z_f = u_f v_fᴴ is gauge-invariant, and u_f → u_f / c*, v_f → c v_f is the only gauge. Biases are one more row
of the maps, for a constant input 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from triptych.core.algebra.legality import ROTARY_PAIRS_MEET, require_nothing_between
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights, Link, Side
from triptych.rewriting.functions.channels import joint_basis
from triptych.rewriting.functions.metric import (
    ChannelChange,
    Metric,
    MetricWords,
    side_moments,
)
from triptych.rewriting.functions.moments import Moments
from triptych.rewriting.functions.moves import unturned, with_row

_QK: tuple[Side, Side] = ("q", "k")


@final
@dataclass(frozen=True, eq=False)
class RotaryHeads:
    """Rotary heads of a layer in float64, with the queries, keys and distances of their scores."""

    weights: AttentionWeights
    rotation: RotaryEmbedding
    moments: Moments | None = None  # moments of a text; None: isotropic inputs
    longest: int | None = None  # tokens of the longest text; None: unlimited


@final
@dataclass(frozen=True, eq=False)
class RotaryPairsMetric(Metric):
    """The mean square of scores, with rotary pairs kept whole or set to zero."""

    heads: RotaryHeads

    @property
    def said(self) -> MetricWords:
        words = (
            "{each} of {most} rotary pairs, which leaves out at most {worst:.3g} of the mean square of a "
            "head's scores in its rotary pairs"
        )
        count = len(self.heads.rotation.frequencies)
        return MetricWords(
            ROTARY_PAIRS_MEET, f"a head with {count} rotary pairs", count, words
        )

    def energies(self) -> Float[Tensor, "groups pairs"]:
        return (
            self._sum_over_groups(pair_scores(self.heads))
            .sort(dim=-1, descending=True)
            .values
        )

    def change(self, ranks: Sequence[int]) -> ChannelChange:
        scores = pair_scores(self.heads)
        weights = self.heads.weights
        places = (
            self._sum_over_groups(scores)
            .argsort(dim=-1, descending=True, stable=True)
            .argsort(dim=-1)
        )
        left_out = places >= torch.tensor(ranks, device=places.device)[:, None]
        groups = len(left_out)
        channels = torch.ones(
            groups,
            weights.multiplied("q").d_out,
            dtype=scores.dtype,
            device=scores.device,
        )
        for turned in self.heads.rotation.pairs:
            channels[:, turned] = (~left_out).to(scores.dtype)
        of_heads = left_out.repeat_interleave(weights.num_heads // groups, dim=0).to(
            scores.dtype
        )
        lost = torch.einsum("hf,hfg,hg->h", of_heads, scores, of_heads)
        only = torch.diag_embed(channels)
        return ChannelChange(only, only, lost, scores.sum(dim=(-2, -1)))

    def _sum_over_groups(
        self, scores: Float[Tensor, "heads pairs pairs"]
    ) -> Float[Tensor, "groups pairs"]:
        of_heads = scores.diagonal(dim1=-2, dim2=-1)
        return of_heads.reshape(
            self.heads.weights.num_key_heads, -1, of_heads.shape[-1]
        ).sum(dim=1)


def pair_scores(heads: RotaryHeads) -> Float[Tensor, "num_heads pairs pairs"]:
    """Compute E[s_f s_g] of the scores q kᵀ of two rotary pairs, over pairs of tokens and distances.

    With complex q_f, k_f the score of pair f at distance m is s_f = Re(q_f k_f* e^{imθ_f}), so

        E[s_f s_g] = ½ Re(E[q_f q_g*] E[k_f k_g*]* φ(θ_f − θ_g) + E[q_f q_g] E[k_f k_g]* φ(θ_f + θ_g))

    with φ(θ) the mean of e^{imθ} over pairs of tokens. For texts long relative to the beat of any two pairs,
    φ is 0 except at θ = 0, which leaves the energies ½ E|q_f|² E|k_f|² on the diagonal. A pair with little
    rotation within `longest` has φ near 1, and counts as unrotated channels.
    """
    weights = heads.weights
    rotation = heads.rotation
    longest = heads.longest
    # Remove the row and column of the constant input; biases remain in the moments.
    G_q, G_k = (
        gram.repeat_interleave(weights.num_heads // len(gram), dim=0)
        for gram in (
            side_moments(weights, side, heads.moments, 0.0)[:, :-1, :-1]
            for side in ("q", "k")
        )
    )
    P_q, N_q = _complex_moments(G_q, rotation)
    P_k, N_k = _complex_moments(G_k, rotation)
    theta = rotation.frequencies.double().to(weights.device)
    causal = weights.semantics.kind == "causal"
    minus = mean_turn(theta[:, None] - theta, longest, causal)
    plus = mean_turn(theta[:, None] + theta, longest, causal)
    return (
        (P_q * P_k.conj() * minus + N_q * N_k.conj() * plus) / 2
    ).real * rotation.factor**4


def require_rotary(name: str, weights: AttentionWeights) -> RotaryEmbedding:
    """Return the rotary embedding of a layer, refusing scores other than sums over its pairs."""
    ROTARY_PAIRS_MEET.require(name, weights)
    rotation = _rotary_embedding(weights)
    width = weights.multiplied("q").d_out
    turned = rotation.start + 2 * len(rotation.frequencies)
    if turned > width:
        raise RewriteRefusedError(
            name, f"the rotation turns channels up to {turned}, of heads {width} wide"
        )
    for side in _QK:
        require_nothing_between(name, side, weights.chain(side)[:-1])
    return rotation


def merge_rotary_pairs(plain: AttentionWeights, groups: int) -> AttentionWeights:
    """Return the nearest weights with `groups` key heads: one common key per pair and group.

    For the keys v_j of a group's heads in a pair, the common key is the first left singular vector v of [√w_1
    v_1 … √w_n v_n], w_j = Σ ‖u_i‖² of the queries reading j: then v_j ≈ c_j v, and u_i → u_i c_j*. This
    minimises Σ ‖ΔZ‖²; the minimum is 0 if the v_j are complex multiples of one vector. Unrotated channels get
    the best joint basis of all heads.
    """
    (q,), (k,), rotation = plain.q, plain.k, _rotary_embedding(plain)
    members = k.copies // groups
    u = _complex_pairs(with_row(q), rotation).unflatten(0, (groups, members, -1))  # type: ignore[no-untyped-call]
    v = _complex_pairs(with_row(k), rotation).unflatten(0, (groups, members))  # type: ignore[no-untyped-call]
    weight = u.abs().square().sum(dim=(2, 4))  # [groups, members, pairs]
    stacked = (weight.sqrt()[..., None] * v).permute(0, 2, 3, 1)
    top = torch.linalg.svd(stacked, full_matrices=False).U[
        ..., 0
    ]  # [groups, pairs, rows]
    c = torch.einsum("gfd,gmfd->gmf", top.conj(), v)
    # Give the common key the length of the replaced keys, and the phase of the first key.
    total = weight.sum(dim=1)
    length = (
        (weight * c.abs().square()).sum(dim=1) / torch.where(total > 0, total, 1.0)
    ).sqrt()
    unit = torch.where(length > 0, length, 1.0) * torch.exp(1j * c[:, 0].angle())
    c = c / unit[:, None]
    top = top * unit[..., None]
    new_q = with_row(q).clone()
    new_k = with_row(k)[::members].clone()
    turned = (u * c.conj()[:, :, None, :, None]).flatten(0, 2)
    for new, pairs in ((new_q, turned), (new_k, top)):
        for channels, part in zip(
            rotation.pairs, (pairs.real, pairs.imag), strict=True
        ):
            new[..., channels] = part.mT
    _merge_fixed(q, k, rotation, new_q, new_k)
    return replace(plain, q=(_without_row(new_q, q),), k=(_without_row(new_k, k),))


def _merge_fixed(
    q: Link, k: Link, rotation: RotaryEmbedding, new_q: Tensor, new_k: Tensor
) -> None:
    """Merge the unrotated channels into the new maps."""
    stays = unturned(rotation, q.d_out)
    if not stays:
        return
    groups = len(new_k)
    own = with_row(q)[..., stays].reshape(groups, k.copies // groups, -1, len(stays))
    common = with_row(k)[..., stays].unflatten(0, (groups, -1))  # type: ignore[no-untyped-call]
    basis = joint_basis(own, common, "own").resize(len(stays))
    new_q[..., stays] = (own @ basis.own).reshape(*new_q.shape[:2], len(stays))
    new_k[..., stays] = basis.shared


def _complex_pairs(
    maps: Float[Tensor, "copies rows width"], rotation: RotaryEmbedding
) -> Complex[Tensor, "copies pairs rows"]:
    first, second = rotation.pairs
    return torch.complex(maps[..., first], maps[..., second]).mT


def _without_row(maps: Float[Tensor, "copies rows width"], like: Link) -> Link:
    return (
        Link(maps)
        if like.bias is None
        else Link(maps[:, :-1].contiguous(), maps[:, -1].contiguous())
    )


def _rotary_embedding(weights: AttentionWeights) -> RotaryEmbedding:
    assert weights.semantics.rotary is not None
    return weights.semantics.rotary


def _complex_moments(
    G: Float[Tensor, "heads r r"], rotation: RotaryEmbedding
) -> tuple[Complex[Tensor, "heads pairs pairs"], Complex[Tensor, "heads pairs pairs"]]:
    """Compute E[c_f c_g*] and E[c_f c_g] of c = a + i b, from the moments of a and b."""
    a, b = rotation.pairs
    aa, bb, ab, ba = (
        G[:, one][:, :, other] for one, other in ((a, a), (b, b), (a, b), (b, a))
    )
    return torch.complex(aa + bb, ba - ab), torch.complex(aa - bb, ba + ab)


def mean_turn(
    theta: Float[Tensor, "pairs pairs"], longest: int | None, causal: bool
) -> Complex[Tensor, "pairs pairs"]:
    """Compute the mean of e^{imθ} over the distances m of all token pairs in a text of L tokens.

    Distance m has L − |m| pairs. For both directions the mean is Fejér's kernel, (sin ½Lθ / sin ½θ)² / L².
    For one direction (causal) the real part is ((sin ½Lθ / sin ½θ)² + L) / 2 and the imaginary part (L sin θ
    − sin Lθ) / (2 sin ½θ)², both over ½ L (L + 1).
    """
    if longest is None:
        return (theta == 0).to(torch.complex128)
    L = longest
    sines = (theta / 2).sin()
    still = sines == 0
    sines = torch.where(still, 1.0, sines)
    both = torch.where(still, float(L * L), ((L * theta / 2).sin() / sines).square())
    if not causal:
        return (both / L**2).to(torch.complex128)
    ahead = (L * theta.sin() - (L * theta).sin()) / (4 * sines.square())
    # Use the first term of the series where the difference cancels.
    ahead = torch.where((L * theta).abs() < 1e-4, theta * L * (L**2 - 1) / 6, ahead)
    return torch.complex((both + L) / 2, ahead) / (L * (L + 1) / 2)
