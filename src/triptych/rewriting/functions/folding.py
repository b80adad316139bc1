"""Folding of products of maps, factoring of forms, and copying of shared maps."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal, NamedTuple, final, get_args

import torch
from pydantic import Field

from triptych.core.algebra.cost import maps_flops, writing_cost
from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.legality import (
    INPUT_SIDES,
    KEY_BIAS_BLIND,
    SCORES_ARE_THE_FORM,
    named,
    require_nothing_between,
    require_whole_number,
    separate,
    sharing_sides,
    unchanged,
    with_chains,
)
from triptych.core.algebra.rewritten import (
    RewriteRefusedError,
    Rewritten,
    Tier,
    rewritten,
)
from triptych.core.algebra.weights import SIDES, AttentionWeights, Chain, Link, Side
from triptych.rewriting.functions.rewrite import BETWEEN, LayerRewrite, LayerToRewrite

FoldedSide = Literal["q", "k", "v", "o", "qk"]
Keep = Literal["cheaper", "folded", "product"]
FoldingCost = Literal["parameters", "flops", "bytes"]
_FORM_FOLDED = replace(SCORES_ARE_THE_FORM, of="side qk")


@final
class Fold(LayerRewrite):
    """Multiply maps in a row, the fourth matrix among them, into one."""

    name = "fold"
    tier = "rounding-exact"
    requires = (_FORM_FOLDED,)
    besides = BETWEEN
    place = 0
    why_here = "products of maps are folded while they are products"
    resizes = True

    sides: tuple[FoldedSide, ...] = Field(
        SIDES, description="which sides; qk makes W_Q W_Kᵀ one matrix"
    )
    keep: Keep = Field(
        "cheaper",
        description="cheaper: fold where it costs less; folded: fold everything",
    )
    by: FoldingCost = Field(
        "parameters", description="the cost that decides: parameters, flops or bytes"
    )
    tokens: int = Field(
        1, ge=1, description="length of the sequence, for flops and bytes"
    )

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return fold(
            layer.weights,
            sides=self.sides,
            keep=self.keep,
            by=self.by,
            tokens=self.tokens,
        )


@final
class Expand(LayerRewrite):
    """Give every user of a shared map its own copy."""

    name = "expand"
    tier = "bit-exact"
    besides = BETWEEN
    place = 1
    why_here = "maps that are shared cannot change for one side only"
    resizes = True

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return expand(layer.weights)


@final
class Factor(LayerRewrite):
    """Factor a W_QK that is one matrix into W_Q and W_K."""

    name = "factor"
    tier = "rounding-exact, bounded if `bounded`"
    requires = (SCORES_ARE_THE_FORM,)
    besides = "the keys have a map already"
    place = 1
    why_here = "other rewrites of W_QK need both of its maps"
    resizes = True

    d_k: int | None = Field(
        None, ge=1, description="width of queries and keys; the largest rank by default"
    )
    bounded: bool = Field(False, description="allow a `d_k` below the rank")

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return factor(layer.weights, d_k=self.d_k, bounded=self.bounded)


class _Plan(NamedTuple):
    """Chains decided together, and their products."""

    name: str
    sides: tuple[Side, ...]
    chains: dict[Side, Chain]
    checked: tuple[str, ...]
    notes: tuple[str, ...] = ()


class _Price(NamedTuple):
    by: FoldingCost
    tokens: int
    number_bytes: int

    def total(self, weights: AttentionWeights) -> int:
        cost = writing_cost(weights)
        match self.by:
            case "parameters":
                return cost.parameters
            case "flops":
                return self.tokens * cost.token_flops + self.tokens**2 * cost.pair_flops
            case "bytes":
                return (
                    cost.parameters + self.tokens * cost.cached_numbers
                ) * self.number_bytes

    def part(self, weights: AttentionWeights, plan: _Plan) -> int:
        """Compute the cost of the plan's chains alone."""
        chains = [weights.chain(side) for side in plan.sides]
        # Maps shared by chains count once.
        links = {id(link): link for link in itertools.chain.from_iterable(chains)}
        parameters = sum(link.num_parameters for link in links.values())
        cost = writing_cost(weights)
        match self.by:
            case "parameters":
                return parameters
            case "flops":
                flops = maps_flops(
                    chains, weights.num_heads if plan.sides == ("o",) else 1
                )
                return self.tokens * flops + (
                    self.tokens**2 * cost.pair_flops if plan.name == "qk" else 0
                )
            case "bytes":
                cached = cost.cached_numbers if {"k", "v"} & set(plan.sides) else 0
                return (parameters + self.tokens * cached) * self.number_bytes

    @property
    def unit(self) -> str:
        """Unit of the cost, in words."""
        match self.by:
            case "parameters":
                return "parameters"
            case "flops":
                return f"FLOPs for {self.tokens:,} tokens"
            case "bytes":
                return f"bytes of maps and of a cache of {self.tokens:,} tokens"


