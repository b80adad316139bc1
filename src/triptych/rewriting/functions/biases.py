"""Key biases, cancelled by the softmax, and value biases, absorbed by the output bias."""

from dataclasses import replace
from typing import Literal, final

import torch

from triptych.core.algebra.legality import (
    INPUT_SIDES,
    KEY_BIAS_BLIND,
    VALUE_BIAS_PASSES,
    named,
    require_nothing_between,
    separate,
    sharing_sides,
    unchanged,
    with_chains,
)
from triptych.core.algebra.rewritten import Rewritten, rewritten
from triptych.core.algebra.weights import AttentionWeights, Chain, Link, Side
from triptych.rewriting.functions.rewrite import (
    APART,
    LayerRewrite,
    LayerToRewrite,
    require_still_tied,
)


@final
class DropKeyBias(LayerRewrite):
    """Drop the key bias, which the softmax cancels."""

    name = "drop_key_bias"
    tier = "rounding-exact"
    requires = (KEY_BIAS_BLIND,)
    besides = APART
    place = 3
    why_here = "the biases go before channels and heads are mixed"

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return require_still_tied(layer, drop_key_bias(layer.weights))


@final
class FoldValueBias(LayerRewrite):
    """Move the value bias into the output bias."""

    name = "fold_value_bias"
    tier = "rounding-exact"
    requires = (VALUE_BIAS_PASSES,)
    besides = APART
    place = 3
    why_here = "the biases go before channels and heads are mixed"

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return require_still_tied(layer, fold_value_bias(layer.weights))


def drop_key_bias(weights: AttentionWeights) -> Rewritten:
    """Remove the key bias: it adds `q · b_K`, the same for every key, to a row of scores.

    Keys sharing maps with queries or values get separate maps first, unless the last maps of queries and
    values can absorb their lost biases.
    """
    if not _biased(weights.k):
        return unchanged("drop_key_bias", weights, "the keys have no bias")
    KEY_BIAS_BLIND.require("drop_key_bias", weights)
    _require_bias_reaches_end("drop_key_bias", "k", weights.k)
    result, notes = _without_bias(weights, "k")
    if result.q and result.q == result.v:
        # Layers cannot store a tie of queries and values alone.
        result = with_chains(result, {"v": separate(result.v)})
        notes = (*notes, "v was given a map of its own")
    return rewritten(
        "drop_key_bias",
        "rounding-exact",
        weights,
        result,
        checked=KEY_BIAS_BLIND.checked,
        notes=notes,
    )


def fold_value_bias(weights: AttentionWeights) -> Rewritten:
    """Move the value bias into the output bias: `b_O += Σ_i b_V,i W_i^O`.

    Attention weights of a row sum to 1, so the value bias reaches the output unweighted. The bias of a group
    counts once for every query head of the group. The function changes for a query without visible keys: its
    attended values are zeros before, and the bias is added afterwards.
    """
    if not _biased(weights.v):
        return unchanged("fold_value_bias", weights, "the values have no bias")
    VALUE_BIAS_PASSES.require("fold_value_bias", weights)
    _require_bias_reaches_end("fold_value_bias", "v", weights.v)
    require_nothing_between("fold_value_bias", "o", weights.o[:-1])
    value_bias = weights.head_bias("v")
    assert value_bias is not None
    passed_on = torch.einsum("hv,hvo->o", value_bias, weights.W_O)
    result, notes = _without_bias(weights, "v")
    # A layer without output bias gets an output bias.
    o_bias = passed_on if weights.o_bias is None else weights.o_bias + passed_on
    return rewritten(
        "fold_value_bias",
        "rounding-exact",
        weights,
        replace(result, o_bias=o_bias),
        checked=VALUE_BIAS_PASSES.checked,
        notes=notes,
    )


def _biased(chain: Chain) -> bool:
    return any(link.bias is not None for link in chain)


def _require_bias_reaches_end(name: str, side: Side, chain: Chain) -> None:
    """Refuse a norm after the first bias of a chain."""
    first = next(place for place, link in enumerate(chain) if link.bias is not None)
    require_nothing_between(name, side, chain[first:])


def _without_bias(
    weights: AttentionWeights, side: Literal["k", "v"]
) -> tuple[AttentionWeights, tuple[str, ...]]:
    """Remove the bias of one chain, preserving all other chains; return the weights and notes."""
    chain = weights.chain(side)
    bare = {
        id(link): replace(link, bias=None) for link in chain if link.bias is not None
    }
    losing = tuple(
        other
        for other in sharing_sides(weights, side)
        if any(id(link) in bare for link in weights.chain(other))
    )
    if not all(_can_take_up(weights, other, bare) for other in losing):
        own = tuple(replace(link, bias=None) for link in separate(chain))
        shared = named(sharing_sides(weights, side))
        return with_chains(weights, {side: own}), (
            f"{side} shared a map with {shared}: it has its own now",
        )
    # A chain sharing a map absorbs the bias: its total bias moves into its last map.
    chains: dict[Side, Chain] = {
        side: tuple(bare.get(id(link), link) for link in chain)
    }
    for other in losing:
        *before, last = weights.chain(other)
        last = replace(last, bias=weights.multiplied(other).bias)
        chains[other] = (*(bare.get(id(link), link) for link in before), last)
    notes = tuple(
        f"the bias of the map shared with {other} went into the last map of {other}"
        for other in losing
    )
    return with_chains(weights, chains), notes


def _can_take_up(weights: AttentionWeights, side: Side, bare: dict[int, Link]) -> bool:
    """Return True if the last map of a chain can absorb the biases removed from its earlier maps."""
    *before, last = weights.chain(side)
    return (
        id(last) not in bare
        and last.learned
        and last.copies == weights.multiplied(side).copies
        and side in weights.bias_slots
        and all(link.norm is None for link in before)
        and all(link.bias is None or id(link) in bare for link in before)
        and sum(last in weights.chain(other) for other in INPUT_SIDES) == 1
    )
