"""Sizes of the forms of heads and of their changes, averaged over distances for rotary heads."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.rewriting.functions.channels import Form


class Move(NamedTuple):
    """Change of one form for every head.

    Attributes:
        form: ‖ΔW_QK‖ or ‖ΔW_OV‖ (Frobenius) `[num_heads]`.
        bias: change of the bias row of the form `[num_heads]`: ‖Δ(b_Q W_Kᵀ)‖ or ‖Δ(b_V W_O)‖.
    """

    form: Float[Tensor, " num_heads"]
    bias: Float[Tensor, " num_heads"]

    @property
    def whole(self) -> Float[Tensor, " num_heads"]:
        """Change of the form with its bias row."""
        return torch.hypot(self.form, self.bias)


def measure_move(before: AttentionWeights, after: AttentionWeights, form: Form) -> Move:
    """Measure the change of a form for every head.

    The measure of W_QK in rotary heads is the root mean square over distances m of ‖Δ W_Q R(m) W_Kᵀ‖, with
    biases as rows. Over distances long relative to the beat of any two pairs it is √(½ Σ_f ‖ΔZ_f‖² + ‖Δ
    fixed‖²).
    """
    before = before.behind_norms()
    after = after.behind_norms()
    if form == "qk" and before.semantics.rotary is not None:
        one, other = (_rotary_forms(weights) for weights in (before, after))
        # The doubled real form has twice the squared norm of the complex form.
        total = one.pairs.difference_norm(other.pairs).square().sum(dim=-1) / 4
        if one.fixed is not None and other.fixed is not None:
            total = total + one.fixed.difference_norm(other.fixed).square()
        return Move(total.sqrt(), torch.zeros_like(total))
    first, second = (before.qk, after.qk) if form == "qk" else (before.ov, after.ov)
    bias = (bias_row(before, form) - bias_row(after, form)).norm(dim=-1)
    return Move(first.difference_norm(second), bias)


def measure_size(weights: AttentionWeights, form: Form) -> Move:
    """Measure the norms of a form and of its bias row for every head."""
    weights = weights.behind_norms()
    if form == "qk" and weights.semantics.rotary is not None:
        turned = _rotary_forms(weights)
        total = turned.pairs.norm().square().sum(dim=-1) / 4
        if turned.fixed is not None:
            total = total + turned.fixed.norm().square()
        return Move(total.sqrt(), torch.zeros_like(total))
    whole = weights.qk if form == "qk" else weights.ov
    return Move(whole.norm(), bias_row(weights, form).norm(dim=-1))


def bias_row(weights: AttentionWeights, form: Form) -> Float[Tensor, "num_heads d"]:
    """Return the query bias as seen by a key, `b_Q W_Kᵀ`, or the value bias in the output, `b_V W_O`."""
    weights = weights.behind_norms()
    bias = weights.head_bias("q" if form == "qk" else "v")
    reader = weights.W_K.mT if form == "qk" else weights.W_O
    if bias is None:
        return reader.new_zeros(weights.num_heads, reader.shape[-1])
    return (bias[:, None, :] @ reader)[:, 0]


class RotaryPairForms(NamedTuple):
    """Forms of rotary heads."""

    pairs: BilinearForm  # batch `[num_heads, pairs]`
    fixed: (
        BilinearForm | None
    )  # batch `[num_heads]`, unrotated channels; None if all channels are rotated


def rotary_pair_forms(
    q: Float[Tensor, "num_heads q_rows width"],
    k: Float[Tensor, "num_heads k_rows width"],
    rotation: RotaryEmbedding,
) -> RotaryPairForms:
    """Return the forms of rotary pairs and the form of unrotated channels, for the maps of every head."""
    stays = unturned(rotation, q.shape[-1])
    doubled = []
    longer = 1.0 if rotation.long is None else max(1.0, rotation.long.times)
    for maps in (q, k):
        a, b = (
            rotation.factor * longer * maps[..., channels].mT[..., None]
            for channels in rotation.pairs
        )
        doubled.append(
            torch.cat([torch.cat([a, b], dim=-1), torch.cat([b, -a], dim=-1)], dim=-2)
        )
    fixed = BilinearForm(q[..., stays], k[..., stays]) if stays else None
    return RotaryPairForms(BilinearForm(doubled[0], doubled[1]), fixed)


def unturned(rotation: RotaryEmbedding, width: int) -> list[int]:
    """Return the unrotated channels of a head."""
    first, second = rotation.pairs
    return sorted(set(range(width)) - {*first, *second})


def with_row(link: Link) -> Float[Tensor, "copies rows width"]:
    """Return the maps with the bias, if any, as one more row."""
    return (
        link.weight
        if link.bias is None
        else torch.cat([link.weight, link.bias[:, None, :]], dim=1)
    )


def _rotary_forms(weights: AttentionWeights) -> RotaryPairForms:
    assert weights.semantics.rotary is not None
    q, k = (weights.multiplied(side).repeat(weights.num_heads) for side in ("q", "k"))
    return rotary_pair_forms(with_row(q), with_row(k), weights.semantics.rotary)
