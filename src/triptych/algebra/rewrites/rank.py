"""Fewer channels: the nearest forms of a rank, and all keys and values from one latent."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from triptych.algebra.rewrites.biases import fold_value_bias
from triptych.algebra.rewrites.channels import (
    NAMES,
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
    ONE_LATENT,
    require_finite,
    require_last_map,
    require_nothing_between,
    require_one_each,
    require_whole_number,
    unchanged,
)
from triptych.algebra.rewrites.record import Cut, RewriteRefusedError, Rewritten, rewritten
from triptych.algebra.rewrites.rewrite import Layer, LayerRewrite
from triptych.algebra.weights import SIDES, AttentionWeights, Link

Ranks = int | Sequence[int]  # of all groups of heads, or of each


@final
class ToLatent(LayerRewrite):
    """Make keys and values of all heads from one latent."""

    name = "to_latent"
    tier = "rounding-exact, bounded with a `rank`"
    refused = "rotary and disentangled positions"
    place = 9
    resizes = True

    rank: int | None = Field(None, ge=1, description="of the latent; as many as it takes by default")

    def apply(self, layer: Layer) -> Rewritten:
        return to_latent(layer.weights, rank=self.rank)


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


def to_latent(weights: AttentionWeights, *, rank: int | None = None) -> Rewritten:
    """Make keys and values of all heads from one latent: `W_K,i = W^D U_i^K`, `W_V,i = W^D U_i^V`.

    At full rank g (d_k + d_v), W^D is [W_K,1 … W_K,g | W_V,1 … W_V,g] and the U_i select. Below, W^D
    and the U_i are the nearest product of that rank, by SVD, the singular values shared out evenly.
    """
    _require_latent(weights)
    chains = (weights.k, weights.v)
    if rank is None and all(len(chain) == 2 for chain in chains) and weights.k[0] is weights.v[0]:
        return unchanged("to_latent", weights, f"keys and values have one latent, of {weights.k[0].d_out}")
    notes: list[str] = []
    working = in_working_precision(weights)
    q, k, v, o = (one_map(working, side, notes) for side in SIDES)
    tied = weights.tied("k", "v")
    if tied:
        notes.append("keys and values had one map: it stands once in the latent")
    if weights.tied("q", "k"):
        notes.append("queries got a map of their own")
    # The copies side by side, [d_model, full].
    beside = torch.cat([link.weight.transpose(0, 1).flatten(1) for link in ((k,) if tied else (k, v))], dim=1)
    d_model, full = beside.shape
    of_keys, of_values = k.copies * k.d_out, v.copies * v.d_out
    rank = min(d_model, full) if rank is None else rank
    require_whole_number("to_latent", "rank", rank)
    _require_latent_rank(rank, d_model, full)
    require_finite("to_latent", weights)
    W_D, U, needed = _product_of_rank(beside, rank)
    up_k, up_v = (
        Link(part.reshape(rank, link.copies, -1).transpose(0, 1).contiguous(), link.bias)
        for part, link in ((U[:, :of_keys], k), (U[:, full - of_values :], v))
    )
    heads, down = weights.num_heads, Link(W_D[None])
    result = replace(
        working,
        q=(q.of_heads(heads),),
        k=(down, up_k.of_heads(heads)),
        v=(down, up_v.of_heads(heads)),
        o=(o.of_heads(heads),),
    )
    exact = needed <= rank
    moves = () if exact else (move(working, result, "qk").whole, move(working, result, "ov").whole)
    return rewritten(
        "to_latent",
        "rounding-exact" if exact else "bounded",
        weights,
        result.to(weights.dtype),
        checked=ONE_LATENT.checked,
        choice=f"a latent of {rank}; keys and values side by side are {d_model} × {full}, of rank {needed}"
        if rank < full
        else f"a latent of {rank}: all keys and values side by side",
        notes=tuple(notes),
        bound=max((float(one.max()) for one in moves), default=0.0),
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


def _require_latent_rank(rank: int, d_model: int, full: int) -> None:
    if not (1 <= rank <= min(d_model, full) or rank == full):
        whole = f", or {full} as they are" if full > d_model else ""
        raise RewriteRefusedError(
            "to_latent",
            f"rank is {rank}: keys and values side by side are {d_model} × {full}, which takes 1 to "
            f"{min(d_model, full)}{whole}",
        )


def _require_latent(weights: AttentionWeights) -> None:
    ONE_LATENT.require("to_latent", weights)
    for side in ("k", "v"):
        if not weights.chain(side):
            raise RewriteRefusedError(
                "to_latent", f"no map makes {NAMES[side]}: they are the input itself", "factor it first"
            )
    for side in SIDES:
        require_nothing_between("to_latent", side, weights.chain(side)[:-1])


def _product_of_rank(
    whole: Float[Tensor, "d_model full"], rank: int
) -> tuple[Float[Tensor, "d_model rank"], Float[Tensor, "rank full"], int]:
    """Two factors of the nearest matrix of a rank, and the rank that it takes to be exact."""
    d_model, full = whole.shape
    if rank == full:
        return whole, torch.eye(full, dtype=whole.dtype, device=whole.device), full
    U, S, Vh = torch.linalg.svd(whole, full_matrices=False)
    needed = int(S.gt(S[0] * max(d_model, full) * torch.finfo(S.dtype).eps).sum())
    largest = U.gather(0, U.abs().argmax(dim=0, keepdim=True))
    root = torch.where(largest < 0, -1.0, 1.0).to(S.dtype) * S.sqrt()
    return U[:, :rank] * root[:, :rank], root[:, :rank].mT * Vh[:rank], needed
