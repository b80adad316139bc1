"""Explanation of a head's attention on a text by its forms.

    score_ij = scale · [(x_i W_Q)(y_j W_K)ᵀ + bias terms + effect of rotary distance] + position bias

A constant added to a row of scores does not change the softmax, so parts are compared after subtracting each
row's mean over the query's visible keys.
"""

import math
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from triptych.core.algebra.function import channels, probabilities
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention import (
    BEFORE_ROTATION,
    LOCATE,
    compare,
    for_heads,
    steps_on,
)
from triptych.rewriting.functions import truncate
from triptych.running.measuring import (
    HeadFigures,
    Place,
    Told,
    UnitSums,
    Windows,
    read_windows,
)
from triptych.running.opening import LayerCall, Reader

PARTS = {
    "content": "W_QK alone: queries and keys without their biases, before positions turn them",
    "biases": "the biases of queries and keys",
    "distance": "what rotation by position (or a temperature) changes",
    "position_bias": "numbers added by position: ALiBi, T5's, DeBERTa's",
}


@final
@dataclass(frozen=True, eq=False)
class ScoreParts:
    """The scaled scores of one sequence as a sum of parts, before a soft cap and before the mask."""

    total: Float[Tensor, "heads queries keys"]
    # parts by name of `PARTS`, as present in the layer; their sum is the total
    parts: dict[str, Float[Tensor, "heads queries keys"]]


@torch.no_grad()
def score_parts(call: LayerCall) -> ScoreParts:
    """Decompose the scores of a layer into parts, in float64.

    Where queries and keys are normalised or clipped after their maps, the biases count as content.
    """
    compared = call.queries_and_keys()
    weights, x, memory = in_float64(call)
    semantics = weights.semantics
    turned_k = for_heads(compared.k.double(), weights.num_heads)
    whole = compare(compared.q.double(), turned_k, semantics)
    q, k, _ = channels(weights, x, memory)
    before = compare(q, for_heads(k, weights.num_heads), semantics)
    # Norms, clips and special scores mix biases and content.
    followed = {*steps_on("q", semantics), *steps_on("k", semantics)}
    mixed = not followed.isdisjoint(BEFORE_ROTATION) or semantics.scores is not None
    content = before
    if not mixed and (
        weights.head_bias("q") is not None or weights.head_bias("k") is not None
    ):
        bare = weights.each_link(lambda link: replace(link, bias=None), ("q", "k"))
        plain = channels(bare, x, memory)
        content = compare(plain.q, for_heads(plain.k, weights.num_heads), semantics)
    found = {"content": content[0]}
    if content is not before:
        found["biases"] = (before - content)[0]
    if any(step.by_position for step in followed):
        found["distance"] = (whole - before)[0]
    at = compared.query_positions, compared.key_positions
    _, added = LOCATE.run(compared.q.double(), turned_k, semantics, *at)
    if added is not None:
        found["position_bias"] = added.double().expand_as(whole)[0]
        whole = whole + added
    return ScoreParts(whole[0], found)


def in_float64(call: LayerCall) -> tuple[AttentionWeights, Tensor, Tensor | None]:
    """Return a layer's weights, and the inputs of queries and keys."""
    weights = call.layer.weights(call.site.kind).to(torch.float64)
    return (
        weights,
        call.x.double(),
        None if call.memory is None else call.memory.double(),
    )


def centred_rows(
    scores: Float[Tensor, "heads queries keys"], visible: Bool[Tensor, "queries keys"]
) -> Float[Tensor, "heads queries keys"]:
    """Subtract from scores the mean over each query's visible keys; 0 for queries without visible keys."""
    mean = (scores * visible).sum(dim=-1, keepdim=True) / visible.sum(
        dim=-1, keepdim=True
    ).clamp(min=1)
    return (scores - mean) * visible


def divergence(
    p: Float[Tensor, "heads queries keys"], q: Float[Tensor, "heads queries keys"]
) -> Float[Tensor, "heads queries"]:
    """Compute KL(p ‖ q) of every row in nats. Infinite if q is 0 at a key of p."""
    lost: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, q)
    return lost.sum(dim=-1).clamp(min=0)


def looks_by(
    scores: Float[Tensor, "heads queries keys"], visible: Bool[Tensor, "queries keys"]
) -> Float[Tensor, "heads queries keys"]:
    """Compute attention weights from scores over each query's visible keys."""
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)


