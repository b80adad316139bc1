"""Some heads of a layer as a layer of their own, and layers of some heads as one.

A layer is the sum of its heads, so whatever treats each group of heads by itself can be done a few groups
at a time, in as little memory.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.algebra.weights import SIDES, AttentionWeights, Chain, Link


def heads_of(weights: AttentionWeights, start: int, stop: int) -> AttentionWeights:
    """Heads `start` to `stop` as a layer; the output bias stays with head 0."""

    def taken(chain: Chain) -> Chain:
        return tuple(_copies(link, start, stop, weights.num_heads) for link in chain)

    return replace(
        weights,
        num_heads=stop - start,
        semantics=weights.semantics.of_heads(range(start, stop)),
        q=taken(weights.q),
        k=taken(weights.k),
        v=taken(weights.v),
        o=taken(weights.o),
        o_bias=weights.o_bias if start == 0 else None,
    )


def joined(parts: Sequence[AttentionWeights]) -> AttentionWeights:
    """The heads of all parts in one layer; output biases add up, narrower heads get channels of zeros."""
    first = parts[0]

    def together(chains: Sequence[Chain]) -> Chain:
        return tuple(joined_links([chain[place] for chain in chains]) for place in range(len(chains[0])))

    biases = [part.o_bias for part in parts if part.o_bias is not None]
    q, k, v, o = (together([part.chain(side) for part in parts]) for side in SIDES)
    return replace(
        first,
        num_heads=sum(part.num_heads for part in parts),
        semantics=first.semantics.joined([part.semantics for part in parts[1:]]),
        q=q,
        k=k,
        v=v,
        o=o,
        o_bias=_total(biases) if biases else None,
    )


def joined_links(links: Sequence[Link], order: Sequence[int] | None = None) -> Link:
    """The copies of all maps in one; narrower ones get channels of zeros."""
    if len(links) == 1 and order is None:
        return links[0]
    rows, columns = (max(link.weight.shape[place] for link in links) for place in (1, 2))
    copies = [copy for link in links for copy in torch.split(_padded(link.weight, columns, rows), 1)]
    biases: list[Tensor] = []
    if any(link.bias is not None for link in links):
        found = [link.weight.new_zeros(link.copies, 1) if link.bias is None else link.bias for link in links]
        biases = [bias for each in found for bias in torch.split(_padded(each, columns), 1)]
    if order is not None:
        copies, biases = [copies[i] for i in order], [biases[i] for i in order if biases]
    return replace(
        links[0],
        weight=_stacked(copies),
        bias=_stacked(biases) if biases else None,
        learned=any(link.learned for link in links),
    )


def separable(weights: AttentionWeights) -> bool:
    """Whether `heads_of` can tell the heads of a layer apart."""
    chains = [weights.chain(side) for side in SIDES]
    if any(len(chain) != 1 for chain in chains) or len({id(chain[0]) for chain in chains}) < len(chains):
        return False
    if any(weights.chain(side)[0].copies != weights.num_heads for side in ("q", "o")):
        return False
    if not all(link.learned for link in weights.links()):
        return False
    norms = (weights.semantics.q_norm, weights.semantics.k_norm)
    return not any(norm is not None and (norm.over == "all heads" or norm.of_each_head) for norm in norms)


def groups_of(weights: AttentionWeights, most_numbers: int) -> list[tuple[int, int]]:
    """Runs of heads, whole groups each, whose maps are no more than so many numbers (or one group)."""
    copies = max(1, min(weights.num_key_heads, weights.num_value_heads))
    group = weights.num_heads // copies
    numbers = sum(link.weight.numel() for link in weights.links()) // copies
    step = max(1, most_numbers // max(1, numbers)) * group
    return [(at, min(at + step, weights.num_heads)) for at in range(0, weights.num_heads, step)]


def _copies(link: Link, start: int, stop: int, heads: int) -> Link:
    if link.copies == 1:
        return link
    served = heads // link.copies
    first, last = start // served, stop // served
    bias = None if link.bias is None else link.bias[first:last]
    return replace(link, weight=link.weight[first:last], bias=bias)


def _padded(tensor: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """With zeros up to so many columns, and rows."""
    more_columns = columns - tensor.shape[-1]
    more_rows = 0 if rows is None else rows - tensor.shape[-2]
    if not more_columns and not more_rows:
        return tensor
    if rows is None:
        return torch.nn.functional.pad(tensor, (0, more_columns))
    return torch.nn.functional.pad(tensor.mT, (0, more_rows, 0, more_columns)).mT


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """All copies one after the other, in memory as the first has them: in rows or in columns."""
    if weights[0].is_meta:  # torch would load its compiler to do this with shapes alone
        return weights[0].new_empty(len(weights), *weights[0].shape[1:])
    if weights[0].ndim == 3 and weights[0].mT.is_contiguous():
        return torch.cat([weight.mT for weight in weights]).mT
    return torch.cat(list(weights))


def _total(biases: Sequence[Tensor]) -> Tensor:
    return biases[0] if biases[0].is_meta else sum(biases[1:], start=biases[0])  # as in `_stacked`
