"""Inputs of `attention`, and the choice of its implementation with the reason."""

from dataclasses import fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from triptych import thresholds
from triptych.core.algebra.semantics import Semantics

Path = Literal["auto", "reference", "fast"]
Implementation = Literal[
    "written out", "written out in pieces", "fused", "fused, padded"
]
HeadGrouping = Literal[
    "one to one", "grouped by rows", "grouped by the kernel", "expanded"
]
Kernel = Literal[
    "batched products", "flash", "memory-efficient", "cudnn", "math", "the device's own"
]


class Inputs(NamedTuple):
    """Arguments of `attention`, which uses scale, scores, soft cap and sinks of the semantics."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    semantics: Semantics
    dropout: float

    def check(self) -> None:
        """Raise ValueError unless shapes, dtypes and values fit together."""
        # Keys and values share batch and length; head counts of keys and values divide that of queries.
        batch, num_heads, query_len, d_k = self.q.shape
        key_batch, key_heads, key_len, key_width = self.k.shape
        value_batch, value_heads, value_len, _ = self.v.shape
        if d_k != key_width:
            raise ValueError(
                f"queries have width {d_k} and keys {key_width}: they must be equal"
            )
        if key_batch != value_batch or key_len != value_len:
            raise ValueError(
                f"keys {list(self.k.shape)} and values {list(self.v.shape)} must agree in batch size and "
                "length"
            )
        if batch != key_batch:
            raise ValueError(
                f"queries have batch size {batch} and keys {key_batch}: they must be equal"
            )
        if num_heads % key_heads:
            raise ValueError(
                f"{num_heads} query heads cannot share {key_heads} key heads evenly"
            )
        if num_heads % value_heads:
            raise ValueError(
                f"{num_heads} query heads cannot share {value_heads} value heads evenly"
            )
        if self.mask is not None:
            if self.mask.dtype != torch.bool:
                raise ValueError(
                    f"the mask is {self.mask.dtype}: it must be boolean, True = may attend"
                )
            _check_broadcasts("mask", self.mask, (batch, num_heads, query_len, key_len))
        if self.bias is not None:
            if not self.bias.dtype.is_floating_point:
                raise ValueError(
                    f"the bias is {self.bias.dtype}: it must be floating point, a mask is passed as mask"
                )
            _check_broadcasts("bias", self.bias, (batch, num_heads, query_len, key_len))
        soft_cap = self.semantics.soft_cap
        sinks = self.semantics.sinks
        if soft_cap is not None and not soft_cap > 0:
            raise ValueError(f"soft_cap is {soft_cap}: it must be above 0")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(
                f"sinks are {list(sinks.shape)}, and there are {num_heads} query heads"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"dropout is {self.dropout}: it must be at least 0 and below 1"
            )

    @property
    def common_heads(self) -> int:
        """Number of heads to which key heads and value heads are repeated.

        This is the larger count, or the number of query heads if the smaller count does not divide it.
        """
        counts = self.k.shape[1], self.v.shape[1]
        fewer = min(counts)
        more = max(counts)
        return more if more % fewer == 0 else self.q.shape[1]


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


_Why = Literal[
    "asked",
    "semantics",
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
# Fields of `Semantics` that torch's kernels compute, or that act before or after the kernel. With any other
# field the steps are written out.
_KERNEL_FIELDS = frozenset(
    {
        "scale",
        "kind",
        "q_norm",
        "k_norm",
        "v_norm",
        "clip",
        "rotary",
        "temperature",
        "bias",
        "window",
    }
    | {"chunk", "dropout", "gate"}
)
_BEYOND_KERNELS = tuple(
    each for each in fields(Semantics) if each.name not in _KERNEL_FIELDS
)
_WHY_BEYOND = {
    "scores": "no kernel of torch compares queries and keys in another way than by products",
    "soft cap": "no kernel of torch caps the scores",
    "sinks": "no kernel of torch knows scores that move nothing",
}


def beyond_kernels(semantics: Semantics) -> str | None:
    """Return the first field beyond torch's kernels, in words; None without such a field."""
    for each in _BEYOND_KERNELS:
        if getattr(semantics, each.name) is not each.default:
            return each.name.replace("_", " ")
    return None


