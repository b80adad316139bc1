"""The steps of attention in order: one list for running, showing and explaining a layer.

    project    q = x W_Q, k = y W_K, v = y W_V           maps of the layer
    norm       norm of each head                         q_norm, k_norm, v_norm
    clip       clamp to ±clip                            clip
    rotate     rotary embedding of queries and keys      rotary
    gain       late gains of norms, on queries           q_norm, k_norm
    temper     factor of queries by position             temperature
    locate     bias and mask by position                 bias, window, chunk
    products   s = q kᵀ, or other scores                 scores
    scale      s · scale                                 scale
    bias       s + bias
    cap        c · tanh(s / c)                           soft_cap
    softmax    weights of visible keys and of a sink     kind, sinks
    mix        z = weights · v                           dropout
    gate       z · gate of the token                     gate
    output     Σ_i z_i W_O                               maps of the layer

The last column has the fields of `Semantics` of each step. A `SideStep` is a function of queries, keys or
values; a `ScoreStep` continues from queries to scores, weights and mixed values. `project` and `output` are
the maps: `Projections` of a layer, chains of `AttentionWeights`, packed maps of a decoder.

A layer caches keys and values between these steps: keys after `rotate`, or the input of the key map.
`MultiHeadAttention.forward` replaces the steps from `products` to `mix` by a kernel (`routes.py`).

A mask is boolean, True = may attend, and broadcasts to `[batch, num_heads, query_len, key_len]`. Outputs of
fully masked rows (without a True) are zero on every path.
"""

import math
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from triptych.core.algebra.semantics import HeadSide, Semantics
from triptych.core.attention.position_modules import TokenPositions
from triptych.core.attention.routes import Inputs
from triptych.literals import Activation

# Memory limit for scores other than products: a vector for each pair of query and key.
_BYTES_OF_PAIRS = 1 << 28


@dataclass(frozen=True, eq=False)
class Step(ABC):
    """A step of attention.

    Attributes:
        name: name in the list of this module.
        fields: fields of `Semantics` read by the step.
    """

    name: str
    fields: tuple[str, ...]


@final
@dataclass(frozen=True, eq=False)
class SideStep(Step):
    """A step on projected queries, keys or values, before they are compared.

    Attributes:
        sides: fields by name ("q", "k", "v"). A tensor without a set field stays unchanged.
        run: function of queries, keys or values, their name, the semantics and the token positions.
        is_linear: True if a factor of the input becomes a factor of the result.
        by_position: True if the result depends on the positions of the tokens.
    """

    sides: Mapping[HeadSide, tuple[str, ...]]
    run: Callable[[Tensor, HeadSide, Semantics, TokenPositions], Tensor]
    is_linear: bool
    by_position: bool = False


@final
@dataclass(frozen=True, eq=False)
class LocateStep(Step):
    """The step with the mask and the bias of the scores, by positions of queries and keys."""

    run: Callable[
        [Tensor, Tensor, Semantics, Tensor, Tensor], tuple[Tensor | None, Tensor | None]
    ]


@final
@dataclass(frozen=True, eq=False)
class ScoreStep(Step):
    """A step of a kernel, on queries, scores or weights."""

    run: Callable[[Tensor, Inputs], Tensor]


@final
@dataclass(frozen=True, eq=False)
class GateStep(Step):
    """The step from the inputs of the queries to the factors of mixed values."""

    run: Callable[[Tensor, Semantics], Tensor | None]


@runtime_checkable
class Watcher(Protocol):
    """A function of each step and its result."""

    def __call__(self, step: Step, value: Tensor) -> Tensor:
        """Return the value with which the walk continues."""


@runtime_checkable
class Tap(Protocol):
    """A hook on the activations of a layer: queries, keys, values, scores, weights and the input of W_O."""

    def __call__(self, name: Activation, value: Tensor, first: int | None) -> Tensor:
        """Return the activation with which the layer continues.

        `first` is the position of the first query among the keys; None in cross-attention.
        """


# Steps on queries, keys and values.


