"""Scaled dot-product attention: the steps from `products` to `mix`, written out or by torch's kernels.

    Attention(Q, K, V) = softmax(Q Kᵀ / √d_k + bias) V

The reference path (written out) and the fast path (torch's kernels) take the same arguments and give the same
outputs and gradients (tolerances: `tests/tolerances.py`). Only the reference path returns weights, drops
weights, caps scores or supports sinks. Written out in pieces, it keeps few weights in memory at a time.
`make_plan` (`routes.py`) chooses the path; `explain_inputs` puts the choice into words.
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from triptych import thresholds
from triptych.core.algebra.semantics import Semantics
from triptych.core.attention.routes import (
    AttentionPlan,
    HeadGrouping,
    Implementation,
    Inputs,
    Kernel,
    Path,
    make_plan,
    reason,
)
from triptych.core.attention.steps import (
    MIX,
    QUICK_WEIGHT_STEPS,
    combined_mask,
    slice_broadcast,
    walk,
)

_KERNELS: dict[int, Kernel] = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


class Attended(NamedTuple):
    """Output and weights of `attention`."""

    output: Float[Tensor, "batch num_heads query_len d_v"]
    # attention weights before dropout; None unless wanted
    weights: Float[Tensor, "batch num_heads query_len key_len"] | None


class Explanation(NamedTuple):
    """The implementation chosen for a call of `attention`, with the reason."""

    # "written out": equation 1, all weights in memory at once. "written out in pieces": equation 1 for a few
    # sentences, heads or queries at a time. "fused": torch's fused operation. "fused, padded": the fused
    # operation with the smaller of d_k and d_v padded with zeros
    path: Implementation
    # mapping of query heads to the heads of keys and values. "grouped by rows": query heads that share a
    # key-value head are rows of one product, so that the head is read once. "grouped by the kernel": torch's
    # `enable_gqa`. "expanded": key-value heads repeated to a common number; a single head is not copied
    heads: HeadGrouping
    # kernel of the call. "math" and "batched products" keep all weights in memory; the memory of any other
    # kernel is linear in the lengths
    kernel: Kernel
    reason: str  # one sentence, with sizes


def attention(
    q: Float[Tensor, "batch num_heads query_len d_k"],
    k: Float[Tensor, "batch num_key_heads key_len d_k"],
    v: Float[Tensor, "batch num_value_heads key_len d_v"],
    *,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
    path: Path = "auto",
) -> Attended:
    """Compute scaled dot-product attention.

    If there are fewer key heads or value heads than query heads, consecutive query heads share them: query
    head i reads key head `i // (num_heads / num_key_heads)` and value head
    `i // (num_heads / num_value_heads)`. The number of key heads may differ from that of value heads.

    Args:
        q: queries.
        k: keys.
        v: values; d_v may differ from d_k. `v` and `k` may be the same tensor.
        mask: boolean, True = may attend, broadcasts to `[batch, num_heads, query_len, key_len]`.
        bias: finite values added to the scaled scores, broadcast like `mask`, with gradient.
        causal: mask all keys after the position of a query; the queries are the last `query_len` positions
            of the keys. Combines with `mask` and `bias`.
        scale: factor of the products of queries and keys; 1/√d_k if None.
        soft_cap: c in c · tanh(s / c), applied to scores s after the bias; None for no cap.
        sinks: extra score of the softmax per head `[num_heads]`, without a value; None for no sinks.
        dropout: probability that a weight is zeroed; remaining weights are scaled by 1/(1 − dropout).
        need_weights: return the weights too; affects only speed.
        path: "reference" writes equation 1 out, "fast" calls torch's kernels, "auto" chooses.

    Returns:
        The output, zero in fully masked rows, and the weights if wanted.

    Raises:
        ValueError: head counts or shapes do not fit, the mask is not boolean, the bias is not floating
            point, or only the reference path can compute the call and `path` is "fast".

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1; shared heads: Ainslie et al. 2023,
    arXiv 2305.13245; soft caps: Gemma Team 2024, arXiv 2408.00118, section 2; sinks: OpenAI 2025, arXiv
    2508.10925, section 2.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    semantics = Semantics(scale, soft_cap=soft_cap, sinks=sinks)
    given = Inputs(q, k, v, mask, bias, causal, semantics, dropout)
    return compute_attention(given, need_weights, path)


def compute_attention(given: Inputs, need_weights: bool, path: Path) -> Attended:
    """Compute `attention` of prepared inputs, as a layer calls it."""
    given.check()
    plan = make_plan(given, need_weights, path)
    if plan.path == "written out in pieces":
        return Attended(in_pieces(given), None)
    if plan.is_written_out:
        output, weights = written_out(given)
        return Attended(output, weights if need_weights else None)
    tensors, options = _prepare(plan, given)
    output = F.scaled_dot_product_attention(*tensors, **options)
    return Attended(_restore(plan, output, given), None)


def explain_inputs(given: Inputs, need_weights: bool, path: Path) -> Explanation:
    """Return the implementation that `compute_attention` would choose for these arguments, without the call.

    The choice depends on sizes, dtypes, devices and memory layout of the tensors, and on whether gradients
    are recorded: ask under the conditions of the real call. The kernel is torch's own answer for the same
    tensors.
    """
    given.check()
    plan = make_plan(given, need_weights, path)
    kernel: Kernel = "batched products"
    if not plan.is_written_out:
        tensors, options = _prepare(plan, given)
        # torch lacks a public function for its choice of kernel.
        choice = torch._fused_sdp_choice(*tensors, **options)
        kernel = _KERNELS.get(choice, "the device's own")
    return Explanation(plan.path, plan.heads, kernel, reason(plan, kernel, given))


