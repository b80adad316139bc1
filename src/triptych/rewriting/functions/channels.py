"""The channels between the two maps of a form, and changes of these channels.

The code serves both forms. A form A = L Rᵀ has a *common* factor, shared by all heads of a group (W_K, W_V),
and an *own* factor per head (W_Q, W_Oᵀ).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.legality import separate, sharing_sides
from triptych.core.algebra.weights import AttentionWeights, Chain, Link, Side

Form = Literal["qk", "ov"]
FORMS: tuple[Form, ...] = ("qk", "ov")
SIDES_OF: dict[Form, tuple[Side, Side]] = {"qk": ("q", "k"), "ov": ("v", "o")}
NAMES: dict[Side, str] = {"q": "queries", "k": "keys", "v": "values", "o": "the output"}


class JointBasis(NamedTuple):
    """Channels of a group, from the SVD of the stacked forms of its heads.

        [A_1; … ; A_n] = Y S Bᵀ,   A_i = own_i common_jᵀ

    The first w channels are the best w common channels for all heads together, in Frobenius norm; the error
    is √Σ_{i>w} S_i². Columns of singular values within rounding are zero.

    Attributes:
        S: singular values `[groups, k]`, descending.
        rank: number of singular values above rounding `[groups]`.
        own: `[groups, members, r, k]`: `own_i own = Y_i S^½`.
        common: `[groups, members, r, k]`: `Σ_j common_j common = B S^½` for one member a group; for several
            members, the maps from the channels of each member to the joint channels.
        shared: `[groups, d, k]`, B S^½.
    """

    S: Float[Tensor, "groups k"]
    rank: Int[Tensor, " groups"]
    own: Float[Tensor, "groups members r k"]
    common: Float[Tensor, "groups members r k"]
    shared: Float[Tensor, "groups d k"]

    def resize(self, width: int) -> "JointBasis":
        """Return the first `width` channels, padded with zeros."""
        if width > self.S.shape[-1]:
            more = (0, width - self.S.shape[-1])
            return JointBasis(
                torch.nn.functional.pad(self.S, more),
                self.rank,
                *(torch.nn.functional.pad(part, more) for part in self[2:]),
            )
        rank = self.rank.clamp(max=width)
        return JointBasis(
            self.S[:, :width], rank, *(part[..., :width] for part in self[2:])
        )

    def resize_groups(self, widths: Sequence[int]) -> "JointBasis":
        """Return the first `widths[g]` channels of each group g, padded with zeros to the widest group."""
        cut = self.resize(max(widths))
        ends = torch.tensor(widths, device=self.S.device)
        kept = torch.arange(max(widths), device=self.S.device) < ends[:, None]
        return JointBasis(
            cut.S * kept,
            cut.rank.minimum(ends),
            cut.own * kept[:, None, None, :],
            cut.common * kept[:, None, None, :],
            cut.shared * kept[:, None, :],
        )


def joint_basis(
    own: Float[Tensor, "groups members rows r"],
    common: Float[Tensor, "groups members d r"],
    signs: Literal["own", "common"],
) -> JointBasis:
    """Compute the best common channels for all heads of a group.

    The thin QR of each own factor reduces the SVD: [A_1; …] and [R_1 common_1ᵀ; …] have the same S and B.
    """
    groups, members, _, r = own.shape
    R = torch.linalg.qr(own).R
    # A block-diagonal matrix of the members' R, so that one SVD covers a group.
    apart = torch.eye(members, dtype=R.dtype, device=R.device)[:, None, :, None]
    blocks = (apart * R[:, :, :, None, :]).reshape(
        groups, members * R.shape[-2], members * r
    )
    form = BilinearForm(blocks, common.transpose(1, 2).flatten(2))
    U, S, Vh = form.svd()
    rounding = max(form.d_left, form.d_right) * torch.finfo(S.dtype).eps
    alive = S.gt(S[:, :1] * rounding)
    inverse = torch.where(alive, S, 1.0).rsqrt() * alive
    to_own = common.mT @ (Vh.mT * inverse[:, None, :])[:, None]
    to_common = R.mT @ (U * inverse[:, None, :]).reshape(
        groups, members, -1, U.shape[-1]
    )
    shared = Vh.mT * (S.sqrt() * alive)[:, None, :]
    # Fix the signs: the entry of largest magnitude of each column is positive.
    signed = (own @ to_own).flatten(1, 2) if signs == "own" else shared
    largest = signed.gather(-2, signed.abs().argmax(dim=-2, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(S.dtype)
    return JointBasis(
        S,
        alive.sum(dim=-1),
        to_own * sign[:, None],
        to_common * sign[:, None],
        shared * sign,
    )


def rebase(
    weights: AttentionWeights,
    side: Side,
    change: Float[Tensor, "copies r width"],
    notes: list[str],
    shift: Float[Tensor, "copies width"] | None = None,
) -> Chain:
    """Return a chain in new channels: `… W` → `… W G`, for the output `W …` → `Gᵀ W …`.

    Only the map at that end changes if it is learned and not diagonal; otherwise the chain becomes one
    product, with a note. A shift is added to the bias, if any.
    """
    chain = weights.chain(side)
    factor = Link(change)
    end = chain[0 if side == "o" else -1] if chain else None
    # Fixed and diagonal maps cannot absorb the change.
    if end is None or end.diagonal or not end.learned:
        notes.append(
            f"the maps of {NAMES[side]} were multiplied into one"
            if chain
            else f"{NAMES[side]} got a map"
        )
        end = weights.multiplied(side)
        chain = ()
    if side == "o":
        return (Link(change.mT).then(end), *chain[1:])
    last = end.then(factor)
    if shift is not None and last.bias is not None:
        last = replace(last, bias=last.bias + shift)
    return (*chain[:-1], last)


def with_learned_maps(weights: AttentionWeights, notes: list[str]) -> AttentionWeights:
    """Replace fixed slices of the input by learned maps: layers do not store other fixed maps."""
    if all(link.learned for link in (*weights.q, *weights.k, *weights.v)):
        return weights
    notes.append("the fixed slices of the input became learned maps")

    def learn(link: Link) -> Link:
        return (
            link
            if link.learned
            else replace(link, weight=link.weight.clone(), learned=True)
        )

    return weights.each_link(learn, ("q", "k", "v"))


def untied(before: AttentionWeights, after: AttentionWeights) -> tuple[str, ...]:
    """Return a note for each pair of tied chains with separate maps afterwards."""
    pairs: list[tuple[Side, Side]] = [("q", "k"), ("k", "v")]
    if not before.tied("q", "k"):
        pairs.append(("q", "v"))
    return tuple(
        f"{NAMES[one]} and {NAMES[other]} had one map and have two now"
        for one, other in pairs
        if before.tied(one, other) and not after.tied(one, other)
    )


def in_working_precision(weights: AttentionWeights) -> AttentionWeights:
    """Convert weights to float32 or higher: SVD does not support lower precision."""
    working = torch.promote_types(weights.dtype, torch.float32)
    return weights if working == weights.dtype else weights.to(working)


def one_map(weights: AttentionWeights, side: Side, notes: list[str]) -> Link:
    """Return a chain as one learned, unshared map; add a note if it had several maps."""
    if len(weights.chain(side)) > 1:
        notes.append(f"the maps of {NAMES[side]} were multiplied into one")
    (link,) = (
        separate((weights.multiplied(side),))
        if sharing_sides(weights, side)
        else (weights.multiplied(side),)
    )
    return replace(link, learned=True, norm=None)