def norm(
    x: Tensor, side: HeadSide, semantics: Semantics, token_positions: TokenPositions
) -> Tensor:
    """Apply the norm of queries, keys or values."""
    own = {"q": semantics.q_norm, "k": semantics.k_norm, "v": semantics.v_norm}[side]
    return x if own is None else own(x)


def clip(
    x: Tensor, side: HeadSide, semantics: Semantics, token_positions: TokenPositions
) -> Tensor:
    """Clamp queries, keys or values."""
    return x if semantics.clip is None else x.clamp(-semantics.clip, semantics.clip)


def rotate(
    x: Tensor, side: HeadSide, semantics: Semantics, token_positions: TokenPositions
) -> Tensor:
    """Apply the rotary embedding to queries or keys."""
    return (
        x
        if side == "v" or semantics.rotary is None
        else token_positions.rotate(x, semantics.rotary)
    )


def gain(
    x: Tensor, side: HeadSide, semantics: Semantics, token_positions: TokenPositions
) -> Tensor:
    """Apply the late gains of the norms of queries and keys to rotated queries."""
    return semantics.apply_late_gains(x) if side == "q" else x


def temper(
    x: Tensor, side: HeadSide, semantics: Semantics, token_positions: TokenPositions
) -> Tensor:
    """Multiply rotated queries by the temperature of their positions."""
    if side != "q" or semantics.temperature is None:
        return x
    return semantics.temperature(x, token_positions.query_positions(x))


NORM = SideStep(
    "norm",
    ("q_norm", "k_norm", "v_norm"),
    {"q": ("q_norm",), "k": ("k_norm",), "v": ("v_norm",)},
    norm,
    is_linear=False,
)
CLIP = SideStep(
    "clip",
    ("clip",),
    {"q": ("clip",), "k": ("clip",), "v": ("clip",)},
    clip,
    is_linear=False,
)
ROTATE = SideStep(
    "rotate",
    ("rotary",),
    {"q": ("rotary",), "k": ("rotary",)},
    rotate,
    is_linear=True,
    by_position=True,
)
GAIN = SideStep(
    "gain", ("q_norm", "k_norm"), {"q": ("q_norm", "k_norm")}, gain, is_linear=True
)
TEMPER = SideStep(
    "temper",
    ("temperature",),
    {"q": ("temperature",)},
    temper,
    is_linear=True,
    by_position=True,
)
SIDE_STEPS = (NORM, CLIP, ROTATE, GAIN, TEMPER)
# The steps in two parts, before the rotation and from the rotation on.
BEFORE_ROTATION = SIDE_STEPS[: SIDE_STEPS.index(ROTATE)]
FROM_ROTATION = SIDE_STEPS[SIDE_STEPS.index(ROTATE) :]


def steps_on(side: HeadSide, semantics: Semantics) -> tuple[SideStep, ...]:
    """Return the steps applied to the queries, keys or values of a layer."""
    return tuple(
        step
        for step in SIDE_STEPS
        if any(
            getattr(semantics, field) is not None for field in step.sides.get(side, ())
        )
    )


def prepare(
    x: Tensor,
    side: HeadSide,
    semantics: Semantics,
    token_positions: TokenPositions,
    steps: tuple[SideStep, ...] = SIDE_STEPS,
) -> Tensor:
    """Walk the steps on projected queries, keys or values."""
    for step in steps:
        x = step.run(x, side, semantics, token_positions)
    return x


# The step between: positions.


