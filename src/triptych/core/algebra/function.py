"""The plain formula of an attention layer, from the maps to the output.

The output is computed from `AttentionWeights` alone, slowly and in any dtype. Tests compare layers with it,
and rewrites are measured with it on probes.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from triptych.core.algebra.semantics import Semantics
from triptych.core.algebra.weights import AttentionWeights, Side


def run_layer(
    weights: AttentionWeights,
    x: Float[Tensor, "batch query_len d_model"],
    memory: Float[Tensor, "batch key_len d_memory"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch query_len d_out"]:
    """Compute the output of a layer step by step, in the dtype of its maps.

    `memory` is the input of keys and values in cross-attention, `mask` True where a query may see a key.
    """
    q, k, v = channels(weights, x, memory)
    mixed = gated(weights, x, probabilities(weights, q, k, mask) @ for_heads(v, weights.num_heads))
    for link in weights.o:
        mixed = link.repeat(weights.num_heads)(mixed)
    out = mixed.sum(dim=1)
    return out if weights.o_bias is None else out + weights.o_bias


class Channels(NamedTuple):
    """Queries of every head, and keys and values of every key and value head, before rotation."""

    q: Float[Tensor, "batch heads query_len d_k"]
    k: Float[Tensor, "batch key_heads key_len d_k"]
    v: Float[Tensor, "batch value_heads key_len d_v"]


def channels(
    weights: AttentionWeights,
    x: Float[Tensor, "batch query_len d_model"],
    memory: Float[Tensor, "batch key_len d_memory"] | None = None,
) -> Channels:
    """Compute queries, keys and values before rotation, from the arguments of `run_layer`."""
    y = x if memory is None else memory
    semantics = weights.semantics
    q = _through(weights, "q", x)
    k = _through(weights, "k", y)
    v = _through(weights, "v", y)
    q = q if semantics.q_norm is None else semantics.q_norm(q)
    k = k if semantics.k_norm is None else semantics.k_norm(k)
    v = v if semantics.v_norm is None else semantics.v_norm(v)
    # Norms come before clipping, and both before rotation.
    if semantics.clip is not None:
        q, k, v = (t.clamp(-semantics.clip, semantics.clip) for t in (q, k, v))
    return Channels(for_heads(q, weights.num_heads), k, v)


def for_heads(t: Float[Tensor, "batch copies length width"], num_heads: int) -> Tensor:
    """Repeat key or value heads, once for every query head of their group."""
    return t.repeat_interleave(num_heads // t.shape[1], dim=1)


def probabilities(
    weights: AttentionWeights,
    q: Float[Tensor, "batch heads query_len d_k"],
    k: Float[Tensor, "batch key_heads key_len d_k"],
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch heads query_len key_len"]:
    """Compute attention weights from the queries and keys of `channels`, with the mask of `run_layer`."""
    semantics = weights.semantics
    query_positions, key_positions = (torch.arange(t.shape[2], device=t.device) for t in (q, k))
    if semantics.rotary is not None:
        q = semantics.rotary(q)
        k = semantics.rotary(k)
    # Late gains and the temperature scale rotated queries.
    q = semantics.apply_late_gains(q)
    if semantics.temperature is not None:
        q = semantics.temperature(q, query_positions)
    k = for_heads(k, weights.num_heads)
    scores = semantics.compare(q, k)
    if semantics.bias is not None:
        scores = scores + semantics.bias(q, k, query_positions, key_positions)
    if semantics.soft_cap is not None:
        scores = semantics.soft_cap * torch.tanh(scores / semantics.soft_cap)
    scores = scores.masked_fill(~_visible(semantics, query_positions, key_positions, mask), -math.inf)
    if semantics.sinks is None:
        return scores.softmax(dim=-1)
    # A sink takes part in the softmax as one more key, without a value: its weight is cut off.
    sinks = semantics.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def gated(
    weights: AttentionWeights,
    x: Float[Tensor, "batch query_len d_model"],
    mixed: Float[Tensor, "batch heads query_len d_v"],
) -> Float[Tensor, "batch heads query_len d_v"]:
    """Multiply mixed values by the gate of each head, if the layer has gates."""
    gate = weights.semantics.gate
    return mixed if gate is None else mixed * gate(x.to(mixed.dtype))


def _through(weights: AttentionWeights, side: Side, x: Tensor) -> Tensor:
    """Apply a chain to the input; the result is `[batch, copies, length, width]`."""
    x = x[:, None].to(weights.dtype)
    for link in weights.chain(side):
        if x.shape[1] not in (1, link.copies):
            x = x.repeat_interleave(max(1, link.copies // x.shape[1]), dim=1)
        x = link.repeat(max(link.copies, x.shape[1]))(x)
    return x


def _visible(semantics: Semantics, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    seen = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=queries.device)
    behind = queries[:, None] - keys
    if semantics.kind == "causal":
        seen = seen & (behind >= 0)
    if (near := semantics.visible(queries, keys)) is not None:
        seen = seen & near
    return seen if mask is None else seen & mask
