"""Rewrites of rotary heads that treat the rotary pairs of a head one by one.

Pair f of a head is two complex vectors, u_f = (W_Q)_a + i (W_Q)_b of queries and v_f of keys, where a and b
are the channels that turn together. At distance m its score is Re(x u_f · (y v_f)* · e^{imθ_f}): the
complex form Z_f = u_f v_fᴴ is what no gauge changes, and u_f → u_f / c*, v_f → c v_f the only one there is.
Biases are one more row of the maps, for an input that is always 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from triptych.algebra.forms import BilinearForm
from triptych.algebra.moments import Moments
from triptych.algebra.positions import RotaryEmbedding
from triptych.algebra.rewrites.channels import joint_basis, newly_apart, times
from triptych.algebra.rewrites.data import require_moments_of
from triptych.algebra.rewrites.legality import (
    ROTARY_PAIRS_MEET,
    require_nothing_between,
    require_one_each,
)
from triptych.algebra.rewrites.record import Cut, RewriteRefusedError, Rewritten, rewritten
from triptych.algebra.weights import AttentionWeights, Link, Side

_QK: tuple[Side, Side] = ("q", "k")


def truncate_rotary_pairs(
    weights: AttentionWeights,
    *,
    pairs: int | Sequence[int],
    moments: Moments | None = None,
    longest: int | None = None,
) -> Rewritten:
    """Keep the rotary pairs that carry most of the scores; the others become zero."""
    name = "truncate_rotary_pairs"
    rotation = require_rotary(name, weights).of_length(longest)
    count, groups = len(rotation.frequencies), weights.num_key_heads
    kept = require_one_each(name, "pairs", pairs, groups, "key", count, f"the rotation has {count}, so")
    working = weights.to(torch.float64)
    scores = pair_scores(working, rotation, moments, longest)
    energies = _energies(scores, groups)
    places = energies.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    left_out = places >= torch.tensor(kept, device=places.device)[:, None]
    channels = torch.ones(groups, weights.multiplied("q").d_out, dtype=working.dtype, device=working.device)
    for turned in rotation.pairs:
        channels[:, turned] = (~left_out).to(working.dtype)
    notes: list[str] = []
    only = torch.diag_embed(channels)
    result = replace(working, q=times(working, "q", only, notes), k=times(working, "k", only, notes))
    of_heads = left_out.repeat_interleave(weights.num_heads // groups, dim=0).to(scores.dtype)
    lost, whole = torch.einsum("hf,hfg,hg->h", of_heads, scores, of_heads), scores.sum(dim=(-2, -1))
    shares = Cut.shares(lost, whole)
    words = (
        "{each} of {most} rotary pairs, which leaves out at most {worst:.3g} of the mean square of a head's "
    )
    cut = Cut(f"{words}scores in its rotary pairs", tuple(kept), count, max(shares), shares)
    return rotary_scores_cut(name, weights, working, result, cut, notes, on_text=moments is not None)


def rotary_scores_cut(
    name: str,
    weights: AttentionWeights,
    working: AttentionWeights,
    result: AttentionWeights,
    cut: Cut,
    notes: Sequence[str],
    *,
    on_text: bool,
) -> Rewritten:
    """A layer whose rotary scores were cut, with its record: exact where no form moves beyond rounding."""
    moved, sizes = rotary_move(working, result), rotary_size(working)
    rounding = 100 * weights.d_model * torch.finfo(working.dtype).eps
    exact = bool((moved <= rounding * sizes).all())
    if not on_text:
        far = Cut.shares(moved.square(), sizes.square())
        cut = replace(cut, lost=tuple(map(max, cut.lost, far)))
    return rewritten(
        name,
        "rounding-exact" if exact else "bounded",
        weights,
        result.to(weights.dtype),
        checked=ROTARY_PAIRS_MEET.checked,
        choice=[cut],
        notes=(*notes, *newly_apart(weights, result)),
        bound=0.0 if exact else float(moved.max()),
        error=cut.worst if on_text else None,
    )


def pair_scores(
    weights: AttentionWeights,
    rotation: RotaryEmbedding,
    moments: Moments | None = None,
    longest: int | None = None,
) -> Float[Tensor, "num_heads pairs pairs"]:
    """E[s_f s_g] of the scores q kᵀ that two rotary pairs give one pair of tokens, over tokens and distances.

    With complex q_f, k_f the score of pair f at distance m is s_f = Re(q_f k_f* e^{imθ_f}), so

        E[s_f s_g] = ½ Re(E[q_f q_g*] E[k_f k_g*]* φ(θ_f − θ_g) + E[q_f q_g] E[k_f k_g]* φ(θ_f + θ_g))

    with φ(θ) the mean of e^{imθ} over pairs of tokens. In texts long against the beat of any two pairs it is
    0 but for θ = 0, which leaves the energies ½ E|q_f|² E|k_f|² on the diagonal. A pair that hardly turns
    within `longest` has φ near 1, and counts as channels that have no position.
    """
    G_q, G_k = _channel_moments(weights, moments)
    P_q, N_q = _complex_moments(G_q, rotation)
    P_k, N_k = _complex_moments(G_k, rotation)
    theta = rotation.frequencies.double().to(weights.device)
    causal = weights.semantics.kind == "causal"
    minus = mean_turn(theta[:, None] - theta, longest, causal)
    plus = mean_turn(theta[:, None] + theta, longest, causal)
    return ((P_q * P_k.conj() * minus + N_q * N_k.conj() * plus) / 2).real * rotation.factor**4


def measure_pair_energies(
    weights: AttentionWeights,
    moments: Moments | None = None,
    longest: int | None = None,
) -> Float[Tensor, "groups pairs"]:
    """What the pairs of every group of heads carry, descending: what `allocate` shares pairs out by."""
    rotation = require_rotary("measure_pair_energies", weights).of_length(longest)
    scores = pair_scores(weights, rotation, moments, longest)
    return _energies(scores, weights.num_key_heads).sort(dim=-1, descending=True).values


def _energies(scores: Float[Tensor, "heads pairs pairs"], groups: int) -> Float[Tensor, "groups pairs"]:
    of_heads = scores.diagonal(dim1=-2, dim2=-1)
    return of_heads.reshape(groups, -1, of_heads.shape[-1]).sum(dim=1)


def require_rotary(name: str, weights: AttentionWeights) -> RotaryEmbedding:
    """The rotary embedding of a layer, if its pairs are what meets in its scores."""
    ROTARY_PAIRS_MEET.require(name, weights)
    rotation = _rotary(weights)
    width, turned = weights.multiplied("q").d_out, rotation.start + 2 * len(rotation.frequencies)
    if turned > width:
        raise RewriteRefusedError(name, f"the rotation turns channels up to {turned}, of heads {width} wide")
    for side in _QK:
        require_nothing_between(name, side, weights.chain(side)[:-1])
    return rotation


class RotaryPairForms(NamedTuple):
    """The forms of rotary heads."""

    pairs: BilinearForm  # batch `[num_heads, pairs]`
    fixed: BilinearForm | None  # batch `[num_heads]`: of the channels that are not turned; None if all are


def rotary_pair_forms(
    q: Float[Tensor, "num_heads q_rows width"],
    k: Float[Tensor, "num_heads k_rows width"],
    rotation: RotaryEmbedding,
) -> RotaryPairForms:
    """The forms that turn, and the one that does not, of the maps of every head."""
    stays = _stays(rotation, q.shape[-1])
    doubled = []
    for maps in (q, k):
        a, b = (rotation.largest_factor * maps[..., channels].mT[..., None] for channels in rotation.pairs)
        doubled.append(torch.cat([torch.cat([a, b], dim=-1), torch.cat([b, -a], dim=-1)], dim=-2))
    fixed = BilinearForm(q[..., stays], k[..., stays]) if stays else None
    return RotaryPairForms(BilinearForm(doubled[0], doubled[1]), fixed)


def rotary_move(before: AttentionWeights, after: AttentionWeights) -> Float[Tensor, " num_heads"]:
    """Root mean square over distances m of ‖Δ W_Q R(m) W_Kᵀ‖ (Frobenius), biases as rows, for rotary heads.

    Over distances long against the beat of any two pairs it is √(½ Σ_f ‖ΔZ_f‖² + ‖Δ fixed‖²).
    """
    one, other = (_forms_with_biases(weights) for weights in (before, after))
    # The doubled form has twice the square of the complex one.
    total = one.pairs.difference_norm(other.pairs).square().sum(dim=-1) / 4
    if one.fixed is not None and other.fixed is not None:
        total = total + one.fixed.difference_norm(other.fixed).square()
    return total.sqrt()


def rotary_size(weights: AttentionWeights) -> Float[Tensor, " num_heads"]:
    """The same of the forms themselves: how far they are from nothing."""
    forms = _forms_with_biases(weights)
    total = forms.pairs.norm().square().sum(dim=-1) / 4
    if forms.fixed is not None:
        total = total + forms.fixed.norm().square()
    return total.sqrt()


def merge_rotary_pairs(plain: AttentionWeights, groups: int) -> AttentionWeights:
    """The nearest writing with that many key heads: each pair of a group on one line of its own.

    Of v_j, the keys of the group's heads in a pair, the common one is the first left singular vector v of
    [√w_1 v_1 … √w_n v_n], w_j = Σ ‖u_i‖² of the queries that read j: then v_j ≈ c_j v, and u_i → u_i c_j*. It
    is the least Σ ‖ΔZ‖² there is, and nothing if the v_j are complex multiples of one. Channels that are
    not turned get the basis that serves all heads best.
    """
    (q,), (k,), rotation = plain.q, plain.k, _rotary(plain)
    members = k.copies // groups
    u = _complex_pairs(_with_row(q), rotation).unflatten(0, (groups, members, -1))  # type: ignore[no-untyped-call]
    v = _complex_pairs(_with_row(k), rotation).unflatten(0, (groups, members))  # type: ignore[no-untyped-call]
    weight = u.abs().square().sum(dim=(2, 4))  # [groups, members, pairs]
    stacked = (weight.sqrt()[..., None] * v).permute(0, 2, 3, 1)
    top = torch.linalg.svd(stacked, full_matrices=False).U[..., 0]  # [groups, pairs, rows]
    c = torch.einsum("gfd,gmfd->gmf", top.conj(), v)
    # As long as the keys it stands for, and turned as the first of them.
    total = weight.sum(dim=1)
    length = ((weight * c.abs().square()).sum(dim=1) / torch.where(total > 0, total, 1.0)).sqrt()
    unit = torch.where(length > 0, length, 1.0) * torch.exp(1j * c[:, 0].angle())
    c, top = c / unit[:, None], top * unit[..., None]
    new_q, new_k = _with_row(q).clone(), _with_row(k)[::members].clone()
    turned = (u * c.conj()[:, :, None, :, None]).flatten(0, 2)
    for new, pairs in ((new_q, turned), (new_k, top)):
        for channels, part in zip(rotation.pairs, (pairs.real, pairs.imag), strict=True):
            new[..., channels] = part.mT
    _merge_fixed(q, k, rotation, new_q, new_k)
    return replace(plain, q=(_without_row(new_q, q),), k=(_without_row(new_k, k),))


def _merge_fixed(q: Link, k: Link, rotation: RotaryEmbedding, new_q: Tensor, new_k: Tensor) -> None:
    """The channels that are not turned, in place."""
    stays = _stays(rotation, q.d_out)
    if not stays:
        return
    groups = len(new_k)
    own = _with_row(q)[..., stays].reshape(groups, k.copies // groups, -1, len(stays))
    common = _with_row(k)[..., stays].unflatten(0, (groups, -1))  # type: ignore[no-untyped-call]
    basis = joint_basis(own, common, "own").of_width(len(stays))
    new_q[..., stays] = (own @ basis.own).reshape(*new_q.shape[:2], len(stays))
    new_k[..., stays] = basis.shared


def _stays(rotation: RotaryEmbedding, width: int) -> list[int]:
    """The channels that are not turned."""
    first, second = rotation.pairs
    return sorted(set(range(width)) - {*first, *second})


def _complex_pairs(
    maps: Float[Tensor, "copies rows width"], rotation: RotaryEmbedding
) -> Complex[Tensor, "copies pairs rows"]:
    first, second = rotation.pairs
    return torch.complex(maps[..., first], maps[..., second]).mT


def _with_row(link: Link) -> Float[Tensor, "copies rows width"]:
    """The maps with the bias as one more row, if there is one."""
    return link.weight if link.bias is None else torch.cat([link.weight, link.bias[:, None, :]], dim=1)


def _without_row(maps: Float[Tensor, "copies rows width"], like: Link) -> Link:
    return Link(maps) if like.bias is None else Link(maps[:, :-1].contiguous(), maps[:, -1].contiguous())


def _forms_with_biases(weights: AttentionWeights) -> RotaryPairForms:
    q, k = (_with_row(weights.multiplied(side).of_heads(weights.num_heads)) for side in _QK)
    return rotary_pair_forms(q, k, _rotary(weights))


def _rotary(weights: AttentionWeights) -> RotaryEmbedding:
    assert weights.semantics.rotary is not None
    return weights.semantics.rotary


def _channel_moments(weights: AttentionWeights, moments: Moments | None) -> tuple[Tensor, Tensor]:
    """Of queries and keys, one a query head."""
    heads = weights.num_heads
    if moments is None:
        q, k = (_with_row(weights.multiplied(side).of_heads(heads)).double() for side in _QK)
        return q.mT @ q, k.mT @ k
    require_moments_of("pair_scores", weights, moments, ["qk"])
    return moments.q, moments.k.repeat_interleave(heads // len(moments.k), dim=0)


def _complex_moments(
    G: Float[Tensor, "heads r r"], rotation: RotaryEmbedding
) -> tuple[Complex[Tensor, "heads pairs pairs"], Complex[Tensor, "heads pairs pairs"]]:
    """E[c_f c_g*] and E[c_f c_g] of c = a + i b, from the moments of a and b."""
    a, b = rotation.pairs
    aa, bb, ab, ba = (G[:, one][:, :, other] for one, other in ((a, a), (b, b), (a, b), (b, a)))
    return torch.complex(aa + bb, ba - ab), torch.complex(aa - bb, ba + ab)


def mean_turn(
    theta: Float[Tensor, "pairs pairs"], longest: int | None, causal: bool
) -> Complex[Tensor, "pairs pairs"]:
    """Mean of e^{imθ} over the distances m of all pairs of a text of L tokens, L − |m| at each.

    Both ways it is Fejér's kernel, (sin ½Lθ / sin ½θ)² / L²; of one way, that is twice the real part less L,
    and (L sin θ − sin Lθ) / (2 sin ½θ)² the imaginary one, over ½ L (L + 1).
    """
    if longest is None:
        return (theta == 0).to(torch.complex128)
    L, sines = longest, (theta / 2).sin()
    still = sines == 0
    sines = torch.where(still, 1.0, sines)
    both = torch.where(still, float(L * L), ((L * theta / 2).sin() / sines).square())
    if not causal:
        return (both / L**2).to(torch.complex128)
    ahead = (L * theta.sin() - (L * theta).sin()) / (4 * sines.square())
    # Where that is a difference of two numbers nearly alike, the first term of its series.
    ahead = torch.where((L * theta).abs() < 1e-4, theta * L * (L**2 - 1) / 6, ahead)
    return torch.complex((both + L) / 2, ahead) / (L * (L + 1) / 2)