def locate(
    q: Tensor, k: Tensor, semantics: Semantics, queries: Tensor, keys: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask by window and chunk, and the bias, for queries and keys at given positions."""
    bias = semantics.bias
    return semantics.visible(queries, keys), None if bias is None else bias(
        q, k, queries, keys
    )


LOCATE = LocateStep("locate", ("bias", "window", "chunk"), locate)


def compares_positions(semantics: Semantics) -> bool:
    """Return True if `LOCATE` gives a mask or a bias."""
    return any(getattr(semantics, field) is not None for field in LOCATE.fields)


# Steps of a kernel, from queries to mixed values.


def products(q: Tensor, given: Inputs) -> Tensor:
    """Compute the products of queries and keys, or the scores of `semantics.scores`."""
    k = given.k
    semantics = given.semantics
    if semantics.scores is not None:
        # Such scores may make a vector for each pair: the queries of a part are limited by memory.
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        a_query = q.shape[0] * k.shape[1] * k.shape[2] * k.shape[3] * k.element_size()
        step = max(1, _BYTES_OF_PAIRS // max(1, a_query))
        parts = [q[:, :, start : start + step] for start in range(0, q.shape[2], step)]
        return torch.cat([semantics.scores(part, k) for part in parts], dim=2)
    if q.shape[2] == 1 and k.is_cpu and k.dtype == torch.bfloat16:
        k = k.contiguous()  # for a view of a cache the product would make the copy, at a third of the speed
    return _grouped_product(q, k.transpose(-2, -1))


def scale(scores: Tensor, given: Inputs) -> Tensor:
    """Multiply products by the scale; leave other scores unchanged."""
    return (
        scores if given.semantics.scores is not None else scores * given.semantics.scale
    )


def scaled_products(q: Tensor, given: Inputs) -> Tensor:
    """Compute scaled products. Scaling the queries is cheaper than scaling the larger scores."""
    return products(
        q if given.semantics.scores is not None else q * given.semantics.scale, given
    )


def bias(scores: Tensor, given: Inputs) -> Tensor:
    """Add the bias of `locate`."""
    return scores if given.bias is None else scores + given.bias.to(scores.dtype)


def cap(scores: Tensor, given: Inputs) -> Tensor:
    """Apply the soft cap."""
    soft_cap = given.semantics.soft_cap
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def softmax(scores: Tensor, given: Inputs) -> Tensor:
    """Compute the softmax over visible keys and the sink; fully masked rows are 0."""
    sinks = given.semantics.sinks
    allowed = combined_mask(
        given.mask, given.causal, scores.shape[-2], scores.shape[-1], scores.device
    )
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


def mix(weights: Tensor, given: Inputs) -> Tensor:
    """Apply dropout to the weights, and sum the values with them as factors."""
    return _grouped_product(F.dropout(weights, given.dropout), given.v)


PRODUCTS = ScoreStep("products", ("scores",), products)
SCALE = ScoreStep("scale", ("scale",), scale)
BIAS = ScoreStep("bias", (), bias)
CAP = ScoreStep("cap", ("soft_cap",), cap)
SOFTMAX = ScoreStep("softmax", ("kind", "sinks"), softmax)
MIX = ScoreStep("mix", ("dropout",), mix)
# Steps from scaled products to the input of the softmax.
AFTER_SCALE = (BIAS, CAP)
# Steps from the input of the softmax to the weights.
TO_WEIGHTS = (SOFTMAX,)
WEIGHT_STEPS = (PRODUCTS, SCALE, *AFTER_SCALE, *TO_WEIGHTS)
KERNEL_STEPS = (*WEIGHT_STEPS, MIX)
# The same steps where the products are not observed.
_SCALED_PRODUCTS = ScoreStep("scale", ("scores", "scale"), scaled_products)
QUICK_SCORE_STEPS = (_SCALED_PRODUCTS, *AFTER_SCALE)
QUICK_WEIGHT_STEPS = (*QUICK_SCORE_STEPS, *TO_WEIGHTS)


def walk(
    steps: tuple[ScoreStep, ...],
    value: Tensor,
    given: Inputs,
    watch: Watcher | None = None,
) -> Tensor:
    """Walk steps of a kernel from a value, such as the queries; `watch` sees and may replace each result."""
    for step in steps:
        value = step.run(value, given)
        if watch is not None:
            value = watch(step, value)
    return value


def watch_with(tap: Tap, first: int | None) -> Watcher:
    """Make a watcher of a tap; `first` as in `Tap`."""

    def watch(step: Step, value: Tensor) -> Tensor:
        return tap(TAPPED[step.name], value, first) if step.name in TAPPED else value

    return watch


def compare(q: Tensor, k: Tensor, semantics: Semantics) -> Tensor:
    """Compute the scaled products of queries and keys, or other scores, without bias and soft cap.

    Consecutive query heads share a key head. The result is `[batch, num_heads, query_len, key_len]`.
    """
    return walk(
        (PRODUCTS, SCALE), q, Inputs(q, k, k, None, None, False, semantics, 0.0)
    )


# The step after the kernel.


def gate(x: Tensor, semantics: Semantics) -> Tensor | None:
    """Return the factors of mixed values, from the layer's input x; None for a layer without a gate."""
    return None if semantics.gate is None else semantics.gate(x)


GATE = GateStep("gate", ("gate",), gate)

# All steps between the maps.
STEPS: tuple[Step, ...] = (*SIDE_STEPS, LOCATE, *KERNEL_STEPS, GATE)
# Activation names of taps, by step.
TAPPED: Mapping[str, Activation] = {"cap": "scores", "softmax": "weights", "gate": "z"}


# Masks.


def is_causal(semantics: Semantics, given: bool | None) -> bool:
    """Return the given causality; that of the layer if None."""
    return semantics.kind == "causal" if given is None else given


def padding_mask(
    ids: Int[Tensor, "batch key_len"], pad_id: int
) -> Bool[Tensor, "batch 1 1 key_len"]:
    """Return a mask: True at tokens of `ids`, False at padding."""
    return (ids != pad_id)[:, None, None, :]


def causal_mask(
    query_len: int | torch.SymInt,
    key_len: int | torch.SymInt,
    device: torch.device | None = None,
) -> Bool[Tensor, "query_len key_len"]:
    """Return the causal mask: True at keys up to the position of the query.

    The queries are the *last* `query_len` of the `key_len` positions, so that the same mask serves training
    (equal lengths) and decoding with a cache (fewer queries than keys).
    """
    offset = key_len - query_len
    return torch.ones(query_len, key_len, dtype=torch.bool, device=device).tril(offset)


def combined_mask(
    mask: Tensor | None,
    causal: bool,
    query_len: int | torch.SymInt,  # SymInt in a traced graph
    key_len: int | torch.SymInt,
    device: torch.device,
) -> Tensor | None:
    """Return the mask combined with causality; None if every query attends to every key."""
    if (
        not causal or query_len == 1
    ):  # a single query is the last position and attends to every key
        return mask
    triangle = causal_mask(query_len, key_len, device)
    return triangle if mask is None else mask & triangle


def both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the keys visible under two masks; None hides no key."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def visible_keys(
    mask: Tensor | None,
    causal: bool,
    query_len: int,
    key_len: int,
    device: torch.device,
) -> Bool[Tensor, "#batch #heads query_len key_len"]:
    """Return the mask combined with causality, with four dimensions and every query and key."""
    seen = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
    found = combined_mask(mask, causal, query_len, key_len, device)
    seen = seen if found is None else seen & found
    return seen[(None,) * (4 - seen.ndim)]


