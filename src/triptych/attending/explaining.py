"""What a head's weights say of where it looks, and what it writes: its forms beside its attention on a text.

    score_ij = scale · [(x_i W_Q)(y_j W_K)ᵀ + bias terms + what rotary distance changes] + position bias

A constant added to a row of scores does nothing to the softmax, so parts are compared after the mean over the
keys that a query sees is taken off each row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from triptych.algebra.function import channels, of_heads, probabilities
from triptych.algebra.resampling import ratio_intervals
from triptych.algebra.rewrites.rank import truncate
from triptych.algebra.rewrites.record import RewriteRefusedError
from triptych.algebra.rewrites.rotary_maps import truncate_rotary_maps
from triptych.algebra.weights import AttentionWeights, Link
from triptych.attending.over_text import Told, Windows, layers_of, read_windows
from triptych.opening import LayerCall, Reader

PARTS = {
    "content": "W_QK alone: queries and keys without their biases, before positions turn them",
    "biases": "the biases of queries and keys",
    "distance": "what rotation by position (or a temperature) changes",
    "position_bias": "numbers added by position: ALiBi, T5's, DeBERTa's",
}


@final
@dataclass(frozen=True, eq=False)
class ScoreParts:
    """The scaled scores of one sequence as a sum of parts, before a soft cap and before the mask.

    Attributes:
        total: `[heads, queries, keys]`.
        parts: by a name of `PARTS`, those that the layer has; they add up to the total.
    """

    total: Float[Tensor, "heads queries keys"]
    parts: dict[str, Float[Tensor, "heads queries keys"]]


@torch.no_grad()
def score_parts(call: LayerCall) -> ScoreParts:
    """Take the scores of a layer apart, in float64.

    Where queries and keys are normalised or clipped after their maps, the biases count to the content.
    """
    compared = call.queries_and_keys()
    weights, x, memory = in_float64(call)
    semantics = weights.semantics
    turned_k = of_heads(compared.k.double(), weights.num_heads)
    whole = semantics.compare(compared.q.double(), turned_k)
    q, k, _ = channels(weights, x, memory)
    before = semantics.compare(q, of_heads(k, weights.num_heads))
    mixed = semantics.q_norm is not None or semantics.k_norm is not None or semantics.clip is not None
    mixed = mixed or semantics.scores is not None
    content = before
    if not mixed and (weights.head_bias("q") is not None or weights.head_bias("k") is not None):
        plain = channels(without_biases(weights), x, memory)
        content = semantics.compare(plain.q, of_heads(plain.k, weights.num_heads))
    found = {"content": content[0]}
    if content is not before:
        found["biases"] = (before - content)[0]
    if semantics.rotary is not None or semantics.temperature is not None:
        found["distance"] = (whole - before)[0]
    if semantics.bias is not None:
        added = semantics.bias(
            compared.q.double(), turned_k, compared.query_positions, compared.key_positions
        )
        found["position_bias"] = added.double().expand_as(whole)[0]
        whole = whole + added
    return ScoreParts(whole[0], found)


def in_float64(call: LayerCall) -> tuple[AttentionWeights, Tensor, Tensor | None]:
    """A layer's weights, and what queries and keys are made of."""
    kinds = {"encoder": "self", "decoder": "causal", "cross": "cross"}
    weights = call.layer.weights(kinds[call.kind]).to(torch.float64)  # type: ignore[arg-type]
    return weights, call.x.double(), None if call.memory is None else call.memory.double()


def without_biases(weights: AttentionWeights) -> AttentionWeights:
    """The layer without the biases of queries and keys."""

    def bare(chain: tuple[Link, ...]) -> tuple[Link, ...]:
        return tuple(replace(link, bias=None) for link in chain)

    return replace(weights, q=bare(weights.q), k=bare(weights.k))


def centred_rows(
    scores: Float[Tensor, "heads queries keys"], visible: Bool[Tensor, "queries keys"]
) -> Float[Tensor, "heads queries keys"]:
    """Scores less their mean over the keys that a query sees; 0 where it sees none."""
    mean = (scores * visible).sum(dim=-1, keepdim=True) / visible.sum(dim=-1, keepdim=True).clamp(min=1)
    return (scores - mean) * visible


