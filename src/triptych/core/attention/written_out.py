"""Masks, and equation 1 written out: whole, in pieces that hold few of the weights at a time, or the weights.

weights = softmax(Q Kᵀ · scale + bias + mask)      output = weights V

A mask is boolean, True = may attend, and broadcasts to `[batch, num_heads, query_len, key_len]`. A row
without a single True attends to nothing: its output is zero, on every path.
"""

import itertools
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from triptych import thresholds
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.semantics import Semantics
from triptych.core.attention.position_modules import TokenPlaces
from triptych.core.attention.routes import Inputs


def padding_mask(ids: Int[Tensor, "batch key_len"], pad_id: int) -> Bool[Tensor, "batch 1 1 key_len"]:
    """True where `ids` holds a token, False where it holds padding."""
    return (ids != pad_id)[:, None, None, :]


def causal_mask(
    query_len: int | torch.SymInt, key_len: int | torch.SymInt, device: torch.device | None = None
) -> Bool[Tensor, "query_len key_len"]:
    """True where a query may look: at its own position and before it.

    The queries are the *last* `query_len` of the `key_len` positions, so that one mask serves
    training (equal lengths) and decoding with a cache (fewer queries than keys).
    """
    offset = key_len - query_len
    return torch.ones(query_len, key_len, dtype=torch.bool, device=device).tril(offset)


# Computed at a time, for scores that are no products: they may hold a vector for each query and key.
_BYTES_OF_PAIRS = 1 << 28


def written_out(given: Inputs) -> tuple[Tensor, Tensor]:
    """Output and weights; the weights are those before dropout."""
    scores = to_scores(given.q, given.k, given.bias, given.semantics)
    weights = to_weights(scores, given.mask, given.semantics.sinks, given.causal)
    return _grouped_product(F.dropout(weights, given.dropout), given.v), weights


def prepared(
    x: Tensor,
    semantics: Semantics,
    norm: Callable[[Tensor], Tensor] | None = None,
    rotary: RotaryEmbedding | None = None,
    places: TokenPlaces | None = None,
) -> Tensor:
    """Queries, keys or values of the maps as they meet each other: normalised, clipped and turned."""
    x = x if norm is None else norm(x)
    if semantics.clip is not None:
        x = x.clamp(-semantics.clip, semantics.clip)
    return x if rotary is None or places is None else places.rotate(x, rotary)


def tempered(q: Tensor, semantics: Semantics, places: TokenPlaces) -> Tensor:
    """Turned queries as they meet the keys."""
    q = semantics.apply_late_gains(q)
    return q if semantics.temperature is None else semantics.temperature(q, places.query_positions(q))


def by_position(
    semantics: Semantics, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """What queries at some positions may see of keys at others, and what is added to their scores."""
    bias = semantics.bias
    return semantics.visible(queries, keys), None if bias is None else bias(q, k, queries, keys)


def to_scores(q: Tensor, k: Tensor, bias: Tensor | None, semantics: Semantics) -> Tensor:
    """What the softmax takes, before any mask."""
    return finished_scores(_raw_scores(q, k, semantics), bias, semantics.soft_cap)


def finished_scores(products: Tensor, bias: Tensor | None, soft_cap: float | None) -> Tensor:
    """The scores, before any mask, that products of queries and keys give."""
    scores = products if bias is None else products + bias.to(products.dtype)
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def _raw_scores(q: Tensor, k: Tensor, semantics: Semantics) -> Tensor:
    """Scaled products, or other scores; of these, as many queries at a time as may hold a vector a pair."""
    if semantics.scores is not None:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        a_query = q.shape[0] * k.shape[1] * k.shape[2] * k.shape[3] * k.element_size()
        step = max(1, _BYTES_OF_PAIRS // max(1, a_query))
        parts = [q[:, :, start : start + step] for start in range(0, q.shape[2], step)]
        return torch.cat([semantics.scores(part, k) for part in parts], dim=2)
    if q.shape[2] == 1 and k.is_cpu and k.dtype == torch.bfloat16:
        k = k.contiguous()  # a product would copy what is part of a cache itself, at a third of the speed
    return _grouped_product(q * semantics.scale, k.transpose(-2, -1))


def to_weights(scores: Tensor, mask: Tensor | None, sinks: Tensor | None, causal: bool) -> Tensor:
    """The softmax of scores; 0 in rows that may attend to nothing."""
    allowed = combined_mask(mask, causal, scores.shape[-2], scores.shape[-1], scores.device)
    if sinks is not None:
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        columns = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, columns], dim=-1).softmax(dim=-1)[..., :-1]
    if allowed is None:
        return scores.softmax(dim=-1)
    if _every_query_sees_a_key(allowed):
        # The same bits as below, in one pass forward and none backward: a sum needs no mask for its gradient.
        lowered = scores.new_zeros(allowed.shape).masked_fill_(~allowed, -math.inf)
        return (scores + lowered).softmax(dim=-1)
    # The lowest finite number keeps a fully masked row free of NaN in both directions; the
    # second fill turns that row's uniform weights into zeros.
    blocked = ~allowed
    weights = scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(blocked, 0.0)


