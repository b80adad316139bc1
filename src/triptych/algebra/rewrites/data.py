"""Fewer channels, chosen by what a text does with them: the least error of scores and outputs on it.

The best rank of the scores of a text is a truncated SVD of all of them, queries × keys. Their second moments
stand for them: with G_q = R_qᵀ R_q and G_k = R_kᵀ R_k, the scores have the singular values of R_q R_kᵀ.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.algebra.moments import Moments
from triptych.algebra.rewrites.channels import (
    Form,
    JointBasis,
    joint_basis,
    move,
    newly_apart,
    size,
    times,
    with_learned_maps,
)
from triptych.algebra.rewrites.legality import CHANNELS_FREE, KEY_BIAS_BLIND, VALUE_BIAS_PASSES
from triptych.algebra.rewrites.rank import Ranks, num_groups, require_ranks, without_fixed_widths
from triptych.algebra.rewrites.record import Cut, RewriteRefusedError, Rewritten, rewritten
from triptych.algebra.weights import AttentionWeights, Side

# Weight of inputs without preferred direction beside those of the text: just enough to decide on channels
# that the text never uses.
PRIOR = 1e-12


def truncate_on_data(
    weights: AttentionWeights,
    moments: Moments,
    *,
    qk_rank: Ranks | None = None,
    ov_rank: Ranks | None = None,
    centred: bool | None = None,
    prior: float = PRIOR,
) -> Rewritten:
    """The forms of a lower rank with the least mean square error on a text.

        QK:  G_q = Σ_i E[q_iᵀ q_i],  R_q R_kᵀ = U S Vᵀ:   q̂_i = q_i R_q⁻¹ U_r S_r^½,   k̂ = k R_k⁻¹ V_r S_r^½
        OV:  H = E[zᵀz] of the mixed values z = p v, R_H [W_O,1 … W_O,n] = U S Vᵀ:  v̂ = v R_H⁻¹ U_r S_r^½

    Σ_i E(q_i kᵀ − q̂_i k̂ᵀ)² over the heads i of a group and all queries and keys of the text is
    Σ_{j>r} S_j², the least that r common key channels can do. Likewise Σ_i E‖(z_i − ẑ_i) W_O,i‖² where a
    head has its values for itself. Of a group, H is the mean over its heads, and each W_O,i is then fitted
    to its own head's moments: the least error for these value channels, though others might do better.

    Chains of several maps stay so where they can, and biases go along.

    Source: Eckart & Young 1936, doi 10.1007/BF02288367.
    """
    name = "truncate_on_data"
    ranks = require_ranks(name, weights, qk_rank, ov_rank)
    require_moments_of(name, weights, moments, [*ranks])
    means_off = {form: _centred(name, weights, form, centred) for form in ranks}
    notes: list[str] = []
    learned = with_learned_maps(weights.to(torch.float64), notes)
    start = result = without_fixed_widths(name, learned, ranks, notes)
    cuts: list[Cut] = []
    for form, given in ranks.items():
        cut = _cut_qk if form == "qk" else _cut_ov
        result, error, whole = cut(result, moments, given, means_off[form], prior, notes)
        cuts.append(_in_words(form, given, error, whole, about_mean=means_off[form]))
    moves = {form: move(start, result, form) for form in ranks}
    # With the mean taken off, what is lost of the value bias is in the output's, if all of it comes through.
    in_output = means_off.get("ov", False) and not VALUE_BIAS_PASSES.why_not(weights)
    sizes = {form: moves[form].form if form == "ov" and in_output else moves[form].whole for form in ranks}
    rounding = 100 * weights.d_model * torch.finfo(torch.float64).eps
    exact = all(bool((sizes[form] <= rounding * size(start, form).whole).all()) for form in ranks)
    return rewritten(
        name,
        "rounding-exact" if exact else "bounded",
        weights,
        result.to(weights.dtype),
        checked=tuple(said for form in ranks for said in CHANNELS_FREE[form].checked),
        choice=cuts,
        notes=(*notes, *newly_apart(weights, result)),
        bound=0.0 if exact else max(float(one.max()) for one in sizes.values()),
        error=max(cut.worst for cut in cuts),
    )


def measure_energies(
    weights: AttentionWeights,
    form: Form,
    moments: Moments | None = None,
    *,
    centred: bool | None = None,
    prior: float = PRIOR,
) -> Float[Tensor, "groups k"]:
    """What each channel of the best basis of a form carries, for every group of heads: descending, float64.

    Σ of those left out is what a rank loses: of Σ_i ‖W_QK,i‖² (‖W_OV,i‖²) without moments, of the mean
    square scores q kᵀ (outputs) on the text with them; but of outputs of heads that read one value head, as
    if they all mixed its values alike. What `allocate` shares channels out by.
    """
    name = "measure_energies"
    # Not for the rank: whatever forbids to truncate the form makes its spectrum mean nothing.
    require_ranks(name, weights, 1 if form == "qk" else None, 1 if form == "ov" else None)
    wide = weights.to(torch.float64)
    if moments is not None:
        require_moments_of(name, weights, moments, [form])
        return _basis(wide, moments, form, _centred(name, weights, form, centred), prior).S.square()
    wide = wide.behind_norms()
    k, v = wide.multiplied("k"), wide.multiplied("v")
    if form == "ov":
        return joint_basis(_own(wide.W_O.mT, v.copies), v.weight[:, None], "common").S.square()
    k = k.of_heads(num_groups(wide, "qk"))
    return joint_basis(_own(wide.W_Q, k.copies), k.weight[:, None], "own").S.square()


def require_moments_of(name: str, weights: AttentionWeights, moments: Moments, forms: Sequence[Form]) -> None:
    """Refuse moments of a layer with other heads or channels, where those of some forms are looked at."""
    q, k, v = (weights.multiplied(side) for side in ("q", "k", "v"))
    for form, what, found, wanted in (
        ("qk", "queries", moments.q, (weights.num_heads, q.d_out)),
        ("qk", "keys", moments.k, (k.copies, k.d_out)),
        ("ov", "mixed values", moments.mixed, (weights.num_heads, v.d_out)),
    ):
        if form in forms and found.shape[:2] != wanted:
            raise RewriteRefusedError(
                name,
                f"the moments are of {found.shape[0]} × {found.shape[1]} channels of {what}, the layer has "
                f"{wanted[0]} × {wanted[1]}",
                "gather them of the layer as it is written now",
            )


def _own(maps: Float[Tensor, "heads rows r"], groups: int) -> Float[Tensor, "groups 1 all_rows r"]:
    return maps.reshape(groups, 1, -1, maps.shape[-1])


def _centred(name: str, weights: AttentionWeights, form: Form, asked: bool | None) -> bool:
    if asked is False:
        return False
    reason = KEY_BIAS_BLIND.why_not(weights) if form == "qk" else ""
    if form == "ov" and "o" not in weights.bias_slots:
        reason = "the output map has no bias slot in the target format"
    if asked and reason:
        raise RewriteRefusedError(
            name, f"{form}: the mean cannot be taken off: {reason}", "pass centred=False"
        )
    return not reason


class _Grams(NamedTuple):
    """Second moments, with the prior: of queries and keys, or of mixed values."""

    heads: Float[Tensor, "heads r r"]  # of queries or of mixed values
    keys: Float[Tensor, "groups r r"] | None  # None for mixed values


def _grams(weights: AttentionWeights, moments: Moments, form: Form, centred: bool, prior: float) -> _Grams:
    def blended(
        gram: Tensor, side: Side, square: float, copies: int, constant: bool
    ) -> Float[Tensor, "copies r r"]:
        link = weights.behind_norms().multiplied(side).of_heads(copies)
        of_any_input = square * link.weight.mT @ link.weight
        if constant and link.bias is not None:
            of_any_input = of_any_input + link.bias[:, :, None] * link.bias[:, None, :]
        return gram + prior * of_any_input

    heads = weights.num_heads
    if form == "ov":
        gram = moments.mixed_centred if centred else moments.mixed
        return _Grams(blended(gram, "v", moments.y_square, heads, not centred), None)
    groups = num_groups(weights, "qk")
    keys = moments.k_centred if centred else moments.k
    return _Grams(
        blended(moments.q, "q", moments.x_square, heads, True),
        blended(
            keys.repeat_interleave(groups // len(keys), dim=0), "k", moments.y_square, groups, not centred
        ),
    )


def _basis(
    weights: AttentionWeights, moments: Moments, form: Form, centred: bool, prior: float
) -> JointBasis:
    """The channels of every group that carry the most, on the text."""
    grams, groups = _grams(weights, moments, form, centred, prior), num_groups(weights, form)
    of_groups = grams.heads.unflatten(0, (groups, -1))  # type: ignore[no-untyped-call]
    if grams.keys is None:
        R = gram_root(of_groups.mean(dim=1))
        return joint_basis(_own(weights.W_O.mT, groups), R[:, None], "common")
    return joint_basis(gram_root(of_groups.sum(dim=1))[:, None], gram_root(grams.keys)[:, None], "own")


def gram_root(gram: Float[Tensor, "*batch r r"]) -> Float[Tensor, "*batch r r"]:
    """R with RᵀR = G, where Cholesky's would stop at a G that is singular."""
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    root: Tensor = values.clamp(min=0.0).sqrt()[..., :, None] * vectors.mT
    return root


