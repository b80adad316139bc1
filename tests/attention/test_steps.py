"""The steps of attention are one list, and everything that runs a layer walks it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import D_MODEL, NUM_HEADS, make_layer, random_input
from tolerances import assert_same
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.positions import ALiBi, RotaryEmbedding
from triptych.core.algebra.semantics import HeadGate, HeadNorm, Semantics, Temperature
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention import LayerCache, MultiHeadAttention, steps
from triptych.core.attention.requirements import HELD
from triptych.core.attention.routes import Inputs
from triptych.core.attention.steps import STEPS, Step
from triptych.running.decoding.fused import FusedAttention, beyond_fusing
from triptych.running.decoding.linear_maps import Maps

N, WIDTH = 7, 6
NAMES = [step.name for step in STEPS]
FIELDS = [each.name for each in fields(Semantics)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def everything() -> AttentionWeights:
    """The weights of a layer in which every step does something."""
    weights = make_layer("grouped", biased=True).weights("causal")
    norm = HeadNorm(1e-6, drawn(WIDTH), turned=True)
    semantics = Semantics(
        0.4,
        "causal",
        q_norm=norm,
        k_norm=norm,
        v_norm=HeadNorm(1e-6),
        clip=0.9,
        rotary=RotaryEmbedding(torch.tensor([0.7, 0.1])),
        temperature=Temperature(0.5, 2.0),
        bias=ALiBi.for_heads(NUM_HEADS),
        soft_cap=1.5,
        window=4,
        sinks=drawn(NUM_HEADS),
        gate=HeadGate(drawn(NUM_HEADS, D_MODEL)),
    )
    return replace(weights, semantics=semantics)


class Noted:
    """A record that notes which of its fields are read; its methods run on the record."""

    def __init__(self, own: Semantics) -> None:
        self.own, self.read = own, set[str]()

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__["own"]
        if name in FIELDS:
            self.read.add(name)
            return getattr(own, name)
        found = getattr(type(own), name)
        return found.fget(self) if isinstance(found, property) else found.__get__(self)


def raw(step: Any) -> Any:
    """The function of a step without the checks of types that tests put around it."""
    run = step.run
    return getattr(run, "__wrapped__", run)


def test_every_field_of_semantics_is_read_by_the_step_that_names_it() -> None:
    semantics = everything().semantics
    q, k, at = drawn(1, NUM_HEADS, N, WIDTH), drawn(1, NUM_HEADS, N, WIDTH), torch.arange(N)
    token_positions = steps.TokenPositions(0)
    for step in STEPS:
        noted: Any = Noted(semantics)
        given: Any = Inputs(q, k, k, None, None, True, semantics, 0.1)._replace(semantics=noted)
        if isinstance(step, steps.SideStep):
            for side in ("q", "k", "v"):
                raw(step)(q, side, noted, token_positions)
            assert {name for own in step.sides.values() for name in own} == set(step.fields)
        elif isinstance(step, steps.LocateStep):
            raw(step)(q, k, noted, at, at)
        elif isinstance(step, steps.GateStep):
            raw(step)(drawn(1, N, D_MODEL), noted)
        else:
            raw(step)(q @ k.mT if step.name != "products" else q, given)
        # A caller may overrule the kind and the dropout of a layer: they come with the call.
        expected = {*step.fields} - {"kind", "dropout"} | ({"scores"} if step.name == "scale" else set())
        assert noted.read == expected, step.name
    assert {name for step in STEPS for name in step.fields} == set(FIELDS) == HELD
    assert steps.is_causal(semantics, None)
    assert len(set(NAMES)) == len(NAMES)


def ways(weights: AttentionWeights, x: Tensor) -> dict[str, Tensor]:
    """What the same layer gives in every way to run it."""
    layer = MultiHeadAttention.from_weights(weights)
    fused = FusedAttention(weights, Maps("fp32", torch.float64), False)
    tapped = MultiHeadAttention.from_weights(weights)
    tapped.tap = lambda name, value, first: value
    cache, other = LayerCache(), LayerCache()
    parts = ((0, 4), (4, 5), (5, N))
    fused_steps = [fused(x[:, i:j], cache=other, causal=True).output for i, j in parts]
    return {
        "forward": layer(x).output,
        "forward with weights": layer(x, need_weights=True).output,
        "with a cache": torch.cat([layer(x[:, i:j], cache=cache).output for i, j in parts], dim=1),
        "with a tap": tapped(x).output,
        "steps": layer.steps(x).output,
        "fused": fused(x, causal=True).output,
        "fused with a cache": torch.cat(fused_steps, dim=1),
    }


@contextmanager
def changed(step: Any) -> Iterator[None]:
    """Another result of a step."""
    run = step.run

    def other(*given: Any) -> Any:
        result = run(*given)
        if isinstance(step, steps.SideStep) and given[1] not in step.sides:
            return result
        if isinstance(result, tuple):
            mask, bias = result
            return mask, bias * 1.5
        # A hidden key stays hidden.
        return result * 1.25 + (0.0 if step.name == "softmax" else 0.125)

    object.__setattr__(step, "run", other)
    try:
        yield
    finally:
        object.__setattr__(step, "run", run)


@pytest.mark.parametrize("step", STEPS, ids=NAMES)
@torch.no_grad()
def test_every_way_to_run_a_layer_walks_every_step(step: Step) -> None:
    weights, x = everything(), random_input(N)
    before = run_layer(weights, x)
    for value in ways(weights, x).values():
        assert_same(value, before, kind="output")
    with changed(step):
        expected, found = run_layer(weights, x), ways(weights, x)
        compared = MultiHeadAttention.from_weights(weights).queries_and_keys(x).weights()
        watched = MultiHeadAttention.from_weights(weights).steps(x).weights
    replaced = set[str]()
    if step.name in ("products", "scale"):  # in one product with scaled queries, unless somebody watches
        replaced = {"forward", "forward with weights", "with a cache", "fused", "fused with a cache"}
    elif step.name in ("mix", "gate"):  # products in even shapes, and a packed map
        replaced = {"fused", "fused with a cache"}
    for name, value in found.items():
        assert_same(value, before if name in replaced else expected, kind="output")
    if step.name != "mix":
        assert (expected - before).abs().max() > 1e-3
    if step.name not in ("products", "scale"):
        assert_same(compared, watched, kind="output")


@torch.no_grad()
def test_a_tapped_layer_reads_values_of_their_own_memory() -> None:
    layer = make_layer("factored", biased=True)
    x, keys, values = random_input(3), random_input(N), random_input(N)
    expected = layer(x, memory=keys, value_memory=values).output
    layer.tap = lambda name, value, first: value
    assert_same(layer(x, memory=keys, value_memory=values).output, expected, kind="output")


@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_gates_of_channels_follow_the_values_of_a_latent(biased: bool) -> None:
    weights = make_layer("latent", biased=biased, d_latent=5).weights("causal")
    gate = HeadGate(drawn(NUM_HEADS, weights.multiplied("v").d_out, D_MODEL))
    weights = replace(weights, semantics=replace(weights.semantics, gate=gate))
    layer, x, cache = MultiHeadAttention.from_weights(weights), random_input(N), LayerCache()
    assert layer.explain(1, N)[0] == "absorbed"
    found = torch.cat([layer(x[:, i : i + 1], cache=cache).output for i in range(N)], dim=1)
    assert_same(found, run_layer(weights, x), kind="output")


def test_a_field_that_no_step_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = everything()
    monkeypatch.setattr("triptych.core.attention.requirements.HELD", HELD - {"soft_cap"})
    with pytest.raises(ValueError, match="a layer with a soft cap"):
        MultiHeadAttention.from_weights(weights)
    assert beyond_fusing(weights, False) == []
