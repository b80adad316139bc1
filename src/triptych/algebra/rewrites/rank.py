"""Fewer channels: the nearest forms of a rank."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from triptych.algebra.rewrites.biases import fold_value_bias
from triptych.algebra.rewrites.channels import (
    SIDES_OF,
    Form,
    bias_row,
    in_working_precision,
    joint_basis,
    move,
    newly_apart,
    one_map,
    size,
    times,
    with_learned_maps,
)
from triptych.algebra.rewrites.legality import (
    CHANNELS_FREE,
    KEY_BIAS_BLIND,
    require_last_map,
    require_nothing_between,
    require_one_each,
)
from triptych.algebra.rewrites.record import Cut, RewriteRefusedError, Rewritten, rewritten
from triptych.algebra.weights import AttentionWeights

Ranks = int | Sequence[int]  # of all groups of heads, or of each


def truncate(
    weights: AttentionWeights, *, qk_rank: Ranks | None = None, ov_rank: Ranks | None = None
) -> Rewritten:
    """The nearest forms of a lower rank in Frobenius norm, head by head.

    A ≈ (U_r S_r^½)(S_r^½ V_rᵀ), an error of √(Σ_{i>r} σ_i²). Heads that read one key (value) head keep
    one: its channels are the first r right singular vectors of [W_QK,1; …; W_QK,n], the nearest for all
    of them together. A form that is one matrix becomes a product.

    Chains of several maps stay so where they can: the last map changes. The query bias goes along, in
    the channels that are left; what they cannot carry of the value bias goes into that of the output.

    Source: Eckart & Young 1936, doi 10.1007/BF02288367.
    """
    ranks = require_ranks("truncate", weights, qk_rank, ov_rank)
    for form in ranks:
        _require_blind_to_key_bias(weights, form)
    notes: list[str] = []
    start = without_fixed_widths(
        "truncate", with_learned_maps(in_working_precision(weights), notes), ranks, notes
    )
    rounding = 100 * weights.d_model * torch.finfo(start.dtype).eps
    result, needed = start, dict[Form, list[int]]()
    if "ov" in ranks:
        start, result, needed["ov"] = _truncate_ov(start, ranks["ov"], rounding, notes)
    if "qk" in ranks:
        result, needed["qk"] = _truncate_qk(result, ranks["qk"], notes)
    moves = {form: move(start, result, form) for form in ranks}
    exact = all(
        all(had <= rank for had, rank in zip(needed[form], given, strict=True))
        and float(moves[form].bias.max()) <= rounding * float(bias_row(start, form).norm(dim=-1).max())
        for form, given in ranks.items()
    )
    cuts = [
        Cut(
            f"W_{form.upper()}: {{ranks}} of {{most}}, ‖Δ‖ at most {{worst:.6g}}",
            tuple(given),
            max(needed[form]),
            float(moves[form].form.max()),
            Cut.shares(moves[form].form.square(), size(start, form).form.square()),
        )
        for form, given in ranks.items()
    ]
    return rewritten(
        "truncate",
        "rounding-exact" if exact else "bounded",
        weights,
        result.to(weights.dtype),
        checked=tuple(said for form in ranks for said in CHANNELS_FREE[form].checked),
        choice=cuts,
        notes=(*notes, *newly_apart(weights, result)),
        bound=0.0 if exact else max(float(one.whole.max()) for one in moves.values()),
    )


def require_ranks(
    name: str, weights: AttentionWeights, qk_rank: Ranks | None, ov_rank: Ranks | None
) -> dict[Form, list[int]]:
    """The rank of every group of heads, for the forms that are to have a lower one."""
    asked: dict[Form, Ranks | None] = {"qk": qk_rank, "ov": ov_rank}
    ranks = {
        form: _require_truncatable(name, weights, form, given)
        for form, given in asked.items()
        if given is not None
    }
    if not ranks:
        raise RewriteRefusedError(name, "neither qk_rank nor ov_rank is given", "give one of them")
    return ranks


def num_groups(weights: AttentionWeights, form: Form) -> int:
    """How many bases of channels a form has: one for each key (value) head."""
    if form == "ov":
        return weights.num_value_heads
    # The input itself as keys: each head then gets its own channels of it.
    return weights.num_key_heads if weights.k else weights.num_heads


def without_fixed_widths(
    name: str, weights: AttentionWeights, forms: Collection[Form], notes: list[str]
) -> AttentionWeights:
    """Several output maps as one where a layer could not have them any more."""
    if len(weights.o) < 2:
        return weights
    fixed = any(not link.learned for link in weights.o)
    if "ov" not in forms and not (fixed and "qk" in forms):
        return weights
    require_nothing_between(name, "o", weights.o[:-1])
    return replace(weights, o=(one_map(weights, "o", notes),))


def _require_truncatable(name: str, weights: AttentionWeights, form: Form, given: Ranks) -> list[int]:
    one, groups = weights.chain("q" if form == "qk" else "v"), num_groups(weights, form)
    width = one[-1].d_out if one else weights.d_model
    side = "key" if form == "qk" else "value"
    why = f"a form of width {width} takes"
    ranks = require_one_each(name, f"{form}_rank", given, groups, side, width, why)
    CHANNELS_FREE[form].require(name, weights, f"leave {form}_rank out", f"{form}: ")
    for side in SIDES_OF[form]:
        require_last_map(name, side, weights.chain(side))
    return ranks


def _require_blind_to_key_bias(weights: AttentionWeights, form: Form) -> None:
    bias = weights.head_bias("k") if form == "qk" else None
    if bias is not None and bool(bias.any()):
        about = "qk: fewer channels cannot carry the key bias, and "
        KEY_BIAS_BLIND.require("truncate", weights, about=about)


def _truncate_qk(
    weights: AttentionWeights, ranks: list[int], notes: list[str]
) -> tuple[AttentionWeights, list[int]]:
    """W_QK at those ranks, and the ranks that it had."""
    q, k = (weights.behind_norms().multiplied(side) for side in ("q", "k"))
    if not weights.k:
        k = k.of_heads(weights.num_heads)  # the input itself, in which each head now has its own channels
    own = q.of_heads(weights.num_heads).weight.reshape(k.copies, 1, -1, q.d_out)
    basis = joint_basis(own, k.weight[:, None], "own")
    cut = basis.of_widths(ranks)
    new_q, new_k = times(weights, "q", cut.own[:, 0], notes), times(weights, "k", cut.common[:, 0], notes)
    return replace(weights, q=new_q, k=new_k), basis.rank.tolist()


def _truncate_ov(
    weights: AttentionWeights, ranks: list[int], rounding: float, notes: list[str]
) -> tuple[AttentionWeights, AttentionWeights, list[int]]:
    """W_OV at those ranks: what it was made from, the result, and the ranks that it had."""
    v = weights.behind_norms().multiplied("v")
    basis = joint_basis(weights.W_O.mT.reshape(v.copies, 1, -1, v.d_out), v.weight[:, None], "common")
    cut = basis.of_widths(ranks)

    def cut_down(start: AttentionWeights, notes: list[str]) -> AttentionWeights:
        new_v, new_o = times(start, "v", cut.common[:, 0], notes), times(start, "o", cut.own[:, 0], notes)
        return replace(start, v=new_v, o=new_o)

    attempt = cut_down(weights, [])
    row = bias_row(weights, "ov")
    lost = (row - bias_row(attempt, "ov")).norm(dim=-1)
    if float(lost.max()) > rounding * float(row.norm(dim=-1).max()):
        try:
            weights = fold_value_bias(weights).weights
            notes.append("the value bias does not fit the channels left: it went into that of the output")
        except RewriteRefusedError as error:
            notes.append(f"the value bias lost what does not fit the channels left: {error.reason}")
    return weights, cut_down(weights, notes), basis.rank.tolist()
