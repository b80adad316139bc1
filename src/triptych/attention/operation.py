"""The operation itself: equation 1 of the paper, written out and through torch's kernels.

    Attention(Q, K, V) = softmax(Q Kᵀ / √d_k + bias) V

Both paths take the same arguments and give the same numbers and gradients (the tolerances are in
`tests/tolerances.py`); only the written-out one can return the weights, drop some of them, cap the scores or
have sinks. Written out in pieces, it holds few of the weights at a time.
`_plan` chooses between them and says how; `explain_attention` puts what it chose into words.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from triptych import thresholds
from triptych.attention.written_out import Special, combined_mask, in_pieces, written_out

Path = Literal["auto", "reference", "fast"]
Implementation = Literal["written out", "written out in pieces", "fused", "fused, padded"]
HeadGrouping = Literal["one to one", "grouped by rows", "grouped by the kernel", "expanded"]
Kernel = Literal["batched products", "flash", "memory-efficient", "cudnn", "math", "the device's own"]

_KERNELS: dict[int, Kernel] = {
    SDPBackend.MATH.value: "math",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}


class Attended(NamedTuple):
    """What attention gives back.

    Attributes:
        output: `[batch, num_heads, query_len, d_v]`.
        weights: `[batch, num_heads, query_len, key_len]`, before dropout; None unless asked for.
    """

    output: Float[Tensor, "batch num_heads query_len d_v"]
    weights: Float[Tensor, "batch num_heads query_len key_len"] | None


class Explanation(NamedTuple):
    """How a call of `attention` is computed, and why.

    Attributes:
        path: equation 1 written out, which holds all the weights; the same for a few sentences, heads or
            queries at a time, which holds those; torch's fused operation; or the latter with d_k or d_v
            filled up with zeros to the wider of the two.
        heads: how query heads read the heads of keys and values. "grouped by rows": those that share
            one lie below each other as rows of one product, so that it is read once. "grouped by
            the kernel": torch's `enable_gqa`. "expanded": repeated to a common number, without a
            copy where there is a single one.
        kernel: what runs. "math" holds all the weights, as "batched products" do; the others need
            memory linear in the lengths.
        reason: one sentence, with the numbers.
    """

    path: Implementation
    heads: HeadGrouping
    kernel: Kernel
    reason: str


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
    reads key head `i // (num_heads / num_key_heads)`, and likewise its value head. The two numbers
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
        The output, zero in rows that may attend to nothing, and the weights if asked for.

    Raises:
        ValueError: head counts or shapes that do not fit, a mask that is not boolean, a bias that is
            not floating point, or the fast path asked for something that only the reference path can do.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.1; shared heads: Ainslie et al. 2023,
    arXiv 2305.13245; soft caps: Gemma Team 2024, arXiv 2408.00118, section 2; sinks: OpenAI 2025, arXiv
    2508.10925, section 2.
    """
    special = None if soft_cap is None and sinks is None else Special(soft_cap, sinks)
    _check(q, k, v, mask, bias, special, dropout)
    plan = _plan(q, k, v, mask, bias, special, causal, dropout, need_weights, path)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if plan.path == "written out in pieces":
        return Attended(in_pieces(q, k, v, mask, bias, special, causal, scale), None)
    if plan.path != "written out":
        call = _prepare(plan, q, k, v, mask, bias, causal)
        output = F.scaled_dot_product_attention(
            call.q,
            call.k,
            call.v,
            attn_mask=call.mask,
            is_causal=call.is_causal,
            scale=scale,
            enable_gqa=call.enable_gqa,
        )
        return Attended(_restore(plan, output, q, v), None)
    output, weights = written_out(q, k, v, mask, bias, special, causal, scale, dropout)
    return Attended(output, weights if need_weights else None)


