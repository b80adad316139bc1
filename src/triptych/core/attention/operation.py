"""The operation itself: equation 1 of the paper, written out and through torch's kernels.

    Attention(Q, K, V) = softmax(Q Kᵀ / √d_k + bias) V

Both paths take the same arguments and give the same numbers and gradients (the tolerances are in
`tests/tolerances.py`); only the written-out one can return the weights, drop some of them, cap the scores or
have sinks. Written out in pieces, it holds few of the weights at a time.
`planning` chooses between them; `explain_inputs` puts what it chose into words.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

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
from triptych.core.attention.written_out import combined_mask, in_pieces, written_out

_KERNELS: dict[int, Kernel] = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


class Attended(NamedTuple):
    """The result of attention."""

    output: Float[Tensor, "batch num_heads query_len d_v"]
    # before dropout; None unless wanted
    weights: Float[Tensor, "batch num_heads query_len key_len"] | None


class Explanation(NamedTuple):
    """How a call of `attention` is computed, and why."""

    # equation 1 written out, which holds all the weights; the same for a few sentences, heads or queries at a
    # time, which holds those; torch's fused operation; or the latter with d_k or d_v filled up with zeros to
    # the wider of the two
    path: Implementation
    # how query heads read the heads of keys and values. "grouped by rows": those that share one lie below
    # each other as rows of one product, so that it is read once. "grouped by the kernel": torch's
    # `enable_gqa`. "expanded": repeated to a common number, without a copy where there is a single one
    heads: HeadGrouping
    # what runs. "math" holds all the weights, as "batched products" do; the others need memory linear in the
    # lengths
    kernel: Kernel
    reason: str  # one sentence, with the numbers


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
    """Scaled dot-product attention.

    With fewer key heads or value heads than query heads, consecutive query heads share one: head i
    reads key head `i // (num_heads / num_key_heads)`, and the value head of the same number. The two numbers
    need not agree.

    Args:
        q: queries.
        k: keys.
        v: values; d_v need not equal d_k. May be the very tensor that `k` is.
        mask: boolean, True = may attend, broadcasts to `[batch, num_heads, query_len, key_len]`.
        bias: finite numbers added to the scaled scores, broadcast like `mask`; gradients reach it.
        causal: a query sees only its own position and earlier ones; the queries are the last
            `query_len` positions of the keys. Combines with `mask` and `bias`.
        scale: what the products of queries and keys are multiplied by; 1/√d_k if None.
        soft_cap: c where scores s, with their bias, become c · tanh(s / c); None if they do not.
        sinks: a score for each head that takes part in the softmax and moves nothing; None without.
        dropout: probability that a weight is zeroed, the others scaled up by 1/(1 − dropout).
        need_weights: also return the weights. Changes nothing else but the speed.
        path: "reference" writes equation 1 out, "fast" calls torch's kernels, "auto" chooses.

    Returns:
        The output, zero in rows that may attend to nothing, and the weights if wanted.

    Raises:
        ValueError: head counts or shapes that do not fit, a mask that is not boolean, a bias that is
            not floating point, or the fast path called for something that only the reference path can do.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1; shared heads: Ainslie et al. 2023,
    arXiv 2305.13245; soft caps: Gemma Team 2024, arXiv 2408.00118, section 2; sinks: OpenAI 2025, arXiv
    2508.10925, section 2.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    semantics = Semantics(scale, soft_cap=soft_cap, sinks=sinks)
    given = Inputs(q, k, v, mask, bias, causal, semantics, dropout)
    return compute_attention(given, need_weights, path)


