"""Masks, and equation 1 written out, in one piece or in pieces with few weights in memory at a time.

weights = softmax(Q Kᵀ · scale + bias + mask)      output = weights V

A mask is boolean, True = may attend, and broadcasts to `[batch, num_heads, query_len, key_len]`. Outputs of
fully masked rows (without a True) are zero on every path.
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
    """Return a mask: True at tokens of `ids`, False at padding."""
    return (ids != pad_id)[:, None, None, :]


def causal_mask(
    query_len: int | torch.SymInt, key_len: int | torch.SymInt, device: torch.device | None = None
) -> Bool[Tensor, "query_len key_len"]:
    """Return the causal mask: True at keys up to the position of the query.

    The queries are the *last* `query_len` of the `key_len` positions, so that the same mask serves training
    (equal lengths) and decoding with a cache (fewer queries than keys).
    """
    offset = key_len - query_len
    return torch.ones(query_len, key_len, dtype=torch.bool, device=device).tril(offset)


# Memory limit for scores other than products: a vector for each pair of query and key.
_BYTES_OF_PAIRS = 1 << 28


def written_out(given: Inputs) -> tuple[Tensor, Tensor]:
    """Compute output and weights; the returned weights are before dropout."""
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
    """Apply norm, clipping and rotary embedding to projected queries, keys or values."""
    x = x if norm is None else norm(x)
    if semantics.clip is not None:
        x = x.clamp(-semantics.clip, semantics.clip)
    return x if rotary is None or places is None else places.rotate(x, rotary)


def tempered(q: Tensor, semantics: Semantics, places: TokenPlaces) -> Tensor:
    """Apply late gains of norms and the temperature to rotated queries."""
    q = semantics.apply_late_gains(q)
    return q if semantics.temperature is None else semantics.temperature(q, places.query_positions(q))


def by_position(
    semantics: Semantics, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the local mask and the position bias for queries and keys at given positions."""
    bias = semantics.bias
    return semantics.visible(queries, keys), None if bias is None else bias(q, k, queries, keys)


def to_scores(q: Tensor, k: Tensor, bias: Tensor | None, semantics: Semantics) -> Tensor:
    """Compute the input of the softmax, before any mask."""
    return finished_scores(_raw_scores(q, k, semantics), bias, semantics.soft_cap)


def finished_scores(products: Tensor, bias: Tensor | None, soft_cap: float | None) -> Tensor:
    """Add bias and soft cap to scaled products."""
    scores = products if bias is None else products + bias.to(products.dtype)
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def _raw_scores(q: Tensor, k: Tensor, semantics: Semantics) -> Tensor:
    """Compute scaled products, or the scores of `semantics.scores`."""
    if semantics.scores is not None:
        # Such scores may make a vector for each pair: the queries of a part are limited by memory.
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        a_query = q.shape[0] * k.shape[1] * k.shape[2] * k.shape[3] * k.element_size()
        step = max(1, _BYTES_OF_PAIRS // max(1, a_query))
        parts = [q[:, :, start : start + step] for start in range(0, q.shape[2], step)]
        return torch.cat([semantics.scores(part, k) for part in parts], dim=2)
    if q.shape[2] == 1 and k.is_cpu and k.dtype == torch.bfloat16:
        k = k.contiguous()  # for a view of a cache the product would make the copy, at a third of the speed
    return _grouped_product(q * semantics.scale, k.transpose(-2, -1))


def to_weights(scores: Tensor, mask: Tensor | None, sinks: Tensor | None, causal: bool) -> Tensor:
    """Compute the softmax of masked scores; fully masked rows are 0."""
    allowed = combined_mask(mask, causal, scores.shape[-2], scores.shape[-1], scores.device)
    if sinks is not None:
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        columns = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, columns], dim=-1).softmax(dim=-1)[..., :-1]
    if allowed is None:
        return scores.softmax(dim=-1)
    if _every_query_sees_a_key(allowed):
        # The same bits as below in one pass forward, without a pass backward: a sum passes its gradient
        # unmasked.
        lowered = scores.new_zeros(allowed.shape).masked_fill_(~allowed, -math.inf)
        return (scores + lowered).softmax(dim=-1)
    # The lowest finite value keeps a fully masked row free of NaN, forward and backward; the second fill
    # replaces the uniform weights of that row by zeros.
    blocked = ~allowed
    weights = scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(blocked, 0.0)


def in_pieces(given: Inputs) -> Tensor:
    """Compute the output in pieces of sentences, heads or queries that fit into `BYTES_OF_A_PIECE`."""
    q = given.q
    k = given.k
    v = given.v
    mask = given.mask
    bias = given.bias
    semantics = given.semantics
    batch, num_heads, query_len, d_k = q.shape
    key_heads, key_len = k.shape[1:3]
    # The layout that a layer reads: heads of a token next to each other.
    output = q.new_empty(batch, query_len, num_heads, v.shape[3]).transpose(1, 2)
    # Query heads of one group stay in one piece, if keys and values have the same groups.
    alike = key_heads == v.shape[1]
    together = num_heads // key_heads if alike else num_heads
    # Number of rows of weights that fit, with queries, keys, values and output of each row.
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
    """Return the size of even parts of `length`: the fewest parts of at most `room`."""
    return -(-length // -(-length // max(1, room)))


def slice_broadcast(x: Tensor, ranges: tuple[slice, ...]) -> Tensor:
    """Slice a tensor by ranges of `[batch, num_heads, query_len, key_len]`; broadcast dimensions stay."""
    own = ranges[len(ranges) - x.dim() :]
    return x[tuple(slice(None) if size == 1 else range_ for size, range_ in zip(x.shape, own, strict=True))]


def _every_query_sees_a_key(allowed: Tensor) -> bool:
    """Return True if no row is fully masked; False on a GPU and in a compiled graph: the check is costly."""
    if not allowed.is_cpu or torch.compiler.is_compiling():
        return False
    return bool(allowed.any(dim=-1).all())


def _grouped_product(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply `[batch, heads, n, m]` by `[batch, groups, m, p]`, with heads of a group as rows."""
    batch, num_heads, n, m = rows.shape
    num_groups = shared.shape[1]
    if num_groups == num_heads:
        return rows @ shared
    grouped = rows.reshape(batch, num_groups, num_heads // num_groups * n, m)
    return (grouped @ shared).reshape(batch, num_heads, n, shared.shape[3])


def combined_mask(
    mask: Tensor | None,
    causal: bool,
    query_len: int | torch.SymInt,  # SymInt in a traced graph
    key_len: int | torch.SymInt,
    device: torch.device,
) -> Tensor | None:
    """Return the mask combined with causality; None if every query attends to every key."""
    if not causal or query_len == 1:  # a single query is the last position and attends to every key
        return mask
    triangle = causal_mask(query_len, key_len, device)
    return triangle if mask is None else mask & triangle