def of_rank(weights: AttentionWeights, rank: int, longest: int) -> AttentionWeights:
    """Truncate W_QK of every head to a rank, leaving everything else unchanged.

    Heads sharing a key head share the remaining key channels. W_Q and W_K of rotary heads are truncated
    before the rotation; see `truncate`.
    """
    if rank >= weights.multiplied("q").d_out:
        return weights
    return truncate(weights, qk_rank=rank, rotary="maps", longest=longest).weights


def tried_ranks(weights: AttentionWeights) -> tuple[int, ...]:
    """Return the ranks for truncations of W_QK: powers of two below its width, or () if it cannot be cut."""
    width = weights.multiplied("q").d_out
    ranks = tuple(1 << i for i in range(width.bit_length()) if 1 << i < width)
    try:
        of_rank(weights, 1, 2)
    except RewriteRefusedError:
        return ()
    return ranks


def pattern_of(
    weights: AttentionWeights, call: LayerCall
) -> Float[Tensor, "heads queries keys"]:
    """Compute the attention weights of changed weights on the layer's inputs, batch size 1."""
    _, x, memory = in_float64(call)
    q, k, _ = channels(weights, x, memory)
    return probabilities(weights, q, k, call.mask)[0]


@torch.no_grad()
def explain_call(
    call: LayerCall,
    visible: Bool[Tensor, "queries keys"],
    cut: dict[int, AttentionWeights],
) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Compare a layer's attention on one sequence with the attention of parts of its scores.

    Returns the sum of squares of the centred scores `[heads]`, the number of queries with at least two
    visible keys, and sums over these queries by name, all `[heads]`: `content_share` and likewise for other
    parts, the inner product of the centred part with the centred scores, which add up to their squares;
    `even_nats`, `content_nats` and `rank_4_nats`, the divergence of the true weights from uniform attention,
    from W_QK alone, and from W_QK truncated to rank 4 with everything else unchanged; `content_hits` and
    `rank_4_hits`, numbers of queries with the true most attended key.
    """
    rows = visible.sum(dim=-1) > 1
    taken = score_parts(call)
    whole = centred_rows(taken.total, visible)[:, rows]
    # Renormalise without the sink.
    real = call.queries_and_keys().weights()[0].double()
    real = (
        real / real.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    )[:, rows]
    tried = {
        "even": looks_by(torch.zeros_like(taken.total), visible),
        "content": looks_by(taken.parts["content"], visible),
        **{f"rank_{rank}": pattern_of(weights, call) for rank, weights in cut.items()},
    }
    tried = {name: pattern[:, rows] for name, pattern in tried.items()}
    found = {
        f"{name}_share": (centred_rows(part, visible)[:, rows] * whole).sum(dim=(1, 2))
        for name, part in taken.parts.items()
    }
    found |= {
        f"{name}_nats": divergence(real, pattern).sum(dim=-1)
        for name, pattern in tried.items()
    }
    del tried["even"]  # uniform attention does not have a largest weight
    best = real.argmax(dim=-1)
    found |= {
        f"{name}_hits": (pattern.argmax(dim=-1) == best).double().sum(dim=-1)
        for name, pattern in tried.items()
    }
    return whole.square().sum(dim=(1, 2)), int(rows.sum()), found


@torch.no_grad()
def explain_text(
    reader: Reader, windows: Windows, progress: Told
) -> dict[Place, dict[str, HeadFigures]]:
    """Measure the explanation of attention by truncated W_QK and by the other parts of the scores.

    Shares are of the variance of the scores along a row; divergences and hits are means over queries.
    """
    cuts: dict[int, dict[int, AttentionWeights]] = {}
    found = UnitSums(windows.num_units)
    for unit, _, stacks in read_windows(reader, windows, progress):
        for kind, layer in chain.from_iterable(
            product([stack.kind], stack.layers) for stack in stacks
        ):
            call = layer.call
            # Truncations are computed once per layer.
            cut = cuts.get(id(call.layer))
            if cut is None:
                weights = in_float64(call)[0]
                cut = {
                    rank: of_rank(weights, rank, windows.context)
                    for rank in tried_ranks(weights)
                }
                cuts[id(call.layer)] = cut
            visible = layer.queries_and_keys().visible()[0, 0]
            energy, count, sums = explain_call(call, visible, cut)
            counts = [
                energy if name.endswith("_share") else energy.new_full((), count)
                for name in sums
            ]
            counted = torch.stack([one.expand_as(energy) for one in counts])
            found.add(
                unit,
                (kind, layer.number),
                tuple(sums),
                torch.stack([*sums.values()]),
                counted,
            )
    return found.figures()