def explain_attention(
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
) -> Explanation:
    """What `attention` does when called with these arguments, without doing it.

    The choice depends on the tensors' sizes, dtypes, devices and memory layout, and on whether
    gradients are recorded: ask under the conditions of the real call. The kernel is what torch
    itself answers for the tensors that it would be handed.

    Args:
        q: as in `attention`; likewise all others.
        k: keys.
        v: values.
        mask: boolean, True = may attend.
        bias: added to the scores.
        causal: a query sees only its own position and earlier ones.
        scale: what the products are multiplied by.
        soft_cap: of the scores.
        sinks: a score of each head that moves nothing.
        dropout: probability that a weight is zeroed.
        need_weights: whether the weights are wanted.
        path: "auto", "reference" or "fast".

    Raises:
        ValueError: as `attention`.
    """
    special = None if soft_cap is None and sinks is None else Special(soft_cap, sinks)
    _check(q, k, v, mask, bias, special, dropout)
    plan = _plan(q, k, v, mask, bias, special, causal, dropout, need_weights, path)
    kernel: Kernel = "batched products"
    if not plan.path.startswith("written out"):
        call = _prepare(plan, q, k, v, mask, bias, causal)
        choice = torch._fused_sdp_choice(
            call.q,
            call.k,
            call.v,
            attn_mask=call.mask,
            is_causal=call.is_causal,
            scale=scale,
            enable_gqa=call.enable_gqa,
        )
        kernel = _KERNELS.get(choice, "the device's own")
    return Explanation(plan.path, plan.heads, kernel, _reason(plan, kernel, q, k, v, dropout))


_Why = Literal[
    "asked",
    "soft cap",
    "sinks",
    "weights",
    "dropout",
    "bias gradient",
    "short",
    "short, unlike",
    "few queries",
    "one query",
    "pieces",
    "kernel",
]


class _Plan(NamedTuple):
    path: Implementation
    heads: HeadGrouping
    why: _Why


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    special: Special | None,
    causal: bool,
    dropout: float,
    need_weights: bool,
    path: Path,
) -> _Plan:
    why = (
        _why_written_out(q, k, v, bias, special, causal, dropout, need_weights)
        if path != "reference"
        else "asked"
    )
    if path == "fast":
        if why == "weights" or why == "dropout":
            raise ValueError(
                "the fast path can neither return the weights nor drop some: use path='auto' or 'reference'"
            )
        if special is not None:
            raise ValueError("the fast path has neither soft caps nor sinks: use path='auto' or 'reference'")
        why = None
    _, num_heads, query_len, d_k = q.shape
    key_heads, value_heads, d_v = k.shape[1], v.shape[1], v.shape[3]
    one_to_one = num_heads == key_heads == value_heads
    if why is not None:
        special_only = why == "soft cap" or why == "sinks"
        is_cut = why == "pieces" or (special_only and _many_and_untrained(q, k, v, bias, special))
        written: Implementation = "written out in pieces" if is_cut else "written out"
        return _Plan(written, "one to one" if one_to_one else "grouped by rows", why)

    on_cpu = q.is_cpu
    # The kernel for CPUs knows one width only; torch's other choice there would hold all the
    # weights. On a GPU the memory-efficient kernel takes two widths as they are.
    route: Implementation = "fused, padded" if on_cpu and d_k != d_v else "fused"
    heads: HeadGrouping
    if one_to_one:
        heads = "one to one"
    elif key_heads != value_heads:
        heads = "expanded"
    elif query_len == 1:
        # The cache is read once a group instead of once a head: on 2 cores, from level at 64 keys to
        # 2.4 times as fast at 4,096 in float32, and up to 16 times in bfloat16.
        heads = "grouped by rows"
    elif on_cpu or _flash_on_gpu(q, k, v, mask, bias, causal):
        heads = "grouped by the kernel"
    else:
        heads = "expanded"  # the memory-efficient kernel does not group, and math holds the weights
    return _Plan(route, heads, "asked" if path == "fast" else "kernel")


def _flash_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool
) -> bool:
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] == v.shape[3]
        and mask is None
        and bias is None
        and (not causal or q.shape[2] == k.shape[2])
    )


def _why_written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    special: Special | None,
    causal: bool,
    dropout: float,
    need_weights: bool,
) -> _Why | None:
    if need_weights:
        return "weights"
    if dropout > 0:
        return "dropout"
    if special is not None:
        return "sinks" if special.soft_cap is None else "soft cap"
    if not q.is_cpu:
        return None
    records = torch.is_grad_enabled()
    if bias is not None and records and bias.requires_grad:
        return "bias gradient"
    trains = records and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not trains and _pays_in_pieces(q, k, v, causal):
        return "pieces"
    copied = _copied(q, k, v)
    if not copied:
        if trains:
            return "short" if k.shape[2] <= _max_keys(q.dtype) and not _wide_or_many(q, k) else None
        heads = k.shape[0] * k.shape[1]
        enough = (
            heads >= thresholds.MIN_HEADS_OF_A_BATCH
            and heads * k.shape[2] >= thresholds.MIN_KEYS_OF_ALL_HEADS
        )
        return "one query" if q.shape[2] == 1 and q.dtype == torch.bfloat16 and enough else None
    # Up to here the weights are fewer numbers than the copies, and faster: 1.3 to 30 times at one
    # query, where a decoder's cache would be copied at every token, level at the limit (2 cores,
    # float32, 64 and 512 keys, d_k and d_v of 64 and 32, 128 and 64, 512 and 64). Beyond, memory
    # counts: with 512 and 64 the kernel takes 1.4 times as long, but holds no weights.
    if q.shape[1] * q.shape[2] <= copied:
        return "few queries"
    return "short, unlike" if k.shape[2] <= _max_keys(q.dtype) else None