def fold(
    weights: AttentionWeights,
    *,
    sides: Sequence[FoldedSide] = SIDES,
    keep: Keep = "cheaper",
    by: FoldingCost = "parameters",
    tokens: int = 1,
    number_bytes: int | None = None,
) -> Rewritten:
    """Multiply the maps of a chain into one map per head: `x W₁ W₂ + (b₁ W₂ + b₂)`.

    For "o", the 4th matrix with its 1/√d_k goes into W^O. "qk" multiplies the form itself: one matrix
    `W_QK = W_Q W_Kᵀ` per head, compared with the input instead of keys; the query bias becomes `b_Q W_Kᵀ`,
    and the key bias, cancelled by the softmax, is dropped.

    A product is not always cheaper than its factors: W₁ W₂ of inner width r has more parameters than both
    factors where r < d_in d_out / (d_in + d_out), and W_QK where d_k < d_model / 2. The record states the
    choice for each chain, with both counts. Chains sharing a map are decided together.

    `keep` selects a parameterisation regardless of cost, or the cheaper by `by`: the parameters; the FLOPs of
    self-attention over `tokens` tokens, token pairs included; or the bytes of the parameters (`number_bytes`
    each, by default the size of their dtype) and of a cache of `tokens` tokens.
    """
    # A string is also a sequence: "qk" would be read as q and k.
    named_sides = [
        ("sides", side, get_args(FoldedSide))
        for side in ([sides] if isinstance(sides, str) else sides)
    ]
    for what, value, known in (
        *named_sides,
        ("keep", keep, get_args(Keep)),
        ("by", by, get_args(FoldingCost)),
    ):
        if value not in known or (what == "sides" and isinstance(sides, str)):
            raise ValueError(f"{what} is {value!r}: choose from {', '.join(known)}")
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}: it must be at least 1")
    price = _Price(by, tokens, number_bytes or weights.dtype.itemsize)
    result = weights
    choices = list[str]()
    checked = list[str]()
    notes = list[str]()
    for plans in (_plans_for_the_form, _plans_for_chains):
        for plan in plans(result, sides):
            folded = with_chains(result, plan.chains)
            # The cost of all other maps is the same before and after.
            own = price.part(folded, plan)
            product = own + price.total(result) - price.total(folded)
            checked += plan.checked
            if keep == "folded" or (keep == "cheaper" and own < product):
                result = folded
                notes += plan.notes
                choices.append(
                    f"{plan.name}: folded, {own:,} {price.unit} instead of {product:,}"
                )
            else:
                choices.append(
                    f"{plan.name}: product kept, {product:,} {price.unit} instead of {own:,}"
                )
    if not choices:
        return unchanged(
            "fold",
            weights,
            "nothing to fold: every side named is one map already, or a fixed one",
        )
    return rewritten(
        "fold",
        "bit-exact" if result is weights else "rounding-exact",
        weights,
        result,
        checked=tuple(checked),
        choice="; ".join(choices),
        notes=tuple(notes),
    )