def written_out(given: Inputs) -> tuple[Tensor, Tensor]:
    """Compute output and weights by the steps; the returned weights are before dropout."""
    weights = walk(QUICK_WEIGHT_STEPS, given.q, given)
    return MIX.run(weights, given), weights


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
    room = thresholds.BYTES_OF_A_PIECE // (
        (key_len + 4 * max(d_k, v.shape[3])) * q.element_size()
    )
    rows = even_parts(query_len, room // together)
    heads = even_parts(num_heads // together, room // (query_len * together)) * together
    sentences = even_parts(batch, room // (query_len * num_heads))
    for b, h, i in itertools.product(
        range(0, batch, sentences),
        range(0, num_heads, heads),
        range(0, query_len, rows),
    ):
        of_queries = slice(b, b + sentences), slice(h, h + heads), slice(i, i + rows)
        of_keys = (
            of_queries[0],
            slice(h // together, (h + heads) // together) if alike else slice(None),
        )
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
    """Return the size of even parts of `length`: the fewest parts with at most `room` entries."""
    return -(-length // -(-length // max(1, room)))


def _prepare(
    plan: AttentionPlan, given: Inputs
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return the tensors and the options for torch's fused operation."""
    q = given.q
    k = given.k
    v = given.v
    bias = given.bias
    batch, num_heads, query_len, d_k = q.shape
    # torch aligns its causal mask to the first key, triptych to the last key.
    by_flag = (
        given.causal and given.mask is None and bias is None and query_len == k.shape[2]
    )
    added = (
        None
        if by_flag
        else combined_mask(given.mask, given.causal, query_len, k.shape[2], q.device)
    )
    if bias is not None:
        # The kernel for CPUs refuses a mask with `requires_grad`, even if no gradient is recorded.
        bias = (bias if torch.is_grad_enabled() else bias.detach()).to(q.dtype)
        added = bias if added is None else bias.masked_fill(~added, -math.inf)
    if (
        added is not None and added.dim() < 4
    ):  # the kernel for CPUs accepts 2 or 4 dimensions
        added = added[(None,) * (4 - added.dim())]

    if plan.path == "fused, padded":
        missing = v.shape[3] - d_k
        if missing > 0:
            q = F.pad(q, (0, missing))
            k = F.pad(k, (0, missing))
        else:
            v = F.pad(v, (0, -missing))

    grouped_by_kernel = plan.heads == "grouped by the kernel"
    if plan.heads == "grouped by rows":
        num_groups = k.shape[1]
        q = q.reshape(batch, num_groups, num_heads // num_groups, q.shape[3])
        if added is not None and added.shape[1] > 1:
            added = added.reshape(
                added.shape[0], num_groups, num_heads // num_groups, added.shape[3]
            )
    elif plan.heads == "expanded":
        common = given.common_heads if q.is_cpu else num_heads
        shared = k is v
        k = _repeat_heads(k, common)
        v = k if shared else _repeat_heads(v, common)
        if common < num_heads:
            grouped_by_kernel = True
    by = {
        "scale": given.semantics.scale,
        "is_causal": by_flag,
        "enable_gqa": grouped_by_kernel,
    }
    return (q, k, v), {"attn_mask": added, **by}


def _restore(plan: AttentionPlan, output: Tensor, given: Inputs) -> Tensor:
    """Undo the padding and the grouping of `_prepare` in the output."""
    q = given.q
    v = given.v
    if plan.path == "fused, padded":
        output = output[..., : v.shape[3]]
    if plan.heads == "grouped by rows":
        output = output.reshape(q.shape[0], q.shape[1], 1, v.shape[3])
    return output


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    if x.shape[1] == 1:  # a view without a copy
        return x.expand(-1, num_heads, -1, -1)
    return (
        x
        if x.shape[1] == num_heads
        else x.repeat_interleave(num_heads // x.shape[1], dim=1)
    )


def four_way_attention(
    Q: Float[Tensor, "*batch query_len d_k"],
    K: Float[Tensor, "*batch key_len d_k"],
    V: Float[Tensor, "*batch key_len d_v"],
    W: Float[Tensor, "*batch w_len d_v"],
) -> Float[Tensor, "*batch query_len w_len"]:
    """Compute `softmax(Q Kᵀ / √d_k) V Wᵀ / √d_k`: outputs of attention, scored against a fourth sequence.

    The formula is symmetric: two products, `Q Kᵀ` and `V Wᵀ`. The result is a matrix of scores, with an
    entry for every pair of a query and a row of W, not a vector of fixed width per token. Use it to point
    at, or to align with, another sequence.

    Args:
        Q: queries.
        K: keys.
        V: values.
        W: rows compared with the outputs of attention, W = Y W^W for a sequence Y.

    Raises:
        ValueError: widths or lengths do not fit; the message names the sizes.
    """
    if Q.shape[-1] != K.shape[-1]:
        raise ValueError(
            f"Q has width {Q.shape[-1]} and K {K.shape[-1]}: they must be equal"
        )
    if V.shape[-1] != W.shape[-1]:
        raise ValueError(
            f"V has width {V.shape[-1]} and W {W.shape[-1]}: they must be equal"
        )
    if K.shape[-2] != V.shape[-2]:
        raise ValueError(
            f"K has {K.shape[-2]} rows and V {V.shape[-2]}: one of each a token"
        )
    # Both factors are 1/√d_k: d_v does not enter.
    scale = 1 / math.sqrt(Q.shape[-1])
    weights = (Q @ K.mT * scale).softmax(dim=-1)
    return weights @ V @ W.mT * scale
