"""Layers of any structure and with anything that a layer may do besides its maps, as a seed decides."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from triptych.core.algebra.positions import (
    ALiBi,
    DisentangledBias,
    GrowingBase,
    RelativePositionBias,
    RotaryEmbedding,
    ScoreBias,
)
from triptych.core.algebra.semantics import AdditiveScores, HeadGate, HeadNorm, Semantics, Temperature
from triptych.core.algebra.weights import AttentionWeights, Chain, Link, Norm

D_MODEL = 12


class Drawing:
    """Random numbers and choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.numbers)

    def gains(self, *shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=self.numbers) + 0.5

    def one_of(self, *options: Any) -> Any:
        return self.choices.choice(options)

    def chance(self, share: float) -> bool:
        return self.choices.random() < share

    def link(self, copies: int, d_in: int, d_out: int, *, biased: float = 0.5) -> Link:
        bias = self.normal(copies, d_out) if self.chance(biased) else None
        return Link(self.normal(copies, d_in, d_out) / d_in**0.5, bias)

    def alike(self, link: Link, groups: int) -> Link:
        """The same numbers in all copies of each group."""
        rows = torch.arange(groups).repeat_interleave(link.copies // groups) * (link.copies // groups)
        return link.select_copies(lambda copies: rows.tolist())

    def head_norm(self, copies: int, width: int) -> HeadNorm:
        together = self.chance(0.25)
        channels = None if together or self.chance(0.8) else width - 2
        parts = {}
        for name in ("weight", "bias"):
            if self.chance(0.6 if name == "weight" else 0.3):
                own = self.one_of((), (copies,))
                shape = (copies * width,) if together else (*own, channels or width)
                parts[name] = self.gains(*shape) if name == "weight" else self.normal(*shape)
        over = "all heads" if together else "head"
        return HeadNorm(1e-6, **parts, centred=self.chance(0.3), over=over, channels=channels)  # type: ignore[arg-type]

    def gate(self, heads: int, d_v: int) -> HeadGate:
        kind = self.one_of("head", "channel", "pairs")
        count = heads // 2 if kind == "pairs" else heads
        own = (count, d_v) if kind == "channel" else (count,)
        bias = self.normal(*own) if self.chance(0.5) else None
        whole = (True, False) * (heads // 2) if kind == "pairs" else ()
        return HeadGate(self.normal(*own, D_MODEL), bias, whole)

    def bias(self, heads: int, d_k: int) -> ScoreBias:
        kind = self.one_of("alibi", "relative", "disentangled")
        if kind == "alibi":
            return ALiBi(self.gains(heads))
        if kind == "relative":
            return RelativePositionBias(self.normal(8, heads), self.chance(0.5), 16)
        keys, queries = (self.normal(heads, 6, d_k) for _ in range(2))
        return DisentangledBias(keys, queries if self.chance(0.5) else None, 3, None, 0.3)


def draw_layer(seed: int) -> AttentionWeights:
    """A float64 layer."""
    draw = Drawing(seed)
    heads, d_k, d_v = draw.one_of(2, 4, 6), draw.one_of(4, 6), draw.one_of(4, 6)
    divisors = [copies for copies in range(1, heads + 1) if heads % copies == 0]
    k_copies, v_copies = draw.one_of(*divisors), draw.one_of(*divisors)
    q: Chain = (draw.link(heads, D_MODEL, d_k),)
    k: Chain = (draw.link(k_copies, D_MODEL, d_k),)
    v: Chain = (draw.link(v_copies, D_MODEL, d_v),)
    if draw.chance(0.3):
        k = (draw.alike(k[0], draw.one_of(*_divisors(k_copies))),)
    if draw.chance(0.3):
        v = (draw.alike(v[0], draw.one_of(*_divisors(v_copies))),)
    writing = draw.one_of("factored", "factored", "latent", "stacked", "key_value", "bilinear")
    if writing == "latent":
        down = draw.link(1, D_MODEL, 7)
        if draw.chance(0.6):
            down = replace(down, norm=draw.head_norm(1, 7))
        k = (down, draw.link(k_copies, 7, d_k))
        v = (down, draw.link(v_copies, 7, d_v))
    elif writing == "stacked":
        first = draw.link(heads, D_MODEL, 5)
        if draw.chance(0.6):
            first = replace(first, norm=draw.head_norm(heads, 5))
        q = (first, draw.link(heads, 5, d_k))
    elif writing == "key_value":
        v, v_copies, d_v = k, k_copies, d_k
    elif writing == "bilinear":
        q, k, k_copies, d_k = (draw.link(heads, D_MODEL, D_MODEL),), (), 1, D_MODEL
    o: Chain = (draw.link(heads, d_v, D_MODEL, biased=0),)
    if draw.chance(0.2):
        o = (draw.link(heads, d_v, 5, biased=0), draw.link(heads, 5, D_MODEL, biased=0))
    if draw.chance(0.4):  # a head that does nothing
        weight = o[-1].weight.clone()
        weight[draw.choices.randrange(heads)] = 0.0
        o = (*o[:-1], replace(o[-1], weight=weight))
    kind = draw.one_of("self", "causal", "cross")
    few = draw.one_of(0.05, 0.3)
    parts: dict[str, Any] = {
        "q_norm": lambda: draw.head_norm(heads, d_k),
        "k_norm": lambda: draw.head_norm(k_copies, d_k),
        "v_norm": lambda: draw.head_norm(v_copies, d_v),
        "clip": lambda: 1.0,
        "rotary": lambda: _rotary(draw),
        "temperature": lambda: Temperature(0.5, 2.0),
        "bias": lambda: draw.bias(heads, d_k),
        "soft_cap": lambda: 2.0,
        "window": lambda: 3,
        "chunk": lambda: 4,
        "sinks": lambda: draw.normal(heads),
        "gate": lambda: draw.gate(heads, d_v),
        "scores": lambda: AdditiveScores(draw.normal(heads, d_k)),
    }
    chosen = {name: make() for name, make in parts.items() if draw.chance(few)}
    if kind == "cross":
        for name in ("rotary", "temperature", "bias", "window", "chunk"):
            chosen.pop(name, None)
    if "bias" in chosen:
        chosen.pop("rotary", None)
    norm, memory_norm = (_norm(draw) if draw.chance(0.4) else None for _ in range(2))
    return AttentionWeights(
        D_MODEL,
        heads,
        q,
        k,
        v,
        o,
        Semantics(0.4, kind, **chosen),
        o_bias=draw.normal(D_MODEL) if draw.chance(0.5) else None,
        norm=norm,
        memory_norm=memory_norm if kind == "cross" else None,
    )


def draw_call(weights: AttentionWeights, seed: int) -> str:
    """A rewrite of that layer, as it is written."""
    draw, heads = Drawing(seed), weights.num_heads
    order = draw.choices.sample(range(heads), heads)
    gone = draw.choices.sample(range(heads), draw.choices.randrange(1, heads))
    fewer = draw.one_of(*_divisors(heads))
    return str(
        draw.one_of(
            "fold(keep='folded')",
            "fold(sides=['qk'], keep='folded')",
            "expand",
            "factor",
            "fold_norm",
            "drop_key_bias",
            "fold_value_bias",
            "prune_heads",
            f"prune_heads(heads={gone})",
            "prune_heads(number=1)",
            f"merge_kv_heads(num_kv_heads={fewer}, bounded=False)",
            "truncate(energy=1.0)",
            "truncate(energy=1.0, forms=['ov'])",
            "gauge_fix",
            "gauge_fix(forms=['ov'])",
            "sort_heads",
            f"permute_heads(order={order})",
            f"permute_heads(order={[*reversed(range(heads))]})",
            "repeat_kv_heads",
            "to_latent",
        )
    )


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _norm(draw: Drawing) -> Norm:
    return Norm(
        draw.gains(D_MODEL), draw.normal(D_MODEL) if draw.chance(0.5) else None, draw.one_of(0.0, 1.0)
    )


def _rotary(draw: Drawing) -> RotaryEmbedding:
    if draw.chance(0.2):
        return replace(RotaryEmbedding.of_width(4), long=GrowingBase(4, 1e4, 2.0))
    return RotaryEmbedding.of_width(draw.one_of(2, 4), pairing=draw.one_of("halves", "interleaved"))