def _plans_for_the_form(
    weights: AttentionWeights, sides: Sequence[FoldedSide]
) -> list[_Plan]:
    """Plan W_Q W_Kᵀ as one matrix per head; empty if it already is, or if all of its maps are fixed."""
    one_matrix = not weights.k and len(weights.q) <= 1
    if (
        "qk" not in sides
        or one_matrix
        or not any(link.learned for link in (*weights.q, *weights.k))
    ):
        return []
    advice = "leave qk out of the sides"
    _FORM_FOLDED.require("fold", weights, advice)
    for side in ("q", "k"):
        require_nothing_between("fold", side, weights.chain(side), advice)
    checked = [*_FORM_FOLDED.checked]
    notes = []
    if any(link.bias is not None for link in weights.k):
        KEY_BIAS_BLIND.require(
            "fold", weights, advice, "the form has no place for the key bias, and "
        )
        checked.append("the softmax is blind to the key bias")
        notes.append("the key bias was dropped")
    # The query bias is one more row of the form: b_Q W_Kᵀ.
    W_K = weights.W_K
    bias = weights.head_bias("q")
    link = Link(
        weights.W_Q @ W_K.mT,
        None if bias is None else (bias[:, None, :] @ W_K.mT)[:, 0],
    )
    return [
        _Plan("qk", ("q", "k"), {"q": (link,), "k": ()}, tuple(checked), tuple(notes))
    ]


def _plans_for_chains(
    weights: AttentionWeights, sides: Sequence[FoldedSide]
) -> list[_Plan]:
    """Plan each chain of several maps as one map, with one plan for chains sharing a map."""
    plans: list[_Plan] = []
    planned: set[Side] = set()
    for side in SIDES:
        if side not in sides or side in planned:
            continue
        together = _sharing(weights, side)
        planned.update(together)
        chains: dict[Side, Chain] = {}
        of_chain: dict[Chain, Chain] = {}
        for member in together:
            chain = weights.chain(member)
            if len(chain) < 2 or not any(link.learned for link in chain):
                continue
            require_nothing_between(
                "fold", member, chain[:-1], f"leave {member} out of the sides"
            )
            # Tied chains get the same product and stay tied.
            of_chain.setdefault(chain, (reduce(Link.then, chain),))
            chains[member] = of_chain[chain]
        if not chains:
            continue
        asked = tuple(member for member in together if member in sides)
        joined = tuple(member for member in together if member not in sides)
        notes = (
            (f"{named(joined)} decided together with {named(asked)}: they share a map",)
            if joined
            else ()
        )
        checked = (f"nothing is between the maps of {named(tuple(chains))}",)
        plans.append(_Plan(named(together), together, chains, checked, notes))
    return plans


def _sharing(weights: AttentionWeights, side: Side) -> tuple[Side, ...]:
    """Return a chain and all chains sharing maps with it, directly or transitively."""
    found = {side}
    while (
        more := {
            *itertools.chain.from_iterable(sharing_sides(weights, one) for one in found)
        }
        - found
    ):
        found |= more
    return tuple(one for one in SIDES if one in found)


