"""Permutation, sorting and repetition of heads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from pydantic import Field

from triptych.core.algebra.legality import (
    HEADS_ALIKE,
    require_nothing_between,
    unchanged,
)
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten, rewritten
from triptych.core.algebra.weights import AttentionWeights, Side
from triptych.rewriting.functions.channels import NAMES, one_map
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite


@final
class SortHeads(LayerRewrite):
    """Sort heads by the size of W_OV, groups with theirs."""

    name = "sort_heads"
    tier = "bit-exact"
    requires = (HEADS_ALIKE,)
    place = 8
    why_here = "copies of key-value heads come last"

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        weights = layer.weights
        groups = max(1, min(weights.num_key_heads, weights.num_value_heads))
        served = weights.num_heads // groups
        sizes = weights.ov.norm().view(groups, served)
        by_group = sizes.norm(dim=-1).argsort(descending=True, stable=True).tolist()
        inside = sizes.argsort(dim=-1, descending=True, stable=True).tolist()
        order = tuple(
            group * served + head for group in by_group for head in inside[group]
        )
        # Distances follow if they share the maps of queries and keys; the format refuses other layers.
        return permute_heads(weights, order).with_kept(order)


@final
class PermuteHeads(LayerRewrite):
    """Put heads in another order; key-value heads move with the queries that read them."""

    name = "permute_heads"
    tier = "bit-exact"
    requires = SortHeads.requires
    besides = "heads that share a map would be torn apart"
    place = 8
    why_here = SortHeads.why_here

    order: tuple[int, ...] = Field(
        description="head i of the result is head `order[i]`"
    )

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return permute_heads(layer.weights, self.order).with_kept(self.order)


@final
class RepeatKVHeads(LayerRewrite):
    """Repeat key-value heads."""

    name = "repeat_kv_heads"
    tier = "bit-exact"
    besides = "the number is no multiple of those there are"
    place = 9
    resizes = True

    num_kv_heads: int | None = Field(
        None,
        ge=1,
        description="number of key-value heads afterwards; by default one per query head",
    )

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return repeat_kv_heads(layer.weights, self.num_kv_heads)


def permute_heads(weights: AttentionWeights, order: Sequence[int]) -> Rewritten:
    """Permute the heads; key-value heads move with the query heads reading them."""
    heads = weights.num_heads
    if sorted(order) != list(range(heads)):
        raise RewriteRefusedError(
            "permute_heads",
            f"the order {list(order)} does not name each of the {heads} heads 0 to {heads - 1} once",
        )
    if list(order) == list(range(heads)):
        return unchanged("permute_heads", weights, "the heads are in that order")
    HEADS_ALIKE.require("permute_heads", weights)

    def left(copies: int) -> list[int]:
        # Heads sharing a map after the permutation must share one before it.
        served = heads // copies
        readers = torch.tensor(order).view(-1, served)
        read = readers // served
        torn = (read != read[:, :1]).nonzero()
        if len(torn):
            block, place = torn[0].tolist()
            raise RewriteRefusedError(
                "permute_heads",
                f"heads {readers[block, 0]} and {readers[block, place]} would come to share a map, but read "
                f"two, {read[block, 0]} and {read[block, place]} of {copies}",
                "move whole groups, or give every head its own key-value head first (repeat_kv_heads)",
            )
        found: list[int] = read[:, 0].tolist()
        return found

    return rewritten(
        "permute_heads",
        "bit-exact",
        weights,
        weights.select_copies(left, heads),
        checked=(
            f"the order names each of the {heads} heads once",
            "heads that read one map stay together",
            *HEADS_ALIKE.checked,
        ),
        choice=f"order {', '.join(map(str, order))}",
    )


def repeat_kv_heads(
    weights: AttentionWeights, num_kv_heads: int | None = None
) -> Rewritten:
    """Repeat key and value heads, by default to one per query head."""
    heads = weights.num_heads if num_kv_heads is None else num_kv_heads
    both: tuple[Side, Side] = ("k", "v")
    sides = [
        side
        for side in both
        if 0 < max((link.copies for link in weights.chain(side)), default=0) < heads
    ]
    there = [max(link.copies for link in weights.chain(side)) for side in sides]
    if weights.num_heads % heads or any(heads % copies for copies in there):
        raise RewriteRefusedError(
            "repeat_kv_heads",
            f"num_kv_heads {heads} is no multiple of {max(there, default=1)} that divides "
            f"{weights.num_heads} heads",
        )
    if not sides and num_kv_heads is not None and heads < weights.num_key_heads:
        raise RewriteRefusedError(
            "repeat_kv_heads",
            f"there are {weights.num_key_heads} key-value heads, more than {heads}",
            "merge_kv_heads leaves fewer",
        )
    if not sides:
        return unchanged(
            "repeat_kv_heads",
            weights,
            "every head has its own keys and values, as far as they have maps",
        )
    notes = [
        f"{weights.multiplied(side).copies} maps of {NAMES[side]} became {heads}"
        for side in sides
    ]
    result = weights
    multiplied = "k" in sides and len(weights.q) > 1
    if multiplied:
        require_nothing_between("repeat_kv_heads", "q", weights.q[:-1])
        result = replace(result, q=(one_map(weights, "q", notes),))
    # Only the last map of a chain is repeated; a latent stays shared.
    last = {id(weights.chain(side)[-1]) for side in sides}
    result = result.each_link(
        lambda link: link.repeat(heads) if id(link) in last else link
    )
    return rewritten(
        "repeat_kv_heads",
        "rounding-exact" if multiplied else "bit-exact",
        weights,
        result,
        notes=tuple(notes),
    )
