"""Which heads there are: permuted, left out, and how many of them read one key-value head."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from triptych.algebra.forms import BilinearForm
from triptych.algebra.rewrites.biases import fold_value_bias
from triptych.algebra.rewrites.channels import (
    CHANNELS_ARE_FREE,
    FORMS,
    NAMES,
    SIDES_OF,
    Form,
    Move,
    bias_row,
    each_link,
    in_working_precision,
    joint_basis,
    move,
    newly_apart,
    one_map,
    size,
    why_channels_stay,
)
from triptych.algebra.rewrites.legality import (
    require_nothing_between,
    require_whole_number,
    unchanged,
    why_key_bias_counts,
    with_chains,
)
from triptych.algebra.rewrites.record import RewriteRefusedError, Rewritten, Tier, rewritten
from triptych.algebra.weights import SIDES, AttentionWeights, Link, Side


def permute_heads(weights: AttentionWeights, order: Sequence[int]) -> Rewritten:
    """Put the heads in another order; key-value heads move with the queries that read them.

    Args:
        weights: the layer.
        order: head i of the result is head `order[i]` of the weights.

    Returns:
        The same function: a sum of heads has no order.

    Raises:
        RewriteRefusedError: not a permutation; one that would tear heads from others that read the
            same maps; or positions that add a bias of each head's own, which would stay behind.
    """
    heads = weights.num_heads
    if sorted(order) != list(range(heads)):
        raise RewriteRefusedError(
            "permute_heads",
            f"the order {list(order)} does not name each of the {heads} heads 0 to {heads - 1} once",
        )
    if list(order) == list(range(heads)):
        return unchanged("permute_heads", weights, "the heads are in that order")
    _require_heads_without_numbers("permute_heads", weights)

    def permute(link: Link) -> Link:
        served = heads // link.copies
        readers = torch.tensor(order).view(-1, served)
        if link.copies == 1:
            return link
        copies = readers // served
        torn = (copies != copies[:, :1]).nonzero()
        if len(torn):
            block, place = torn[0].tolist()
            raise RewriteRefusedError(
                "permute_heads",
                f"heads {readers[block, 0]} and {readers[block, place]} would come to share a map, but read "
                f"two, {copies[block, 0]} and {copies[block, place]} of {link.copies}",
                "move whole groups, or give every head its own key-value head first (repeat_kv_heads)",
            )
        return _taken(link, copies[:, 0])

    return rewritten(
        "permute_heads",
        "bit-exact",
        weights,
        each_link(weights, permute),
        checked=(
            f"the order names each of the {heads} heads once",
            "heads that read one map stay together",
            "no position bias of each head's own",
        ),
        choice=f"order {', '.join(map(str, order))}",
        notes=_notes_on_heads(weights),
    )


def prune_heads(weights: AttentionWeights, heads: Sequence[int], *, bounded: bool = False) -> Rewritten:
    """Leave heads out. The widths of the others stay.

    A key-value head goes with the last of the heads that read it. Where the groups that are left
    would have different sizes, key-value heads are repeated for smaller ones of one size: the layer may
    then hold and cache more numbers than before.

    Args:
        weights: the layer.
        heads: numbers of the query heads to leave out.
        bounded: whether heads that do something may go too.

    Returns:
        The same function if `W_V W_O` and `b_V W_O` of each head is exactly 0; else, if allowed, one
        whose bound is the largest ‖W_OV‖ left out (the value bias counts as one more row).

    Raises:
        RewriteRefusedError: a head does something, with its ‖W_OV‖; a number out of range or given
            twice; no head would be left; or positions add a bias of each head's own.
    """
    _require_prunable(weights, heads)
    if not heads:
        return unchanged("prune_heads", weights, "no head was named")
    _require_heads_without_numbers("prune_heads", weights)
    for side in SIDES_OF["ov"]:
        require_nothing_between("prune_heads", side, weights.chain(side)[:-1])
    lost = _done_by(weights, list(heads))
    active = lost.whole.gt(0).nonzero()[:, 0].tolist()
    if active and not bounded:
        worst = active[int(lost.whole[active].argmax())]
        form, bias = float(lost.form[worst]), float(lost.bias[worst])
        what = f"its ‖W_OV‖ is {form:.6g}" if form > 0 else f"its value bias adds {bias:.6g} to the output"
        raise RewriteRefusedError(
            "prune_heads",
            f"head {heads[worst]} does something: {what}",
            "bounded=True leaves it out all the same" if form > 0 else "fold the value bias first",
        )
    kept = [head for head in range(weights.num_heads) if head not in heads]
    repeated: list[str] = []

    def select(link: Link) -> Link:
        if link.copies == 1:
            return link
        readers = torch.tensor(kept) // (weights.num_heads // link.copies)
        living, served = torch.unique_consecutive(readers, return_counts=True)
        times = served // math.gcd(*served.tolist())
        if int(times.max()) > 1:
            repeated.append(f"{len(living)} that are left became {int(times.sum())}")
        return _taken(link, living.repeat_interleave(times))

    result = each_link(weights, select, num_heads=len(kept))
    notes = (
        f"groups of different sizes would be left: of the key-value heads {what}" for what in repeated[:1]
    )
    return rewritten(
        "prune_heads",
        "bounded" if active else "rounding-exact",
        weights,
        result,
        checked=(
            "W_V W_O and b_V W_O of every head left out are 0" if not active else "bounded=True was given",
            "no position bias of each head's own",
        ),
        choice=f"{len(heads)} of {weights.num_heads} heads left out: {', '.join(map(str, heads))}",
        notes=(*notes, *_notes_on_heads(weights)),
        bound=float(lost.whole.max()) if active else 0.0,
    )


def repeat_kv_heads(weights: AttentionWeights) -> Rewritten:
    """Give every query head a key and a value head of its own, copies of those that it reads.

    Args:
        weights: the layer.

    Returns:
        The same function, for more memory; the weights given if every head has its own.

    Raises:
        RewriteRefusedError: queries must be multiplied out for it (heads that weigh the channels of one
            key map), and something stands between their maps.
    """
    heads = weights.num_heads
    both: tuple[Side, Side] = ("k", "v")
    sides = [
        side for side in both if 0 < max((link.copies for link in weights.chain(side)), default=0) < heads
    ]
    if not sides:
        return unchanged(
            "repeat_kv_heads", weights, "every head has its own keys and values, as far as they have maps"
        )
    notes = [f"{weights.multiplied(side).copies} maps of {NAMES[side]} became {heads}" for side in sides]
    result = weights
    multiplied = "k" in sides and len(weights.q) > 1
    if multiplied:
        require_nothing_between("repeat_kv_heads", "q", weights.q[:-1])
        result = replace(result, q=(one_map(weights, "q", notes),))
    last = {id(weights.chain(side)[-1]) for side in sides}
    result = each_link(result, lambda link: link.of_heads(heads) if id(link) in last else link)
    return rewritten(
        "repeat_kv_heads",
        "rounding-exact" if multiplied else "bit-exact",
        weights,
        result,
        notes=tuple(notes),
    )


def merge_kv_heads(
    weights: AttentionWeights, num_kv_heads: int, *, bounded: bool = False, tolerance: float = 1e-9
) -> Rewritten:
    """Let consecutive query heads read one key-value head, where each reads its own now.

    Key heads that are the same numbers are simply kept once. Else the channels of a group are put
    into the basis that serves all its heads best, W_K its d_k first channels:

        C = [W_K,1 R_1ᵀ … W_K,n R_nᵀ] = B S Vᵀ   (W_Q,i = Q_i R_i)
        W_K = B S^½   W_Q,i = W_Q,i W_K,iᵀ B S^-½

    and likewise for W_V. Nothing moves if the heads of a group are equal up to gauge; else the forms
    of a group move by √Σ_{i>d_k} S_i², the least there is.

    Biases: those of queries go along, as one more row of the form; those of keys are left out, where
    the softmax is blind to them; those of values become one a group, or go into that of the output.

    Args:
        weights: the layer.
        num_kv_heads: number of key-value heads of the result.
        bounded: whether heads that differ may be merged.
        tolerance: how far a group may move, relative to its norm, and still count as equal.

    Returns:
        The grouped writing; its bound is the largest move of a head's form (its bias row included).

    Raises:
        RewriteRefusedError: heads differ, with the worst group, its move and its norm; numbers that do
            not divide; channels that cannot be mixed (rotary positions, QK-norm, a gate); a bias that
            can go nowhere.
    """
    _require_shared_out(weights, num_kv_heads)
    present = max(weights.num_key_heads, weights.num_value_heads)
    if num_kv_heads == present:
        return unchanged("merge_kv_heads", weights, f"there are {present} key-value heads")
    for side in SIDES:
        require_nothing_between("merge_kv_heads", side, weights.chain(side)[:-1])
    notes: list[str] = []
    plain = _with_one_map_a_side(in_working_precision(weights), notes)
    several = bool(notes)
    mixed = [form for form in FORMS if not _can_drop(plain.chain(_common_side(form))[0], num_kv_heads)]
    for form in mixed:
        if reason := why_channels_stay(weights.traits, form):
            name = NAMES[_common_side(form)]
            raise RewriteRefusedError("merge_kv_heads", f"{form}: the maps of {name} differ, and {reason}")
    if "qk" in mixed:
        plain = _without_key_bias(plain, notes)
    attempt = _merged(plain, num_kv_heads, mixed)
    if "ov" in mixed and _bias_is_lost(plain, attempt, tolerance):
        try:
            plain = fold_value_bias(plain).weights
        except RewriteRefusedError as error:
            if not bounded:
                reason = "the value biases of a group cannot be one"
                raise RewriteRefusedError("merge_kv_heads", f"ov: {reason}, and {error.reason}") from None
        else:
            notes.append("the value biases of a group cannot be one: they went into that of the output")
            attempt = _merged(plain, num_kv_heads, mixed)
    moves = {form: move(plain, attempt, form) for form in mixed}
    differing = _worst_group(plain, moves, num_kv_heads, tolerance)
    if differing and not bounded:
        raise RewriteRefusedError("merge_kv_heads", differing, "bounded=True merges them to the nearest")
    exact: Tier = "rounding-exact" if mixed or several else "bit-exact"
    return rewritten(
        "merge_kv_heads",
        "bounded" if differing else exact,
        weights,
        attempt.to(weights.dtype),
        checked=(
            f"{present} key-value heads can be shared out among {num_kv_heads}",
            *(CHANNELS_ARE_FREE[form] for form in mixed),
            *([] if differing else ["the heads of a group are equal up to gauge"]),
        ),
        choice=differing,
        notes=(*notes, *newly_apart(weights, attempt)),
        bound=max(float(one.whole.max()) for one in moves.values()) if differing else 0.0,
    )


def _taken(link: Link, copies: Tensor) -> Link:
    """Some of the copies, in some order; a fixed map of which not all is left in place is fixed no longer."""
    if copies.tolist() == list(range(link.copies)):
        return link
    copies = copies.to(link.weight.device)
    bias = None if link.bias is None else link.bias[copies]
    return replace(link, weight=link.weight[copies], bias=bias, learned=True)


def _require_heads_without_numbers(name: str, weights: AttentionWeights) -> None:
    if weights.traits.positions in ("alibi", "relative"):
        raise RewriteRefusedError(
            name,
            f"{weights.traits.positions} positions add a bias of each head's own, which these weights do not "
            "hold and which would stay in its place",
        )


def _notes_on_heads(weights: AttentionWeights) -> tuple[str, ...]:
    """What else might be each head's own."""
    traits = weights.traits
    found = [
        name for name, there in (("a sink", traits.sinks), ("a gain of the QK-norm", traits.qk_norm)) if there
    ]
    return tuple(
        f"{name} of each head's own, if there is one, lies outside and must follow" for name in found
    )