def divergence(
    p: Float[Tensor, "heads queries keys"], q: Float[Tensor, "heads queries keys"]
) -> Float[Tensor, "heads queries"]:
    """KL(p ‖ q) of every row in nats: what is lost by taking q for p. Infinite where q misses a key of p."""
    lost: Tensor = torch.special.xlogy(p, p) - torch.special.xlogy(p, q)
    return lost.sum(dim=-1).clamp(min=0)


def looks_by(
    scores: Float[Tensor, "heads queries keys"], visible: Bool[Tensor, "queries keys"]
) -> Float[Tensor, "heads queries keys"]:
    """The weights that scores give over the keys that a query sees."""
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1)


def of_rank(weights: AttentionWeights, rank: int, longest: int) -> AttentionWeights:
    """The layer with W_QK of every head cut to a rank, and all else as it is.

    Heads that read one key head share the key channels that are left. Rotary heads lose rank of W_Q and W_K
    before they are rotated; see `truncate` and `truncate_rotary_maps`.
    """
    if rank >= weights.multiplied("q").d_out:
        return weights
    if weights.semantics.rotary is not None:
        return truncate_rotary_maps(weights, qk_rank=rank, longest=longest).weights
    return truncate(weights, qk_rank=rank).weights


def ranks_of(weights: AttentionWeights) -> tuple[int, ...]:
    """The ranks that W_QK is tried at: powers of two below its width; none where it cannot be cut."""
    width = weights.multiplied("q").d_out
    ranks = tuple(1 << i for i in range(width.bit_length()) if 1 << i < width)
    try:
        of_rank(weights, 1, 2)
    except RewriteRefusedError:
        return ()
    return ranks


def pattern_of(weights: AttentionWeights, call: LayerCall) -> Float[Tensor, "heads queries keys"]:
    """The weights that another writing of a layer gives on the layer's own inputs, batch size 1."""
    _, x, memory = in_float64(call)
    q, k, _ = channels(weights, x, memory)
    return probabilities(weights, q, k, call.mask)[0]


@final
@dataclass(frozen=True, eq=False)
class Explained:
    """How well parts of a layer's scores explain its attention, as sums over the queries of one sequence.

    Attributes:
        energy: `[heads]`, the sum of squares of the centred scores.
        shares: by part, `[heads]`: the inner product of the centred part with the centred scores. Divided by
            the energy they add up to 1.
        nats: by what stands for the scores, `[heads]`: the sum over queries of the divergence of the real
            weights from it: "even" for all keys alike, "content" for W_QK alone, "rank 4" for W_QK cut to
            rank 4 with all else as it is.
        hits: by the same names, queries whose most attended key is the right one.
        count: queries that see two keys at least.
    """

    energy: Float[Tensor, " heads"]
    shares: dict[str, Float[Tensor, " heads"]]
    nats: dict[str, Float[Tensor, " heads"]]
    hits: dict[str, Float[Tensor, " heads"]]
    count: int

    def __add__(self, other: "Explained") -> "Explained":
        return Explained(
            self.energy + other.energy,
            {name: own + other.shares[name] for name, own in self.shares.items()},
            {name: own + other.nats[name] for name, own in self.nats.items()},
            {name: own + other.hits[name] for name, own in self.hits.items()},
            self.count + other.count,
        )


