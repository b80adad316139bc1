"""Rewrites of layers that a seed draws: what is recorded as exact computes the same."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from algebra.rewrites.random_layers import D_MODEL, draw_call, draw_layer
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.positions import ScoreBias
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import ALIKE_FOR_HEADS, HEADS_OF, HeadGate, HeadNorm, Scores, Semantics
from triptych.core.algebra.weights import AttentionWeights, Link, Norm
from triptych.core.attention import MultiHeadAttention
from triptych.core.attention.requirements import check_can_be_held
from triptych.rewriting.functions.registry import read_rewrite
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite

# Pairs of a rewrite and something that each head has of its own.
FOLLOWS = {
    (rewrite, part)
    for rewrite in ("permute_heads", "prune_heads", "sort_heads")
    for part in ("q_norm", "k_norm", "v_norm", "gate", "sinks")
}


def after_norm(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    y = x * (norm.offset + norm.weight)
    return y if norm.bias is None else y + norm.bias


def computed(weights: AttentionWeights, x: Tensor, memory: Tensor) -> Tensor:
    if weights.semantics.kind != "cross":
        return run_layer(weights, after_norm(weights.norm, x))
    return run_layer(weights, after_norm(weights.norm, x), after_norm(weights.memory_norm, memory))


def without_heads(weights: AttentionWeights, kept: tuple[int, ...]) -> AttentionWeights:
    """The same layer with output maps of 0 where heads are left out."""
    last = weights.o[-1].repeat(weights.num_heads)
    there = torch.zeros(weights.num_heads, 1, 1, dtype=torch.float64)
    there[list(kept)] = 1.0
    return replace(weights, o=(*weights.o[:-1], replace(last, weight=last.weight * there)))


def own_of_heads(weights: AttentionWeights) -> set[str]:
    """What the layer has for each head, by the fields of its semantics."""
    found = {name for name in HEADS_OF if getattr(weights.semantics, name) is not None}
    norms = {name for name in found if name.endswith("_norm")}
    return found - {name for name in norms if not getattr(weights.semantics, name).per_head}


def check(seeds: Iterable[int]) -> Counter[tuple[str, str]]:
    """Draw a layer and a rewrite for each seed; give what was rewritten of what each head has of its own."""
    done: Counter[tuple[str, str]] = Counter()
    for seed in seeds:
        weights, numbers = draw_layer(seed), torch.Generator().manual_seed(seed)
        x, memory = (
            torch.randn(2, length, D_MODEL, dtype=torch.float64, generator=numbers) for length in (7, 5)
        )
        call = draw_call(weights, seed)
        step = read_rewrite(call)
        assert isinstance(step, LayerRewrite)
        try:
            result, record = step.apply(LayerToRewrite("", weights))
        except RewriteRefusedError:
            continue
        expected_of = weights
        if record.kept is not None and len(record.kept) < weights.num_heads:
            expected_of = without_heads(weights, record.kept)
        elif record.tier == "bounded" and step.name == "prune_heads":
            gone = record.choice.partition("left out: ")[2]
            kept = {*range(weights.num_heads)} - {int(head) for head in gone.split(", ") if head}
            expected_of = without_heads(weights, tuple(kept))
        elif record.tier == "bounded":
            continue
        expected, found = computed(expected_of, x, memory), computed(result, x, memory)
        error = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
        assert error < 1e-9, f"seed {seed}: {call}, {record.tier}, moves the output by {error:.2g}"
        if record.tier != "bounded" and expected_of is not weights:
            whole = computed(weights, x, memory)
            assert float((whole - expected).abs().max()) < 1e-9, f"seed {seed}: {call}, {record.tier}"
        done.update((step.name, part) for part in own_of_heads(weights) if result is not weights)
    return done


def test_what_is_recorded_as_exact_computes_the_same() -> None:
    done = check(range(400))
    assert sum(done.values()) > 60


@pytest.mark.slow
def test_what_is_recorded_as_exact_computes_the_same_in_many_layers() -> None:
    done = check(range(1_000, 100_000))
    assert set(done) >= FOLLOWS
    assert min(done[pair] for pair in FOLLOWS) > 20


@pytest.mark.parametrize("part", sorted({part for _, part in FOLLOWS}))
@pytest.mark.parametrize("rewrite", ["permute_heads(order={order})", "prune_heads(heads=[0])", "sort_heads"])
def test_what_each_head_has_of_its_own_goes_with_it(rewrite: str, part: str) -> None:
    tried = 0
    for seed in range(3_000):
        weights = draw_layer(seed)
        if part not in own_of_heads(weights):
            continue
        order = list(reversed(range(weights.num_heads)))
        step = read_rewrite(rewrite.format(order=order))
        assert isinstance(step, LayerRewrite)
        try:
            result, record = step.apply(LayerToRewrite("", weights))
        except RewriteRefusedError:
            continue
        kept = record.kept
        if kept is None or kept == tuple(range(weights.num_heads)):
            continue
        numbers = torch.Generator().manual_seed(seed)
        x, memory = (
            torch.randn(2, length, D_MODEL, dtype=torch.float64, generator=numbers) for length in (7, 5)
        )
        expected, found = computed(without_heads(weights, kept), x, memory), computed(result, x, memory)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * max(1.0, float(expected.abs().max())))
        tried += 1
        if tried == 6:
            return
    raise AssertionError(f"{tried} layers with {part} were rewritten")


@pytest.mark.parametrize("seeds", [range(80), pytest.param(range(1_000, 20_000), marks=pytest.mark.slow)])
def test_a_layer_computes_what_is_written_out(seeds: range) -> None:
    tried = 0
    for seed in seeds:
        weights, numbers = draw_layer(seed).without_norms(), torch.Generator().manual_seed(seed)
        kind = weights.semantics.kind
        x, memory = (
            torch.randn(2, length, D_MODEL, dtype=torch.float64, generator=numbers) for length in (7, 5)
        )
        try:
            check_can_be_held(weights)
            layer = MultiHeadAttention.from_weights(weights).eval()
        except ValueError:
            continue
        with torch.no_grad():
            given = layer(x, memory=memory) if kind == "cross" else layer(x, causal=kind == "causal")
        expected = computed(weights, x, memory)
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(given.output, expected, rtol=0, atol=1e-9 * scale, msg=f"seed {seed}")
        tried += 1
    assert tried > len(seeds) / 2


def test_every_part_of_a_layer_says_whether_heads_have_their_own() -> None:
    named = {each.name for each in fields(Semantics)}
    assert set(HEADS_OF) | ALIKE_FOR_HEADS == named
    assert not set(HEADS_OF) & ALIKE_FOR_HEADS
    # Each tensor of these parts is one that their selection of heads knows.
    for part in (*all_below(ScoreBias), *all_below(Scores), HeadGate, HeadNorm, Link):
        tensors = {each.name for each in fields(part) if "Tensor" in str(each.type)}
        assert tensors == known_tensors(part), part


def test_every_part_of_a_layer_is_drawn() -> None:
    drawn = [draw_layer(seed).semantics for seed in range(200)]
    found = {
        each.name
        for each in fields(Semantics)
        if any(getattr(one, each.name) is not each.default for one in drawn)
    }
    # Dropout is of training.
    assert found == {each.name for each in fields(Semantics)} - {"dropout"}


def known_tensors(part: type) -> set[str]:
    if issubclass(part, ScoreBias):
        return set(part.head_dims)
    if issubclass(part, Scores):
        return {each.name for each in fields(part)}  # type: ignore[arg-type]
    return {"weight", "bias"}


def all_below(base: type) -> list[type]:
    return [one for one in base.__subclasses__() if one.__module__.startswith("triptych.")]