def _require_prunable(weights: AttentionWeights, heads: Sequence[int]) -> None:
    num_heads = weights.num_heads
    for place, head in enumerate(heads):
        require_whole_number("prune_heads", "a head", head)
        if not 0 <= head < num_heads:
            reason = f"there is no head {head}: there are {num_heads}, 0 to {num_heads - 1}"
            raise RewriteRefusedError("prune_heads", reason)
        if head in heads[:place]:
            raise RewriteRefusedError("prune_heads", f"head {head} is named twice")
    if len(heads) == num_heads:
        raise RewriteRefusedError("prune_heads", f"all {num_heads} heads are named, and one must be left")


def _done_by(weights: AttentionWeights, heads: list[int]) -> Move:
    """‖W_V W_O‖ and ‖b_V W_O‖ of some heads: exactly 0 where no channel is used on both sides."""
    weights = in_working_precision(weights)
    W_V, W_O, bias = weights.W_V[heads], weights.W_O[heads], weights.head_bias("v")
    read = W_O.ne(0).any(dim=-1)
    used = (W_V.ne(0).any(dim=-2) & read)[:, None, :]
    form = BilinearForm(W_V * used, W_O.mT * used).frobenius_norm()
    if bias is None:
        return Move(form, torch.zeros_like(form))
    return Move(form, (bias[heads][:, None, :] @ W_O)[:, 0].norm(dim=-1))