class AttentionPlan(NamedTuple):
    """Implementation chosen for a call; see `Explanation`."""

    path: Implementation
    heads: HeadGrouping
    why: _Why

    @property
    def is_written_out(self) -> bool:
        """Return True if the call runs without torch's fused operation."""
        return self.path == "written out" or self.path == "written out in pieces"


def make_plan(given: Inputs, need_weights: bool, path: Path) -> AttentionPlan:
    """Choose the implementation of a call; raise ValueError if "fast" cannot compute the call."""
    why = "asked" if path == "reference" else _why_written_out(given, need_weights)
    if path == "fast":
        if why == "weights" or why == "dropout":
            raise ValueError(
                "the fast path can neither return the weights nor drop some: use path='auto' or 'reference'"
            )
        if why == "semantics":
            beyond = beyond_kernels(given.semantics)
            raise ValueError(
                f"the fast path has no {beyond}: use path='auto' or 'reference'"
            )
        why = None
    q = given.q
    k = given.k
    v = given.v
    _, num_heads, query_len, d_k = q.shape
    key_heads = k.shape[1]
    value_heads = v.shape[1]
    d_v = v.shape[3]
    one_to_one = num_heads == key_heads == value_heads
    if why is not None:
        in_pieces = why == "pieces" or (
            why == "semantics" and _many_and_untrained(given)
        )
        written: Implementation = (
            "written out in pieces" if in_pieces else "written out"
        )
        return AttentionPlan(
            written, "one to one" if one_to_one else "grouped by rows", why
        )

    on_cpu = q.is_cpu
    # The kernel for CPUs requires d_k = d_v; the math kernel would keep all weights in memory. The
    # memory-efficient kernel of GPUs accepts two widths.
    route: Implementation = "fused, padded" if on_cpu and d_k != d_v else "fused"
    heads: HeadGrouping
    if one_to_one:
        heads = "one to one"
    elif key_heads != value_heads:
        heads = "expanded"
    elif query_len == 1:
        # The cache is read once per group instead of once per head. Measured on 2 cores: equal at 64 keys,
        # 2.4 times as fast at 4,096 keys in float32, up to 16 times as fast in bfloat16.
        heads = "grouped by rows"
    elif on_cpu or _flash_on_gpu(given):
        heads = "grouped by the kernel"
    else:
        heads = "expanded"  # the memory-efficient kernel cannot group; the math kernel keeps all weights
    return AttentionPlan(route, heads, "asked" if path == "fast" else "kernel")


def _flash_on_gpu(given: Inputs) -> bool:
    """Return True if torch's flash kernel for GPUs can compute the call."""
    q = given.q
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] == given.v.shape[3]
        and given.mask is None
        and given.bias is None
        and (not given.causal or q.shape[2] == given.k.shape[2])
    )


def _why_written_out(given: Inputs, need_weights: bool) -> _Why | None:
    """Return the reason to write a call out; None to use torch's fused operation."""
    q = given.q
    k = given.k
    v = given.v
    bias = given.bias
    if need_weights:
        return "weights"
    if given.dropout > 0:
        return "dropout"
    if beyond_kernels(given.semantics) is not None:
        return "semantics"
    if not q.is_cpu:
        return None
    records = torch.is_grad_enabled()
    if bias is not None and records and bias.requires_grad:
        return "bias gradient"
    trains = records and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not trains and _pays_in_pieces(given):
        return "pieces"
    copied = _copied(given)
    if not copied:
        if trains:
            return (
                "short"
                if k.shape[2] <= _max_keys(q.dtype) and not _wide_or_many(q, k)
                else None
            )
        heads = k.shape[0] * k.shape[1]
        enough = (
            heads >= thresholds.MIN_HEADS_OF_A_BATCH
            and heads * k.shape[2] >= thresholds.MIN_KEYS_OF_ALL_HEADS
        )
        return (
            "one query"
            if q.shape[2] == 1 and q.dtype == torch.bfloat16 and enough
            else None
        )
    # Up to this number of queries, weights are smaller than padded or repeated keys and values, and faster:
    # 1.3 to 30 times at one query, where every token would copy a decoder's cache, and equal at the limit (2
    # cores, float32, 64 and 512 keys, (d_k, d_v) = (64, 32), (128, 64), (512, 64)). Beyond the limit, memory
    # decides: at (512, 64) the kernel takes 1.4 times as long, but keeps no weights.
    if q.shape[1] * q.shape[2] <= copied:
        return "few queries"
    return "short, unlike" if k.shape[2] <= _max_keys(q.dtype) else None