def compute_attention(given: Inputs, need_weights: bool, path: Path) -> Attended:
    """`attention` of inputs that are put together already, as a layer has them."""
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
    """What `compute_attention` does when called with these arguments, without doing it.

    The choice depends on the tensors' sizes, dtypes, devices and memory layout, and on whether
    gradients are recorded: ask under the conditions of the real call. The kernel is what torch
    itself answers for the tensors that it would be handed.
    """
    given.check()
    plan = make_plan(given, need_weights, path)
    kernel: Kernel = "batched products"
    if not plan.is_written_out:
        tensors, options = _prepare(plan, given)
        choice = torch._fused_sdp_choice(*tensors, **options)
        kernel = _KERNELS.get(choice, "the device's own")
    return Explanation(plan.path, plan.heads, kernel, reason(plan, kernel, given))


def _prepare(plan: AttentionPlan, given: Inputs) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """The tensors that torch's fused operation is handed, and its options."""
    q = given.q
    k = given.k
    v = given.v
    bias = given.bias
    batch, num_heads, query_len, d_k = q.shape
    # torch aligns its causal mask to the first key, ours to the last.
    by_flag = given.causal and given.mask is None and bias is None and query_len == k.shape[2]
    added = None if by_flag else combined_mask(given.mask, given.causal, query_len, k.shape[2], q.device)
    if bias is not None:
        # The kernel for CPUs refuses what requires a gradient, even where none is recorded.
        bias = (bias if torch.is_grad_enabled() else bias.detach()).to(q.dtype)
        added = bias if added is None else bias.masked_fill(~added, -math.inf)
    if added is not None and added.dim() < 4:  # the kernel for CPUs takes two dimensions or four
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
            added = added.reshape(added.shape[0], num_groups, num_heads // num_groups, added.shape[3])
    elif plan.heads == "expanded":
        common = given.common_heads if q.is_cpu else num_heads
        shared = k is v
        k = _repeat_heads(k, common)
        v = k if shared else _repeat_heads(v, common)
        if common < num_heads:
            grouped_by_kernel = True
    by = {"scale": given.semantics.scale, "is_causal": by_flag, "enable_gqa": grouped_by_kernel}
    return (q, k, v), {"attn_mask": added, **by}


def _restore(plan: AttentionPlan, output: Tensor, given: Inputs) -> Tensor:
    """The output that belongs to the queries and values as they were before `_prepare`."""
    q = given.q
    v = given.v
    if plan.path == "fused, padded":
        output = output[..., : v.shape[3]]
    if plan.heads == "grouped by rows":
        output = output.reshape(q.shape[0], q.shape[1], 1, v.shape[3])
    return output


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    if x.shape[1] == 1:  # no copy: all read the same memory
        return x.expand(-1, num_heads, -1, -1)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def four_way_attention(
    Q: Float[Tensor, "*batch query_len d_k"],
    K: Float[Tensor, "*batch key_len d_k"],
    V: Float[Tensor, "*batch key_len d_v"],
    W: Float[Tensor, "*batch w_len d_v"],
) -> Float[Tensor, "*batch query_len w_len"]:
    """`softmax(Q Kᵀ / √d_k) V Wᵀ / √d_k`: what attention reads, scored against a fourth sequence.

    It is symmetric in form (two products of two sequences each) but its result is a matrix of
    scores, one for every pair of a query and a row of W, not a vector of fixed width a token. It
    serves where such scores are wanted (pointing at, or aligning with, another sequence).

    Args:
        Q: queries.
        K: keys.
        V: values.
        W: what the attended values are compared with, W = Y W^W for some sequence Y.

    Raises:
        ValueError: widths or lengths that do not fit, with the numbers.
    """
    if Q.shape[-1] != K.shape[-1]:
        raise ValueError(f"Q has width {Q.shape[-1]} and K {K.shape[-1]}: they must be equal")
    if V.shape[-1] != W.shape[-1]:
        raise ValueError(f"V has width {V.shape[-1]} and W {W.shape[-1]}: they must be equal")
    if K.shape[-2] != V.shape[-2]:
        raise ValueError(f"K has {K.shape[-2]} rows and V {V.shape[-2]}: one of each a token")
    scale = 1 / math.sqrt(Q.shape[-1])
    weights = (Q @ K.mT * scale).softmax(dim=-1)
    return weights @ V @ W.mT * scale