def _require_shared_out(weights: AttentionWeights, num_kv_heads: int) -> None:
    heads = weights.num_heads
    require_whole_number("merge_kv_heads", "num_kv_heads", num_kv_heads)
    if num_kv_heads < 1 or heads % num_kv_heads:
        reason = f"{num_kv_heads} key-value heads cannot serve {heads} heads: the number must divide {heads}"
        raise RewriteRefusedError("merge_kv_heads", reason)
    for side in SIDES:
        if not weights.chain(side):
            raise RewriteRefusedError(
                "merge_kv_heads",
                f"no map makes {NAMES[side]}: the form is one matrix a head",
                "factor it first",
            )
    for present in (weights.num_key_heads, weights.num_value_heads):
        if present % num_kv_heads and num_kv_heads % present:
            reason = f"the present {present} cannot be shared out among {num_kv_heads} key-value heads"
            raise RewriteRefusedError("merge_kv_heads", reason)
    most = max(weights.num_key_heads, weights.num_value_heads)
    if most < num_kv_heads:
        reason = f"there are {most} key-value heads, fewer than {num_kv_heads}"
        raise RewriteRefusedError("merge_kv_heads", reason, "repeat_kv_heads gives every head its own")


def _with_one_map_a_side(weights: AttentionWeights, notes: list[str]) -> AttentionWeights:
    """Queries and outputs with a map a head, keys and values with one a group; nothing shared."""
    q, k, v, o = (one_map(weights, side, notes) for side in SIDES)
    heads = weights.num_heads
    return replace(weights, q=(q.of_heads(heads),), k=(k,), v=(v,), o=(o.of_heads(heads),))


