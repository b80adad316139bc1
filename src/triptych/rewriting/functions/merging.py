"""Merging of key-value heads, shared by several query heads afterwards."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, final

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from triptych.core.algebra.legality import (
    CHANNELS_FREE,
    CHANNELS_OR_PAIRS,
    KEY_BIAS_BLIND,
    ROTARY_PAIRS_MEET,
    require_nothing_between,
    require_whole_number,
    unchanged,
    with_chains,
)
from triptych.core.algebra.rewritten import (
    RewriteRefusedError,
    Rewritten,
    Tier,
    rewritten,
)
from triptych.core.algebra.semantics import HeadNorm
from triptych.core.algebra.weights import SIDES, AttentionWeights, Link
from triptych.rewriting.functions.biases import fold_value_bias
from triptych.rewriting.functions.channels import (
    FORMS,
    NAMES,
    Form,
    in_working_precision,
    joint_basis,
    one_map,
    untied,
)
from triptych.rewriting.functions.moves import (
    Move,
    bias_row,
    measure_move,
    measure_size,
)
from triptych.rewriting.functions.rewrite import BETWEEN, LayerRewrite, LayerToRewrite
from triptych.rewriting.functions.rotary_pairs import merge_rotary_pairs, require_rotary

_NAME = "merge_kv_heads"


@final
class MergeKVHeads(LayerRewrite):
    """Merge key-value heads, so that several query heads read one; rotary ones pair by pair."""

    name = _NAME
    tier = "bounded unless they are equal"
    requires = (CHANNELS_OR_PAIRS, CHANNELS_FREE["ov"])
    besides = f"the number does not divide; {BETWEEN}"
    place = 5
    why_here = "heads are merged while all their channels are there"
    resizes = True

    num_kv_heads: int = Field(ge=1, description="number of key-value heads afterwards")
    bounded: bool = Field(
        True,
        description="whether heads that differ by more than their basis may be merged",
    )

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return merge_kv_heads(layer.weights, self.num_kv_heads, bounded=self.bounded)


def merge_kv_heads(
    weights: AttentionWeights,
    num_kv_heads: int,
    *,
    bounded: bool = False,
    tolerance: float = 1e-9,
) -> Rewritten:
    """Merge key-value heads: consecutive query heads then share a key-value head.

    Identical key heads are kept once. Otherwise the channels of a group are transformed to the best joint
    basis of its heads, with W_K the first d_k channels:

        C = [W_K,1 R_1ᵀ … W_K,n R_nᵀ] = B S Vᵀ   (W_Q,i = Q_i R_i)
        W_K = B S^½   W_Q,i = W_Q,i W_K,iᵀ B S^-½

    and likewise for W_V. The function is unchanged if the heads of a group are equal up to gauge; otherwise
    the forms of a group move by the minimum, √Σ_{i>d_k} S_i².

    Query biases are transformed as one more row of the form. Key biases are removed where the softmax cancels
    them. Value biases become a single bias per group, or move into the output bias. W_QK of rotary heads is
    merged pair by pair (`merge_rotary_pairs`).
    """
    pairs = weights.semantics.rotary is not None
    _require_shared_out(weights, num_kv_heads)
    present = max(weights.num_key_heads, weights.num_value_heads)
    if num_kv_heads == present:
        return unchanged(_NAME, weights, f"there are {present} key-value heads")
    for side in SIDES:
        require_nothing_between(_NAME, side, weights.chain(side)[:-1])
    notes: list[str] = []
    plain = in_working_precision(weights)
    heads = weights.num_heads
    q, k, v, o = (one_map(plain, side, notes) for side in SIDES)
    plain = replace(plain, q=(q.repeat(heads),), k=(k,), v=(v,), o=(o.repeat(heads),))
    several = bool(notes)
    mixed = [
        form
        for form in FORMS
        if not _equal_copies(plain.chain(_common_side(form))[0], num_kv_heads)
    ]
    if pairs and "qk" in mixed:
        require_rotary(_NAME, plain)
    needs = {
        form: ROTARY_PAIRS_MEET if pairs and form == "qk" else CHANNELS_FREE[form]
        for form in mixed
    }
    for form, need in needs.items():
        need.require(
            _NAME,
            plain,
            about=f"{form}: the maps of {NAMES[_common_side(form)]} differ, and ",
        )
    if "qk" in mixed:
        # A key bias of rotary heads is rotated with its pair and therefore kept.
        plain = plain if pairs else _without_key_bias(plain, notes)
    for form in FORMS:
        if form not in mixed:
            plain = _with_norm_of_groups(plain, form, num_kv_heads)
    attempt = _merged(plain, num_kv_heads, mixed, pairs)
    row = bias_row(plain, "ov")
    lost = (row - bias_row(attempt, "ov")).norm(dim=-1)
    if "ov" in mixed and bool((lost > tolerance * row.norm(dim=-1).max()).any()):
        try:
            plain = fold_value_bias(plain).weights
        except RewriteRefusedError as error:
            if not bounded:
                reason = "the value biases of a group cannot be one"
                raise RewriteRefusedError(
                    _NAME, f"ov: {reason}, and {error.reason}"
                ) from None
        else:
            notes.append(
                "the value biases of a group cannot be one: they went into that of the output"
            )
            attempt = _merged(plain, num_kv_heads, mixed, pairs)
    moves = {form: measure_move(plain, attempt, form) for form in mixed}
    sizes = {form: measure_size(plain, form) for form in mixed}
    differing = _worst_group(moves, sizes, num_kv_heads, tolerance)
    if differing and not bounded:
        raise RewriteRefusedError(
            _NAME, differing, "bounded=True merges them to the nearest"
        )
    exact: Tier = "rounding-exact" if mixed or several else "bit-exact"
    return rewritten(
        _NAME,
        "bounded" if differing else exact,
        weights,
        attempt.to(weights.dtype),
        checked=(
            f"{present} key-value heads can be shared out among {num_kv_heads}",
            *itertools.chain.from_iterable(need.checked for need in needs.values()),
            *([] if differing else ["the heads of a group are equal up to gauge"]),
        ),
        choice=differing,
        notes=(*notes, *untied(weights, attempt)),
        bound=max(float(one.whole.max()) for one in moves.values())
        if differing
        else 0.0,
    )


def _require_shared_out(weights: AttentionWeights, num_kv_heads: int) -> None:
    heads = weights.num_heads
    require_whole_number(_NAME, "num_kv_heads", num_kv_heads)
    if num_kv_heads < 1 or heads % num_kv_heads:
        reason = f"{num_kv_heads} key-value heads cannot serve {heads} heads: the number must divide {heads}"
        raise RewriteRefusedError(_NAME, reason)
    for side in SIDES:
        if not weights.chain(side):
            raise RewriteRefusedError(
                _NAME,
                f"no map makes {NAMES[side]}: the form is one matrix a head",
                "factor it first",
            )
    # Groups must consist of whole present heads, or present heads of whole groups.
    for present in (weights.num_key_heads, weights.num_value_heads):
        if present % num_kv_heads and num_kv_heads % present:
            reason = f"the present {present} cannot be shared out among {num_kv_heads} key-value heads"
            raise RewriteRefusedError(_NAME, reason)
    most = max(weights.num_key_heads, weights.num_value_heads)
    if most < num_kv_heads:
        reason = f"there are {most} key-value heads, fewer than {num_kv_heads}"
        raise RewriteRefusedError(
            _NAME, reason, "repeat_kv_heads gives every head its own"
        )


def _common_side(form: Form) -> Literal["k", "v"]:
    return "k" if form == "qk" else "v"


def _first_of_groups(link: Link, groups: int) -> Link:
    """Return the first map of each group, repeated if there are fewer maps than groups."""
    if link.copies <= groups:
        return link.repeat(groups)
    step = link.copies // groups
    return replace(
        link,
        weight=link.weight[::step].clone(),
        bias=None if link.bias is None else link.bias[::step].clone(),
    )


def _equal_copies(link: Link, groups: int) -> bool:
    """Return True if the maps of each group are identical, biases included."""
    again = _first_of_groups(link, groups).repeat(max(link.copies, groups))
    whole = link.repeat(max(link.copies, groups))
    return torch.equal(again.weight, whole.weight) and (
        again.bias is None or whole.bias is None or torch.equal(again.bias, whole.bias)
    )


def _with_norm_of_groups(
    plain: AttentionWeights, form: Form, groups: int
) -> AttentionWeights:
    """Merge per-head norms of keys or values into one norm per group."""
    side = _common_side(form)
    name = f"{side}_norm"
    norm: HeadNorm | None = getattr(plain.semantics, name)
    if norm is None or not norm.per_head:
        return plain

    def first(own: Tensor) -> Tensor:
        link = Link(own).repeat(max(plain.copies(side), len(own)))
        # A shared head cannot keep different gains.
        if not _equal_copies(link, groups):
            what = f"{form}: the {NAMES[side]} of a group are normalised with other numbers"
            raise RewriteRefusedError(_NAME, what)
        return own if link.copies <= groups else _first_of_groups(link, groups).weight

    changed = norm.with_own(plain.width(side), first)
    semantics = replace(plain.semantics, **{name: changed})  # type: ignore[arg-type]
    return replace(plain, semantics=semantics)


def _without_key_bias(plain: AttentionWeights, notes: list[str]) -> AttentionWeights:
    """Remove the key bias, which mixed channels cannot carry: it must be zero or cancelled by the softmax."""
    bias = plain.k[0].bias
    if bias is None:
        return plain
    if bool(bias.any()):
        KEY_BIAS_BLIND.require(
            _NAME, plain, about="qk: the key biases of a group cannot be one, and "
        )
        notes.append("the key bias was left out: the softmax is blind to it")
    return replace(plain, k=(replace(plain.k[0], bias=None),))


def _merged(
    plain: AttentionWeights, groups: int, mixed: Sequence[Form], pairs: bool
) -> AttentionWeights:
    """Return the nearest weights with `groups` key-value heads."""
    result = plain
    for form in FORMS:
        side = _common_side(form)
        if form not in mixed:
            result = with_chains(
                result, {side: (_first_of_groups(plain.chain(side)[0], groups),)}
            )
        elif form == "qk":
            result = (
                merge_rotary_pairs(result, groups)
                if pairs
                else _merged_qk(result, groups)
            )
        else:
            result = _merged_ov(result, groups)
    return result


def _merged_qk(plain: AttentionWeights, groups: int) -> AttentionWeights:
    """Merge the key heads of groups; rows of an own factor are all queries reading one present key head."""
    (q,), (k,) = plain.q, plain.k
    members = k.copies // groups
    own = q.weight.reshape(groups, members, -1, q.d_out)
    common = k.weight.reshape(groups, members, *k.weight.shape[1:])
    basis = joint_basis(own, common, "own").resize(k.d_out)
    bias = q.bias
    if bias is not None:
        bias = (bias.reshape(groups, members, -1, q.d_out) @ basis.own).reshape(
            bias.shape
        )
    return replace(
        plain,
        q=(Link((own @ basis.own).reshape(q.weight.shape), bias),),
        k=(Link(basis.shared),),
    )


def _merged_ov(plain: AttentionWeights, groups: int) -> AttentionWeights:
    (v,), W_O = plain.v, plain.W_O
    members = v.copies // groups
    own = W_O.mT.reshape(groups, members, -1, v.d_out)
    common = v.weight.reshape(groups, members, *v.weight.shape[1:])
    basis = joint_basis(own, common, "common").resize(v.d_out)
    new_O = (own @ basis.own).reshape(W_O.mT.shape).mT.contiguous()
    bias = v.bias
    if bias is not None:
        bias = (bias.reshape(groups, members, 1, -1) @ basis.common).sum(dim=1)[:, 0]
    return replace(plain, v=(Link(basis.shared, bias),), o=(Link(new_O),))


def _worst_group(
    moves: dict[Form, Move], sizes: dict[Form, Move], groups: int, tolerance: float
) -> str:
    """Describe the group with the largest relative move; "" if all moves are within the tolerance."""
    worst = tolerance
    said = ""
    for form, moved in moves.items():
        norms = _group_norms(sizes[form].whole, groups)
        errors = _group_norms(moved.whole, groups)
        served = len(moved.whole) // groups
        # A group of norm 0 does not move.
        relative = torch.where(norms > 0, errors / norms, 0.0)
        group = int(relative.argmax())
        if float(relative[group]) > worst:
            worst = float(relative[group])
            said = (
                f"W_{form.upper()} of group {group} (heads {group * served} to "
                f"{group * served + served - 1}) moves by {float(errors[group]):.6g}, "
                f"of a norm of {float(norms[group]):.6g}"
            )
    return said


def _group_norms(
    norms: Float[Tensor, " heads"], groups: int
) -> Float[Tensor, " groups"]:
    total: Tensor = torch.linalg.vector_norm(norms.view(groups, -1), dim=-1)
    return total
