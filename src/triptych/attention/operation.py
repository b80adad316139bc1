"""The operation itself: equation 1 of the paper, written out and through torch's kernels.

    Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V

Both paths take the same arguments and give the same numbers and gradients (the tolerances are in
`tests/tolerances.py`); only the written-out one can return the weights or drop some of them.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from triptych.attention.masks import causal_mask

Path = Literal["auto", "reference", "fast"]

# Up to about this many keys, batched products beat the fused kernel on a CPU, forward and backward
# together (benchmarks/attention_paths.py; docs/log.md has a run).
_MAX_KEYS_WRITTEN_OUT_ON_CPU = {torch.bfloat16: 256}
_MAX_KEYS_WRITTEN_OUT_ON_CPU_OTHERWISE = 128


class Attended(NamedTuple):
    """What attention gives back.

    Attributes:
        output: `[batch, num_heads, query_len, d_v]`.
        weights: `[batch, num_heads, query_len, key_len]`, before dropout; None unless asked for.
    """

    output: Float[Tensor, "batch num_heads query_len d_v"]
    weights: Float[Tensor, "batch num_heads query_len key_len"] | None


def attention(
    q: Float[Tensor, "batch num_heads query_len d_k"],
    k: Float[Tensor, "batch num_kv_heads key_len d_k"],
    v: Float[Tensor, "batch num_kv_heads key_len d_v"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
    path: Path = "auto",
) -> Attended:
    """Scaled dot-product attention.

    With fewer key-value heads than query heads, consecutive query heads share one: head i reads
    group `i // (num_heads / num_kv_heads)`.

    Args:
        q: queries.
        k: keys.
        v: values; d_v need not equal d_k.
        mask: boolean, True = may attend, broadcasts to `[batch, num_heads, query_len, key_len]`.
        causal: a query sees only its own position and earlier ones; the queries are the last
            `query_len` positions of the keys. Combines with `mask`.
        scale: what the scores are multiplied by; 1/√d_k if None.
        dropout: probability that a weight is zeroed, the others scaled up by 1/(1 − dropout).
        need_weights: also return the weights. Changes nothing else but the speed.
        path: "reference" writes equation 1 out, "fast" calls torch's kernels, "auto" chooses.

    Returns:
        The output, zero in rows that may attend to nothing, and the weights if asked for.

    Raises:
        ValueError: head counts or shapes that do not fit, a mask that is not boolean, or the fast
            path asked for something that only the reference path can do.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1.
    """
    _check(q, k, v, mask, dropout)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    written_out_only = need_weights or dropout > 0
    if path == "fast" and written_out_only:
        raise ValueError(
            "the fast path can neither return the weights nor drop some: use path='auto' or 'reference'"
        )
    if path == "auto":
        path = "reference" if written_out_only or _prefers_written_out(q, k, v) else "fast"
    if path == "fast":
        return Attended(_fused(q, k, v, mask, causal, scale), None)
    output, weights = _written_out(q, k, v, mask, causal, scale, dropout)
    return Attended(output, weights if need_weights else None)


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    group_size = q.shape[1] // k.shape[1]
    if group_size > 1:
        k, v = (t.repeat_interleave(group_size, dim=1) for t in (k, v))
    scores = (q * scale) @ k.transpose(-2, -1)
    allowed = _combine(mask, causal, q.shape[-2], k.shape[-2], q.device)
    if allowed is None:
        weights = scores.softmax(dim=-1)
    else:
        # The lowest finite number keeps a fully masked row free of NaN in both directions; the
        # second fill turns that row's uniform weights into zeros.
        blocked = ~allowed
        weights = scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(dim=-1)
        weights = weights.masked_fill(blocked, 0.0)
    return F.dropout(weights, dropout) @ v, weights


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    # torch aligns its causal mask to the first key, ours to the last.
    causal_by_flag = causal and mask is None and q.shape[-2] == k.shape[-2]
    allowed = None if causal_by_flag else _combine(mask, causal, q.shape[-2], k.shape[-2], q.device)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=allowed,
        is_causal=causal_by_flag,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _combine(
    mask: Tensor | None, causal: bool, query_len: int, key_len: int, device: torch.device
) -> Tensor | None:
    if not causal or query_len == 1:  # a single query is the last position and sees every key
        return mask
    triangle = causal_mask(query_len, key_len, device)
    return triangle if mask is None else mask & triangle


def _prefers_written_out(q: Tensor, k: Tensor, v: Tensor) -> bool:
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    limit = _MAX_KEYS_WRITTEN_OUT_ON_CPU.get(q.dtype, _MAX_KEYS_WRITTEN_OUT_ON_CPU_OTHERWISE)
    return trains and q.device.type == "cpu" and k.shape[-2] <= limit


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries have width {q.shape[-1]} and keys {k.shape[-1]}: d_k must be one number")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"keys {list(k.shape)} and values {list(v.shape)} must agree but for the last width")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key-value heads evenly")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"the mask is {mask.dtype}: it must be boolean, True = may attend")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}: it must be at least 0 and below 1")