def _in_words(
    form: Form,
    ranks: Sequence[int],
    error: Float[Tensor, " heads"],
    whole: Float[Tensor, " heads"],
    *,
    about_mean: bool,
) -> Cut:
    """What was left of a form, and what each head loses of the mean square of what it does."""
    what, mean = "scores" if form == "qk" else "outputs", " about their mean" if about_mean else ""
    words = f"W_{form.upper()}: {{ranks}}, which leaves out at most {{worst:.3g}} of the mean square of a "
    worst = float((error / torch.where(whole > 0, whole, 1.0)).max())
    return Cut(f"{words}head's {what}{mean}", tuple(ranks), max(ranks), worst, Cut.shares(error, whole))


_Cut = tuple[AttentionWeights, Float[Tensor, " heads"], Float[Tensor, " heads"]]


def _cut_qk(
    weights: AttentionWeights,
    moments: Moments,
    ranks: Sequence[int],
    centred: bool,
    prior: float,
    notes: list[str],
) -> _Cut:
    """W_QK at those ranks; of every head the mean square error of its scores q kᵀ, and their mean square."""
    basis = _basis(weights, moments, "qk", centred, prior).of_widths(ranks)
    to_q, to_k = _whole_where_full(basis.own[:, 0], ranks), _whole_where_full(basis.common[:, 0], ranks)
    grams = _grams(weights, moments, "qk", centred, prior=0.0)
    assert grams.keys is not None
    missing = _eye_like(to_q) - to_q @ to_k.mT
    heads, groups = weights.num_heads, len(to_q)
    R_q, R_k = gram_root(grams.heads), gram_root(grams.keys).repeat_interleave(heads // groups, dim=0)
    error = R_q @ missing.repeat_interleave(heads // groups, dim=0) @ R_k.mT
    result = replace(weights, q=times(weights, "q", to_q, notes), k=times(weights, "k", to_k, notes))
    return result, _squares(error), _squares(R_q @ R_k.mT)


def _cut_ov(
    weights: AttentionWeights,
    moments: Moments,
    ranks: Sequence[int],
    centred: bool,
    prior: float,
    notes: list[str],
) -> _Cut:
    """W_OV at those ranks; of every head the mean square error of its output, and its mean square."""
    basis = _basis(weights, moments, "ov", centred, prior).of_widths(ranks)
    heads, groups = weights.num_heads, len(ranks)
    to_v = _whole_where_full(basis.common[:, 0], ranks)
    of_heads = to_v.repeat_interleave(heads // groups, dim=0)
    if groups == heads:
        to_o = _whole_where_full(basis.own[:, 0], ranks).mT
    else:
        # What each head makes of these channels is its own affair: z ≈ (z T_v) X, by least squares.
        R = gram_root(_grams(weights, moments, "ov", centred, prior).heads)
        to_o = torch.linalg.pinv(R @ of_heads) @ R
    missing = _eye_like(to_v) - of_heads @ to_o
    W_O = weights.W_O
    R_true = gram_root(_grams(weights, moments, "ov", centred, prior=0.0).heads)
    result = replace(weights, v=times(weights, "v", to_v, notes), o=times(weights, "o", to_o.mT, notes))
    if centred:
        constant = (moments.mixed_mean[:, None, :] @ missing @ W_O).sum(dim=(0, 1))
        result = replace(result, o_bias=constant if weights.o_bias is None else weights.o_bias + constant)
    return result, _squares(R_true @ missing @ W_O), _squares(R_true @ W_O)


def _whole_where_full(
    change: Float[Tensor, "groups r width"], ranks: Sequence[int]
) -> Float[Tensor, "groups r width"]:
    """The identity for groups that keep all their channels."""
    r, width = change.shape[1:]
    full = torch.tensor([rank == r for rank in ranks], device=change.device)[:, None, None]
    return torch.where(full, _eye_like(change)[:, :width], change)


def _eye_like(change: Float[Tensor, "groups r width"]) -> Float[Tensor, "r r"]:
    return torch.eye(change.shape[1], dtype=change.dtype, device=change.device)


def _squares(matrices: Float[Tensor, "heads rows columns"]) -> Float[Tensor, " heads"]:
    return matrices.square().sum(dim=(-2, -1))