def slice_broadcast(x: Tensor, ranges: tuple[slice, ...]) -> Tensor:
    """Slice a tensor, broadcast to four dimensions, by four ranges; dimensions of 1 stay."""
    own = ranges[len(ranges) - x.dim() :]
    return x[
        tuple(
            slice(None) if size == 1 else range_
            for size, range_ in zip(x.shape, own, strict=True)
        )
    ]


def _every_query_sees_a_key(allowed: Tensor) -> bool:
    """Return True if no row is fully masked; False on a GPU and in a compiled graph: the check is costly."""
    if not allowed.is_cpu or torch.compiler.is_compiling():
        return False
    return bool(allowed.any(dim=-1).all())


def for_heads(t: Tensor, num_heads: int) -> Tensor:
    """Repeat key or value heads, once for every query head of their group."""
    return t.repeat_interleave(num_heads // t.shape[1], dim=1)


def _grouped_product(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply `[batch, heads, n, m]` by `[batch, groups, m, p]`, with heads of a group as rows."""
    batch, num_heads, n, m = rows.shape
    num_groups = shared.shape[1]
    if num_groups == num_heads:
        return rows @ shared
    grouped = rows.reshape(batch, num_groups, num_heads // num_groups * n, m)
    return (grouped @ shared).reshape(batch, num_heads, n, shared.shape[3])