def factor(
    weights: AttentionWeights,
    *,
    d_k: int | None = None,
    tolerance: float | None = None,
    bounded: bool = False,
) -> Rewritten:
    """Factor a form stored as one matrix by SVD: W_QK = W_Q W_Kᵀ.

    The query bias is included: `[W; b] = [W_Q; b_Q] W_Kᵀ`, and d_k must be at least the rank of this matrix.
    W_Q and W_K have the same singular values √σ, in descending order. The scale of the scores is unchanged.
    """
    _require_one_matrix(weights)
    whole = weights.multiplied("q")
    rows = (
        whole.weight
        if whole.bias is None
        else torch.cat((whole.weight, whole.bias[:, None, :]), dim=1)
    )
    # The form as a product with the identity.
    eye = torch.eye(whole.d_out, dtype=rows.dtype, device=rows.device).expand(
        whole.copies, -1, -1
    )
    form = BilinearForm(rows, eye)
    S = form.singular_values()
    ranks = form.rank(tolerance)
    exact_ranks = form.rank()
    if d_k is None:
        d_k = max(1, int(ranks.max()))
    require_whole_number("factor", "d_k", d_k)
    if not 1 <= d_k <= form.max_rank:
        raise RewriteRefusedError(
            "factor",
            f"d_k is {d_k}: a form of {whole.d_in} × {whole.d_out} takes 1 to {form.max_rank}",
        )
    if int(ranks.max()) > d_k and not bounded:
        head = int(ranks.argmax()) * (weights.num_heads // whole.copies)
        raise RewriteRefusedError(
            "factor",
            f"the form of head {head} has rank {int(ranks.max())}, more than d_k = {d_k}",
            f"give d_k = {int(ranks.max())}, or allow the nearest form of rank {d_k} (bounded)",
        )
    near = form.truncate(d_k).to(weights.dtype)
    W_Q = near.left[:, : whole.d_in]
    b_Q = None if whole.bias is None else near.left[:, whole.d_in]
    result = replace(weights, q=(Link(W_Q, b_Q),), k=(Link(near.right),))
    # Exactness is judged at the default tolerance, not at the caller's.
    exact = int(exact_ranks.max()) <= d_k
    return rewritten(
        "factor",
        "rounding-exact" if exact else "bounded",
        weights,
        result,
        checked=(
            *SCORES_ARE_THE_FORM.checked,
            f"ranks of the heads: {', '.join(str(int(rank)) for rank in ranks)}",
        ),
        choice=f"d_k = {d_k}",
        bound=0.0 if exact else float(S[:, d_k:].square().sum(dim=-1).sqrt().max()),
    )


def _require_one_matrix(weights: AttentionWeights) -> None:
    if weights.k:
        advice = "truncate makes d_k smaller"
        raise RewriteRefusedError(
            "factor",
            "the keys have a map of their own: the form is a product already",
            advice,
        )
    if not weights.q:
        raise RewriteRefusedError(
            "factor", "neither queries nor keys have a map: the form is the identity"
        )
    SCORES_ARE_THE_FORM.require("factor", weights)
    require_nothing_between("factor", "q", weights.q)


def expand(weights: AttentionWeights) -> Rewritten:
    """Give queries, keys and values of every head separate maps.

    Tied chains become separate maps, and fixed slices learned maps, with identical values. Where chains share
    only their first map (latent), or heads weight the channels of one map (collaborative), their product is
    used: layers cannot store a copy of such a map per reader.
    """
    mixing = any(link.diagonal for link in (*weights.q, *weights.k))
    chains: dict[Side, Chain] = {}
    notes = list[str]()
    tier: Tier = "bit-exact"
    for side in INPUT_SIDES:
        chain = weights.chain(side)
        sharing = sharing_sides(weights, side)
        if any(link.diagonal for link in chain) or any(
            weights.chain(other) != chain for other in sharing
        ):
            require_nothing_between("expand", side, chain[:-1])
            chains[side] = separate((weights.multiplied(side),))
            tier = "rounding-exact"
            notes.append(f"the maps of {side} were multiplied into one")
        elif sharing or not all(link.learned for link in chain):
            chains[side] = tuple(
                replace(link, learned=True) for link in separate(chain)
            )
            notes.append(f"{side} has a map of its own now")
        # Collaborative heads shared one map; each head now gets a copy.
        if mixing and side != "v" and chain:
            chains[side] = tuple(
                link.repeat(weights.num_heads) for link in chains.get(side, chain)
            )
    if not chains:
        return unchanged(
            "expand",
            weights,
            "nothing is tied: queries, keys and values have maps of their own",
        )
    return rewritten(
        "expand", tier, weights, with_chains(weights, chains), notes=tuple(notes)
    )