def _common_side(form: Form) -> Literal["k", "v"]:
    return "k" if form == "qk" else "v"


def _first_of_groups(link: Link, groups: int) -> Link:
    """The first copy of each group, or every copy for several groups if there are fewer."""
    if link.copies <= groups:
        return link.of_heads(groups)
    step = link.copies // groups
    return replace(
        link,
        weight=link.weight[::step].clone(),
        bias=None if link.bias is None else link.bias[::step].clone(),
    )


def _can_drop(link: Link, groups: int) -> bool:
    """Whether the copies of each group are the same numbers, biases included."""
    again = _first_of_groups(link, groups).of_heads(max(link.copies, groups))
    whole = link.of_heads(max(link.copies, groups))
    return torch.equal(again.weight, whole.weight) and (
        again.bias is None or whole.bias is None or torch.equal(again.bias, whole.bias)
    )


def _without_key_bias(plain: AttentionWeights, notes: list[str]) -> AttentionWeights:
    """Channels that are mixed carry no key bias: it must be one that the softmax is blind to, or zero."""
    bias = plain.k[0].bias
    if bias is None:
        return plain
    if bool(bias.any()):
        if reason := why_key_bias_counts(plain.traits):
            reason = f"qk: the key biases of a group cannot be one, and {reason}"
            raise RewriteRefusedError("merge_kv_heads", reason)
        notes.append("the key bias was left out: the softmax is blind to it")
    return replace(plain, k=(replace(plain.k[0], bias=None),))


def _merged(plain: AttentionWeights, groups: int, mixed: Sequence[Form]) -> AttentionWeights:
    """The nearest writing with that many key-value heads."""
    result = plain
    for form in FORMS:
        side = _common_side(form)
        if form not in mixed:
            result = with_chains(result, {side: (_first_of_groups(plain.chain(side)[0], groups),)})
        elif form == "qk":
            result = _merged_qk(result, groups)
        else:
            result = _merged_ov(result, groups)
    return result


def _merged_qk(plain: AttentionWeights, groups: int) -> AttentionWeights:
    """Rows of the own factors are those of all queries that read one of the present key heads."""
    (q,), (k,) = plain.q, plain.k
    members = k.copies // groups
    own = q.weight.reshape(groups, members, -1, q.d_out)
    common = k.weight.reshape(groups, members, *k.weight.shape[1:])
    basis = joint_basis(own, common, "own").of_width(k.d_out)
    bias = q.bias
    if bias is not None:
        bias = (bias.reshape(groups, members, -1, q.d_out) @ basis.own).reshape(bias.shape)
    return replace(plain, q=(Link((own @ basis.own).reshape(q.weight.shape), bias),), k=(Link(basis.shared),))


def _merged_ov(plain: AttentionWeights, groups: int) -> AttentionWeights:
    (v,), W_O = plain.v, plain.W_O
    members = v.copies // groups
    own = W_O.mT.reshape(groups, members, -1, v.d_out)
    common = v.weight.reshape(groups, members, *v.weight.shape[1:])
    basis = joint_basis(own, common, "common").of_width(v.d_out)
    new_O = (own @ basis.own).reshape(W_O.mT.shape).mT.contiguous()
    bias = v.bias
    if bias is not None:
        bias = (bias.reshape(groups, members, 1, -1) @ basis.common).sum(dim=1)[:, 0]
    return replace(plain, v=(Link(basis.shared, bias),), o=(Link(new_O),))


def _bias_is_lost(before: AttentionWeights, after: AttentionWeights, tolerance: float) -> bool:
    """Whether the value biases of some group act otherwise than they did."""
    lost = (bias_row(before, "ov") - bias_row(after, "ov")).norm(dim=-1)
    return bool((lost > tolerance * bias_row(before, "ov").norm(dim=-1).max()).any())


def _worst_group(plain: AttentionWeights, moves: dict[Form, Move], groups: int, tolerance: float) -> str:
    """The group that moves most relative to its norm, in words; "" if none moves more than the tolerance."""
    worst, said = tolerance, ""
    served = plain.num_heads // groups
    for form, moved in moves.items():
        norms = size(plain, form).whole.view(groups, served).norm(dim=-1)
        errors = moved.whole.view(groups, served).norm(dim=-1)
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