@torch.no_grad()
def explain_call(
    call: LayerCall, visible: Bool[Tensor, "queries keys"], cut: dict[int, AttentionWeights]
) -> Explained:
    """Compare a layer's attention on one sequence with what parts of its scores would give."""
    rows = visible.sum(dim=-1) > 1
    taken = score_parts(call)
    whole = centred_rows(taken.total, visible)[:, rows]
    real = call.queries_and_keys().weights()[0].double()
    real = (real / real.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny))[:, rows]
    tried = {
        "even": looks_by(torch.zeros_like(taken.total), visible),
        "content": looks_by(taken.parts["content"], visible),
        **{f"rank {rank}": pattern_of(weights, call) for rank, weights in cut.items()},
    }
    tried = {name: pattern[:, rows] for name, pattern in tried.items()}
    best = real.argmax(dim=-1)
    return Explained(
        energy=whole.square().sum(dim=(1, 2)),
        shares={
            name: (centred_rows(part, visible)[:, rows] * whole).sum(dim=(1, 2))
            for name, part in taken.parts.items()
        },
        nats={name: divergence(real, pattern).sum(dim=-1) for name, pattern in tried.items()},
        hits={
            name: (pattern.argmax(dim=-1) == best).double().sum(dim=-1)
            for name, pattern in tried.items()
            if name != "even"  # which has no largest weight
        },
        count=int(rows.sum()),
    )


@final
@dataclass(frozen=True, eq=False)
class LayerExplained:
    """How well parts of a layer's scores explain its attention on a text, with 95 % intervals.

    Attributes:
        stack: "encoder", "decoder" or "cross".
        layer: its number in the stack.
        figures: by name, `[heads]` each: value, lower and upper end. "content_share" and its like are shares
            of the variance of the scores along a row, which add up to 1; "even_nats", "content_nats" and
            "rank_4_nats" divergences of the real weights per query; "content_hits" and "rank_4_hits" shares
            of queries whose most attended key is the right one.
    """

    stack: str
    layer: int
    figures: dict[str, tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def of_sums(cls, stack: str, layer: int, units: Sequence[Explained]) -> "LayerExplained":
        """From the sums of every document (or window), which intervals are drawn over."""
        energy = torch.stack([unit.energy for unit in units])
        counts = torch.tensor([float(unit.count) for unit in units], dtype=torch.float64)[:, None]
        found = {}
        for name in units[0].shares:
            shares = torch.stack([unit.shares[name] for unit in units])
            found[f"{name}_share"] = _mean_with_interval(shares, energy)
        for what in ("nats", "hits"):
            for name in getattr(units[0], what):
                sums = torch.stack([getattr(unit, what)[name] for unit in units])
                found[f"{name.replace(' ', '_')}_{what}"] = _mean_with_interval(sums, counts)
        return cls(stack, layer, found)

    @property
    def num_heads(self) -> int:
        return len(self.figures["even_nats"][0])

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per head."""
        return [
            {"stack": self.stack, "layer": self.layer, "head": head}
            | {
                name + end: float(number[head])
                for name, numbers in self.figures.items()
                for end, number in zip(("", "_low", "_high"), numbers, strict=True)
            }
            for head in range(self.num_heads)
        ]


def _mean_with_interval(
    sums: Float[Tensor, "units heads"], counts: Float[Tensor, "units *heads"]
) -> tuple[Tensor, Tensor, Tensor]:
    return sums.sum(dim=0) / counts.sum(dim=0), *ratio_intervals(sums, counts)


@torch.no_grad()
def explain_text(
    reader: Reader, windows: Windows, progress: Told = lambda done, total: None
) -> tuple[LayerExplained, ...]:
    """How well W_QK, cut to several ranks, and the other parts of the scores explain where heads look."""
    units = windows.num_units
    cuts: dict[int, dict[int, AttentionWeights]] = {}
    found: dict[tuple[str, int], list[Explained | None]] = {}
    for unit, attention in read_windows(reader, windows, progress):
        for stack, layer in layers_of(attention):
            call = layer.call
            cut = cuts.get(id(call.layer))
            if cut is None:
                weights = in_float64(call)[0]
                cut = {rank: of_rank(weights, rank, windows.context) for rank in ranks_of(weights)}
                cuts[id(call.layer)] = cut
            visible = layer.queries_and_keys().visible()[0, 0]
            explained = explain_call(call, visible, cut)
            own = found.setdefault((stack.kind, layer.number), [None] * units)
            before = own[unit]
            own[unit] = explained if before is None else before + explained
    return tuple(
        LayerExplained.of_sums(*place, [one for one in own if one is not None and one.count])
        for place, own in found.items()
    )