def _wide_or_many(q: Tensor, k: Tensor) -> bool:
    batch, num_heads, query_len, d_k = q.shape
    many = batch * num_heads * query_len * k.shape[2] >= thresholds.MANY_WEIGHTS
    return q.dtype != torch.bfloat16 and (many or d_k >= thresholds.WIDE_HEADS)


def _pays_in_pieces(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    batch, num_heads, query_len, d_k = q.shape
    return (
        q.dtype == torch.bfloat16
        and query_len > 1
        and min(d_k, v.shape[3]) >= thresholds.MIN_WIDTH_IN_PIECES
        and batch * num_heads * query_len * k.shape[2] * d_k >= thresholds.MIN_PRODUCTS_IN_PIECES
        and (not causal or k.shape[2] <= thresholds.MAX_KEYS_CAUSAL_IN_PIECES)
        and not torch.compiler.is_compiling()
    )


def _many_and_untrained(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, special: Special | None
) -> bool:
    """Whether the weights of all queries would take much room that no gradient needs."""
    recorded = any(t is not None and t.requires_grad for t in (q, k, v, bias, special and special.sinks))
    if (torch.is_grad_enabled() and recorded) or torch.compiler.is_compiling():
        return False
    batch, num_heads, query_len, _ = q.shape
    size = batch * num_heads * query_len * k.shape[2] * q.element_size()
    return query_len > 1 and size > thresholds.BYTES_OF_A_PIECE


def _copied(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Of each token, how many numbers the kernel for CPUs would be given as padded or repeated copies."""
    _, key_heads, _, d_k = k.shape
    _, value_heads, _, d_v = v.shape
    if d_k == d_v and key_heads == value_heads:
        return 0
    width, common = max(d_k, d_v), _common_heads(q, k, v)
    copied = 0
    for heads, own_width in ((key_heads, d_k), (value_heads, d_v)):
        if 1 < heads < common:
            copied += common * width
        elif own_width < width:
            copied += heads * width
    return copied


def _common_heads(q: Tensor, k: Tensor, v: Tensor) -> int:
    """A number that the heads of keys and of values can both be repeated to."""
    fewer, more = min(k.shape[1], v.shape[1]), max(k.shape[1], v.shape[1])
    return more if more % fewer == 0 else q.shape[1]


def _max_keys(dtype: torch.dtype) -> int:
    return thresholds.MAX_KEYS_WRITTEN_OUT.get(dtype, thresholds.MAX_KEYS_WRITTEN_OUT_OTHERWISE)


def _reason(plan: _Plan, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> str:
    batch, num_heads, query_len, d_k = q.shape
    num_keys, d_v = v.shape[2:]
    held = f"{batch} × {num_heads} × {query_len} × {num_keys} weights"
    limit = f"{_max_keys(q.dtype)} keys in {str(q.dtype).removeprefix('torch.')}"
    because = {
        "asked": "the path was asked for",
        "weights": "the weights were asked for, and no kernel of torch returns them",
        "soft cap": "no kernel of torch caps the scores",
        "sinks": "no kernel of torch knows scores that move nothing",
        "dropout": f"dropout is {dropout:g} and must draw the same whether or not the weights are asked for",
        "bias gradient": "torch has no kernel for CPUs but the math one that gives a bias its gradient",
        "short": f"with gradients recorded on a CPU, batched products are faster up to about {limit}",
        "pieces": "on a CPU, in bfloat16 without gradients, products of some megabytes of weights are faster",
        "one query": "on a CPU products are faster for one query of each head in bfloat16",
        "short, unlike": f"torch's kernel for CPUs would need copies, which do not pay up to about {limit}",
        "few queries": f"the {held} take less room than the copies that torch's kernel for CPUs would need",
        "kernel": f"torch has only a kernel that holds the {held}"
        if kernel == "math"
        else f"torch has a kernel that does not hold the {held}",
    }
    return (
        f"query_len {query_len}, key_len {num_keys}, d_k {d_k}, d_v {d_v}, {num_heads} query heads on "
        f"{k.shape[1]} of keys and {v.shape[1]} of values: {because[plan.why]}."
    )


class _Call(NamedTuple):
    """What torch's fused operation is handed."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    enable_gqa: bool


def _prepare(
    plan: _Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
) -> _Call:
    batch, num_heads, query_len, d_k = q.shape
    key_len = k.shape[2]
    # torch aligns its causal mask to the first key, ours to the last.
    by_flag = causal and mask is None and bias is None and query_len == key_len
    added = None if by_flag else combined_mask(mask, causal, query_len, key_len, q.device)
    if bias is not None:
        # The kernel for CPUs refuses what requires a gradient, even where none is recorded.
        bias = (bias if torch.is_grad_enabled() else bias.detach()).to(q.dtype)
        added = bias if added is None else bias.masked_fill(~added, -math.inf)
    if added is not None and added.dim() < 4:  # the kernel for CPUs takes two dimensions or four
        added = added[(None,) * (4 - added.dim())]

    if plan.path == "fused, padded":
        missing = v.shape[3] - d_k
        if missing > 0:
            q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
        else:
            v = F.pad(v, (0, -missing))

    grouped_by_kernel = plan.heads == "grouped by the kernel"
    if plan.heads == "grouped by rows":
        num_groups = k.shape[1]
        q = q.reshape(batch, num_groups, num_heads // num_groups, q.shape[3])
        if added is not None and added.shape[1] > 1:
            added = added.reshape(added.shape[0], num_groups, num_heads // num_groups, added.shape[3])
    elif plan.heads == "expanded":
        common = _common_heads(q, k, v) if q.is_cpu else num_heads
        shared = k is v
        k = _repeat_heads(k, common)
        v = k if shared else _repeat_heads(v, common)
        if common < num_heads:
            grouped_by_kernel = True
    return _Call(q, k, v, added, by_flag, grouped_by_kernel)


def _restore(plan: _Plan, output: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """The output that belongs to the queries and values as they were before `_prepare`."""
    if plan.path == "fused, padded":
        output = output[..., : v.shape[3]]
    if plan.heads == "grouped by rows":
        output = output.reshape(q.shape[0], q.shape[1], 1, v.shape[3])
    return output


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    if x.shape[1] == 1:  # no copy: all read the same memory
        return x.expand(-1, num_heads, -1, -1)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    special: Special | None,
    dropout: float,
) -> None:
    batch, num_heads, query_len, d_k = q.shape
    key_batch, key_heads, key_len, key_width = k.shape
    value_batch, value_heads, value_len, _ = v.shape
    if d_k != key_width:
        raise ValueError(f"queries have width {d_k} and keys {key_width}: d_k must be one number")
    if key_batch != value_batch or key_len != value_len:
        raise ValueError(
            f"keys {list(k.shape)} and values {list(v.shape)} must agree in batch size and length"
        )
    if batch != key_batch:
        raise ValueError(f"queries have batch size {batch} and keys {key_batch}: it must be one number")
    if num_heads % key_heads:
        raise ValueError(f"{num_heads} query heads cannot share {key_heads} key heads evenly")
    if num_heads % value_heads:
        raise ValueError(f"{num_heads} query heads cannot share {value_heads} value heads evenly")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"the mask is {mask.dtype}: it must be boolean, True = may attend")
        _check_broadcasts("mask", mask, (batch, num_heads, query_len, key_len))
    if bias is not None:
        if not bias.dtype.is_floating_point:
            raise ValueError(f"the bias is {bias.dtype}: it must be floating point, a mask is passed as mask")
        _check_broadcasts("bias", bias, (batch, num_heads, query_len, key_len))
    if special is not None:
        cap, sinks = special
        if cap is not None and not cap > 0:
            raise ValueError(f"soft_cap is {cap}: it must be above 0")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks are {list(sinks.shape)}, and there are {num_heads} query heads")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}: it must be at least 0 and below 1")


def _check_broadcasts(name: str, x: Tensor, shape: tuple[int, int, int, int]) -> None:
    own = x.shape
    fits = len(own) <= 4
    for size, full in zip(reversed(own), reversed(shape), strict=False):
        fits = fits and (size == full or size == 1)
    if not fits:
        raise ValueError(
            f"the {name} {list(own)} does not broadcast to {list(shape)}, which is [batch, num_heads, "
            "query_len, key_len]"
        )
