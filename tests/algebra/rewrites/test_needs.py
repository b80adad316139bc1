"""What rewrites need of a layer: each refuses every trait that it declares, by its reason, and no other."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from heads import D_MODEL, NUM_HEADS, make, with_later_part, with_semantics
from triptych.core.algebra.legality import BREAKS, TRAITS, Need
from triptych.core.algebra.positions import GrowingBase, RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import AdditiveScores, HeadGate, HeadNorm, Semantics, Temperature
from triptych.core.algebra.weights import AttentionWeights, Norm
from triptych.rewriting.functions.registry import REWRITES, read_rewrite
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite

WIDTH = D_MODEL // NUM_HEADS
ROTATION = RotaryEmbedding.of_width(WIDTH)
# What makes a layer of queries, keys and values with maps of their own have a trait.
WITH: dict[str, dict[str, Any]] = {
    **{scheme: {"positions": scheme} for scheme in ("rotary", "disentangled", "alibi", "relative")},
    "qk_norm": {"qk_norm": True},
    "v_norm": {"v_norm": HeadNorm(1e-6)},
    "clip": {"clip": 2.0},
    "soft_cap": {"soft_cap": 30.0},
    "sinks": {"sinks": True},
    "gate": {"gate": HeadGate(torch.zeros(NUM_HEADS, D_MODEL).double())},
    "channel_gate": {"gate": HeadGate(torch.zeros(NUM_HEADS, WIDTH, D_MODEL).double())},
    "dropout": {"dropout": 0.1},
    "no_rotary": {"positions": "none"},
    "of_patches": {"rotary": replace(ROTATION, places=torch.zeros(9, WIDTH // 2).double())},
    "window": {"window": 3},
    "temperature": {"temperature": Temperature(0.1, 4.0)},
    "compared": {"scores": AdditiveScores(torch.ones(NUM_HEADS, WIDTH).double())},
    "both_ways": {"kind": "self"},
    "growing": {"rotary": replace(ROTATION, long=GrowingBase(8, 1e4, 2.0))},
    "biased": {"o_bias": torch.zeros(D_MODEL).double()},
    "no_output_bias": {"bias_slots": frozenset("qkv")},
}
# A call that asks for one need alone, as the need says what it is for.
CALLS = {
    "fold, side qk": "fold(sides=['qk'], keep='folded')",
    "factor": "factor",
    "fold_norm": "fold_norm",
    "drop_key_bias": "drop_key_bias",
    "fold_value_bias": "fold_value_bias",
    "prune_heads": "prune_heads(number=1)",
    "merge_kv_heads": "merge_kv_heads(num_kv_heads=2)",
    "sort_heads": "sort_heads",
    "permute_heads": "permute_heads(order=[1, 0, 3, 2])",
    "truncate, W_QK": "truncate(rank=4, forms=['qk'])",
    "truncate, W_OV": "truncate(rank=4, forms=['ov'])",
    "gauge_fix, W_QK": "gauge_fix(forms=['qk'])",
    "gauge_fix, W_OV": "gauge_fix(forms=['ov'])",
    "to_latent, without a format": "to_latent",
    "to_latent, with a format": "to_latent(format='deepseek_v3')",
}
# Whatever rewrite it is, one that changes queries or keys refuses these.
BESIDES = {"compared"}
UNKNOWN = "which this does not take into account"


def needs() -> dict[tuple[str, str], Need]:
    return {(kind.name, need.of): need for kind in REWRITES for need in kind.requires}


def plain(name: str) -> AttentionWeights:
    """A layer that the rewrite takes."""
    biased = name in ("drop_key_bias", "fold_value_bias")
    weights = make("bilinear" if name == "factor" else "factored", "causal", biased=biased)
    return replace(weights, norm=Norm(torch.ones(D_MODEL).double())) if name == "fold_norm" else weights


def test_every_need_and_every_trait_is_tried() -> None:
    assert set(WITH) == set(TRAITS)
    found = {name if name in CALLS else f"{name}, {of}" for name, of in needs()}
    assert found == set(CALLS)


@pytest.mark.parametrize("call", CALLS)
def test_a_rewrite_refuses_what_it_declares_by_its_reason_and_nothing_else(call: str) -> None:
    name, _, of = call.partition(", ")
    step = read_rewrite(CALLS[call])
    assert isinstance(step, LayerRewrite)
    declared = [need for (kind, what), need in needs().items() if kind == name and of in ("", what)]
    good = plain(name)
    if of == "with a format":
        good = with_semantics(good, rotary=ROTATION)
    for trait in [None, *TRAITS]:
        weights = good if trait is None else with_semantics(good, **WITH[trait])
        assert trait is None or TRAITS[trait].there(weights)
        if reasons := list(filter(None, (need.why_not(weights) for need in declared))):
            with pytest.raises(RewriteRefusedError) as refused:
                step.apply(LayerToRewrite("here", weights))
            assert refused.value.reason.endswith(reasons[0]), trait
            assert "{" not in reasons[0]
            assert (UNKNOWN in reasons[0]) <= (trait in BESIDES), "a trait has a reason of its own"
        elif trait not in BESIDES:
            record = step.apply(LayerToRewrite("here", weights)).record
            said = {one for need in declared for one in need.checked if "patches" not in one}
            assert trait is not None or said <= set(record.checked)
    assert all(
        TRAITS[trait].words in type(step).where_refused() for need in declared for trait in need.against
    )


def test_every_part_of_a_layer_says_what_it_breaks() -> None:
    assert set(BREAKS) == {one.name for one in fields(Semantics)}


@pytest.mark.parametrize("call", CALLS)
def test_a_part_of_a_layer_that_no_need_knows_is_refused_by_its_name(call: str) -> None:
    name, _, of = call.partition(", ")
    weights = plain(name)
    if of == "with a format":
        weights = with_semantics(weights, rotary=ROTATION)
    step = read_rewrite(CALLS[call])
    assert isinstance(step, LayerRewrite)
    step.apply(LayerToRewrite("here", with_later_part(weights, None)))
    with pytest.raises(RewriteRefusedError, match=f"the layer has quantised, {UNKNOWN}"):
        step.apply(LayerToRewrite("here", with_later_part(weights, 0.5)))