def _wide_or_many(q: Tensor, k: Tensor) -> bool:
    """Return True if torch's kernel is faster for few keys as well: wide heads, or many weights in all."""
    batch, num_heads, query_len, d_k = q.shape
    many = batch * num_heads * query_len * k.shape[2] >= thresholds.MANY_WEIGHTS
    return q.dtype != torch.bfloat16 and (many or d_k >= thresholds.WIDE_HEADS)


def _pays_in_pieces(given: Inputs) -> bool:
    """Return True if bfloat16 products in pieces are faster than torch's kernel for CPUs."""
    q = given.q
    num_keys = given.k.shape[2]
    batch, num_heads, query_len, d_k = q.shape
    return (
        q.dtype == torch.bfloat16
        and query_len > 1
        and min(d_k, given.v.shape[3]) >= thresholds.MIN_WIDTH_IN_PIECES
        and batch * num_heads * query_len * num_keys * d_k
        >= thresholds.MIN_PRODUCTS_IN_PIECES
        and (not given.causal or num_keys <= thresholds.MAX_KEYS_CAUSAL_IN_PIECES)
        and not torch.compiler.is_compiling()
    )


def _many_and_untrained(given: Inputs) -> bool:
    """Return True if the weights of all queries exceed `BYTES_OF_A_PIECE` and no gradient needs them."""
    tensors = given.q, given.k, given.v, given.bias, given.semantics.sinks
    recorded = any(t is not None and t.requires_grad for t in tensors)
    if (torch.is_grad_enabled() and recorded) or torch.compiler.is_compiling():
        return False
    batch, num_heads, query_len, _ = given.q.shape
    size = batch * num_heads * query_len * given.k.shape[2] * given.q.element_size()
    return query_len > 1 and size > thresholds.BYTES_OF_A_PIECE


def _copied(given: Inputs) -> int:
    """Count the values per token of padded or repeated keys and values for the kernel for CPUs."""
    _, key_heads, _, d_k = given.k.shape
    _, value_heads, _, d_v = given.v.shape
    if d_k == d_v and key_heads == value_heads:
        return 0
    width = max(d_k, d_v)
    common = given.common_heads
    copied = 0
    # The copy of repeated heads includes the padding.
    for heads, own_width in ((key_heads, d_k), (value_heads, d_v)):
        if 1 < heads < common:
            copied += common * width
        elif own_width < width:
            copied += heads * width
    return copied


def _max_keys(dtype: torch.dtype) -> int:
    """Return the largest number of keys at which explicit products are faster on a CPU."""
    return thresholds.MAX_KEYS_WRITTEN_OUT.get(
        dtype, thresholds.MAX_KEYS_WRITTEN_OUT_OTHERWISE
    )


def reason(plan: AttentionPlan, kernel: Kernel, given: Inputs) -> str:
    """Return one sentence with the reason for a plan and the sizes."""
    q = given.q
    num_key_heads = given.k.shape[1]
    batch, num_heads, query_len, d_k = q.shape
    _, num_value_heads, num_keys, d_v = given.v.shape
    beyond = beyond_kernels(given.semantics) or ""
    # Sizes that the reasons below mention.
    held = f"{batch} × {num_heads} × {query_len} × {num_keys} weights"
    limit = f"{_max_keys(q.dtype)} keys in {str(q.dtype).removeprefix('torch.')}"
    because = {
        "asked": "the path was chosen by the caller",
        "weights": "the weights are wanted, and no kernel of torch returns them",
        "semantics": _WHY_BEYOND.get(beyond, f"no kernel of torch computes {beyond}"),
        "dropout": f"dropout is {given.dropout:g} and must draw the same with and without the weights",
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
        f"{num_key_heads} of keys and {num_value_heads} of values: {because[plan.why]}."
    )