def in_pieces(given: Inputs) -> Tensor:
    """The output alone, over as many sentences, heads or queries at a time as `BYTES_OF_A_PIECE` hold."""
    q = given.q
    k = given.k
    v = given.v
    mask = given.mask
    bias = given.bias
    semantics = given.semantics
    batch, num_heads, query_len, d_k = q.shape
    key_heads, key_len = k.shape[1:3]
    # As a layer reads it: the heads of a token next to each other.
    output = q.new_empty(batch, query_len, num_heads, v.shape[3]).transpose(1, 2)
    # Heads that share keys or values stay together, where both are shared alike.
    alike = key_heads == v.shape[1]
    together = num_heads // key_heads if alike else num_heads
    # A row of weights, and what is copied for it of queries, keys, values and output.
    room = thresholds.BYTES_OF_A_PIECE // ((key_len + 4 * max(d_k, v.shape[3])) * q.element_size())
    rows = even_parts(query_len, room // together)
    heads = even_parts(num_heads // together, room // (query_len * together)) * together
    sentences = even_parts(batch, room // (query_len * num_heads))
    for b, h, i in itertools.product(
        range(0, batch, sentences), range(0, num_heads, heads), range(0, query_len, rows)
    ):
        of_queries = slice(b, b + sentences), slice(h, h + heads), slice(i, i + rows)
        of_keys = of_queries[0], slice(h // together, (h + heads) // together) if alike else slice(None)
        last = min(i + rows, query_len)
        seen = slice(0, max(0, key_len - query_len + last) if given.causal else key_len)
        piece = given._replace(
            q=q[of_queries],
            k=k[of_keys][:, :, seen],
            v=v[of_keys][:, :, seen],
            mask=None if mask is None else slice_broadcast(mask, (*of_queries, seen)),
            bias=None if bias is None else slice_broadcast(bias, (*of_queries, seen)),
            semantics=semantics.select_heads(range(num_heads)[of_queries[1]]),
        )
        output[of_queries], _ = written_out(piece)
    return output


def even_parts(length: int, room: int) -> int:
    """How long the parts are when `length` is cut into as few as fit into `room`, as even as they can be."""
    return -(-length // -(-length // max(1, room)))


def slice_broadcast(x: Tensor, ranges: tuple[slice, ...]) -> Tensor:
    """What broadcasts to a piece of `[batch, num_heads, query_len, key_len]` as `x` does to the whole."""
    own = ranges[len(ranges) - x.dim() :]
    return x[tuple(slice(None) if size == 1 else range_ for size, range_ in zip(x.shape, own, strict=True))]


def _every_query_sees_a_key(allowed: Tensor) -> bool:
    """Whether no row is fully masked, where asking neither waits for a GPU nor ends a compiled graph."""
    if not allowed.is_cpu or torch.compiler.is_compiling():
        return False
    return bool(allowed.any(dim=-1).all())


def _grouped_product(rows: Tensor, shared: Tensor) -> Tensor:
    """`[batch, heads, n, m]` times `[batch, groups, m, p]`: the rows of a group lie below each other."""
    batch, num_heads, n, m = rows.shape
    num_groups = shared.shape[1]
    if num_groups == num_heads:
        return rows @ shared
    grouped = rows.reshape(batch, num_groups, num_heads // num_groups * n, m)
    return (grouped @ shared).reshape(batch, num_heads, n, shared.shape[3])


def combined_mask(
    mask: Tensor | None,
    causal: bool,
    query_len: int | torch.SymInt,  # of a traced graph
    key_len: int | torch.SymInt,
    device: torch.device,
) -> Tensor | None:
    """The mask with causality; None where every query sees every key."""
    if not causal or query_len == 1:  # a single query is the last position and sees every key
        return mask
    triangle = causal_mask(query_len, key_len, device)
    return triangle if mask is None else mask & triangle
