"""The function of an attention layer, from `AttentionWeights` alone.

The steps of `attention/steps.py` are walked slowly and in any dtype. Tests compare layers with it, and
rewrites are measured with it on probes.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from triptych.core.algebra.weights import AttentionWeights, Side
from triptych.core.attention.position_modules import TokenPositions
from triptych.core.attention.routes import Inputs
from triptych.core.attention.steps import (
    BEFORE_ROTATION,
    FROM_ROTATION,
    GATE,
    KERNEL_STEPS,
    LOCATE,
    WEIGHT_STEPS,
    both,
    for_heads,
    is_causal,
    prepare,
    walk,
)

# A whole text has consecutive positions from 0.
_FROM_THE_START = TokenPositions(0)


def run_layer(
    weights: AttentionWeights,
    x: Float[Tensor, "batch query_len d_model"],
    memory: Float[Tensor, "batch key_len d_memory"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch query_len d_out"]:
    """Compute the output of a layer step by step, in the dtype of its maps.

    `memory` is the input of keys and values in cross-attention, `mask` True where a query may see a key.
    """
    z = mixed_values(weights, x, channels(weights, x, memory), mask)
    for link in weights.o:
        z = link.repeat(weights.num_heads)(z)
    out = z.sum(dim=1)
    return out if weights.o_bias is None else out + weights.o_bias


class Channels(NamedTuple):
    """Queries of every head, and keys and values of every key and value head.

    Norms and clipping are applied, and the rotation is not.
    """

    q: Float[Tensor, "batch heads query_len d_k"]
    k: Float[Tensor, "batch key_heads key_len d_k"]
    v: Float[Tensor, "batch value_heads key_len d_v"]


def channels(
    weights: AttentionWeights,
    x: Float[Tensor, "batch query_len d_model"],
    memory: Float[Tensor, "batch key_len d_memory"] | None = None,
) -> Channels:
    """Compute queries, keys and values after norms and clipping, before rotation, as for `run_layer`."""
    y = x if memory is None else memory
    semantics = weights.semantics
    q = prepare(
        _apply_chain(weights, "q", x), "q", semantics, _FROM_THE_START, BEFORE_ROTATION
    )
    k = prepare(
        _apply_chain(weights, "k", y), "k", semantics, _FROM_THE_START, BEFORE_ROTATION
    )
    v = prepare(
        _apply_chain(weights, "v", y), "v", semantics, _FROM_THE_START, BEFORE_ROTATION
    )
    return Channels(for_heads(q, weights.num_heads), k, v)


def probabilities(
    weights: AttentionWeights,
    q: Float[Tensor, "batch heads query_len d_k"],
    k: Float[Tensor, "batch key_heads key_len d_k"],
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch heads query_len key_len"]:
    """Compute attention weights from the queries and keys of `channels`, with the mask of `run_layer`."""
    # No step up to the weights reads values, so keys are passed as values.
    q, given = _inputs(weights, Channels(q, k, k), mask)
    return walk(WEIGHT_STEPS, q, given)


def mixed_values(
    weights: AttentionWeights,
    x: Float[Tensor, "batch query_len d_model"],
    made: Channels,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch heads query_len d_v"]:
    """Compute the input of W_O of every head from the `channels` of x, with the mask of `run_layer`."""
    q, given = _inputs(weights, made, mask)
    return gated(weights, x, walk(KERNEL_STEPS, q, given))


def gated(
    weights: AttentionWeights,
    x: Float[Tensor, "batch query_len d_model"],
    mixed: Float[Tensor, "batch heads query_len d_v"],
) -> Float[Tensor, "batch heads query_len d_v"]:
    """Multiply mixed values by the gate of each head, if the layer has gates."""
    factors = GATE.run(x.to(mixed.dtype), weights.semantics)
    return mixed if factors is None else mixed * factors


def _inputs(
    weights: AttentionWeights, made: Channels, mask: Tensor | None
) -> tuple[Tensor, Inputs]:
    """Rotate queries and keys; return the queries and the inputs of the steps from products on."""
    semantics = weights.semantics
    q = prepare(made.q, "q", semantics, _FROM_THE_START, FROM_ROTATION)
    k = for_heads(
        prepare(made.k, "k", semantics, _FROM_THE_START, FROM_ROTATION),
        weights.num_heads,
    )
    v = for_heads(made.v, weights.num_heads)
    near, bias = LOCATE.run(
        q,
        k,
        semantics,
        _FROM_THE_START.query_positions(q),
        _FROM_THE_START.key_positions(k),
    )
    return q, Inputs(
        q, k, v, both(near, mask), bias, is_causal(semantics, None), semantics, 0.0
    )


def _apply_chain(weights: AttentionWeights, side: Side, x: Tensor) -> Tensor:
    """Apply a chain to the input; the result is `[batch, copies, length, width]`."""
    x = x[:, None].to(weights.dtype)
    for link in weights.chain(side):
        if x.shape[1] not in (1, link.copies):
            x = x.repeat_interleave(max(1, link.copies // x.shape[1]), dim=1)
        x = link.repeat(max(link.copies, x.shape[1]))(x)
    return x
