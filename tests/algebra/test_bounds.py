"""Bounds that need no data: they hold at the worst input, and are not far above it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import D_MODEL, NUM_HEADS, make, with_semantics
from triptych.core.algebra.function import channels
from triptych.core.algebra.positions import OtherFrequencies, RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention.steps import for_heads
from triptych.rewriting.functions import drop_key_bias, gauge_fix, truncate
from triptych.rewriting.functions.bounds import output_bound, score_bound


def normalised(count: int) -> Tensor:
    x = torch.randn(1, count, D_MODEL, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True) * math.sqrt(D_MODEL)


def scores(weights: AttentionWeights, x: Tensor) -> Tensor:
    q, k, _ = channels(weights, x)
    k = for_heads(k, weights.num_heads)
    if (rotary := weights.semantics.rotary) is not None:
        q, k = rotary(q), rotary(k)
    return (q @ k.mT)[0] * weights.scale


def test_a_score_moves_by_the_bound_at_worst() -> None:
    weights = make("factored", biased=False)
    after = truncate(weights, qk_rank=3).weights
    found = score_bound(weights, after)
    moved = (scores(after, x := normalised(300)) - scores(weights, x)).abs().amax((1, 2))
    assert bool((moved <= found).all())
    for head in range(NUM_HEADS):
        U, _, Vh = torch.linalg.svd(weights.qk.dense()[head] - after.qk.dense()[head])
        worst = math.sqrt(D_MODEL) * torch.stack([U[:, 0], Vh[0]])[None]
        reached = (scores(after, worst) - scores(weights, worst))[head, 0, 1].abs()
        torch.testing.assert_close(reached, found[head], rtol=1e-10, atol=0)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", ["factored", "grouped", "stacked"])
def test_with_biases_rows_of_scores_stay_within_the_bound(name: str, sinks: bool) -> None:
    weights = make(name, biased=True)
    after = truncate(weights, qk_rank=4).weights
    if sinks:
        weights, after = (with_semantics(one, sinks=True) for one in (weights, after))
    x = normalised(300)
    moved, found = scores(after, x) - scores(weights, x), score_bound(weights, after)
    if sinks:
        assert bool((moved.abs().amax((1, 2)) <= found).all())
        return
    spread = moved.amax(2) - moved.amin(2)
    assert bool((spread.amax(1) <= 2 * found).all())


def test_what_the_softmax_is_blind_to_is_not_counted() -> None:
    weights = make("factored", biased=True)
    bare = drop_key_bias(weights).weights
    assert float(score_bound(weights, bare).max()) < 1e-10
    seen = [with_semantics(one, sinks=True) for one in (weights, bare)]
    assert float(score_bound(*seen).min()) > 1.0


def test_a_tiny_change_has_a_tiny_bound() -> None:
    weights = make("grouped", biased=True)
    (q,), (o,) = weights.q, weights.o
    nudged = replace(
        weights, q=(replace(q, weight=q.weight * (1 + 1e-9)),), o=(replace(o, weight=o.weight * (1 + 1e-9)),)
    )
    bounds = score_bound(weights, nudged), output_bound(weights, nudged)
    for found, form in zip(bounds, (weights.qk, weights.ov), strict=True):
        assert bool((found > 0).all())
        assert bool((found <= 1e-8 * D_MODEL * form.spectral_norm()).all())
    same = gauge_fix(weights).weights
    assert float(score_bound(weights, same).max()) < 1e-10
    assert float(output_bound(weights, same).max()) < 1e-10


@pytest.mark.parametrize("biased", [False, True])
def test_the_output_of_a_head_stays_within_the_bound(biased: bool) -> None:
    weights = make("grouped", biased=biased)
    after = truncate(weights, ov_rank=3).weights
    after, found = replace(after, o_bias=weights.o_bias), output_bound(weights, after)
    # A mixture of values is the value of a mixture of inputs.
    x = normalised(300)
    outs = [for_heads(channels(one, x).v, NUM_HEADS)[0] @ one.W_O for one in (weights, after)]
    moved = (outs[0] - outs[1]).norm(dim=-1).amax(1)
    assert bool((moved <= found).all())
    if not biased:
        worst = torch.linalg.svd(weights.ov.dense() - after.ov.dense()).U[:, :, 0] * math.sqrt(D_MODEL)
        reached = (worst[:, None] @ (weights.ov.dense() - after.ov.dense())).norm(dim=-1)[:, 0]
        torch.testing.assert_close(reached, found, rtol=1e-10, atol=0)


LONG = OtherFrequencies(100, torch.tensor([0.5, 0.2, 0.003], dtype=torch.float64), 10.0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("start", "long"), [(0, None), (1, None), (0, LONG)])
def test_under_rotary_positions_the_bound_holds_at_every_distance(
    start: int, long: OtherFrequencies | None, biased: bool
) -> None:
    frequencies = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    rotation = RotaryEmbedding(frequencies, "interleaved", start, 1.1, long=long)
    weights = make("grouped", biased=biased, d_k=7)
    weights = with_semantics(weights, rotary=rotation)
    after = truncate(weights, qk_rank=2, rotary="pairs").weights
    found = score_bound(weights, after)
    x = normalised(400)
    moved = (scores(after, x) - scores(weights, x)).abs().amax((1, 2))
    assert bool((moved <= found).all())
    assert bool((moved > 0.05 * found).all())
    assert float(score_bound(weights, weights).max()) < 1e-10


def one_head(q: Link, k: Link, v: Link, o: Tensor) -> AttentionWeights:
    return AttentionWeights(
        d_model=D_MODEL, num_heads=1, q=(q,), k=(k,), v=(v,), o=(Link(o),), semantics=Semantics(0.7)
    )


def pointing(width: int, *, biased: bool, times: float) -> Link:
    """A map that looks along the first channel of the input, and whose bias makes as much of nothing."""
    weight = torch.zeros(1, D_MODEL, width, dtype=torch.float64)
    weight[0, 0, -1] = times
    bias = torch.zeros(1, width, dtype=torch.float64)
    bias[0, -1] = times * math.sqrt(D_MODEL)
    return Link(weight, bias if biased else None)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_the_worst_input_reaches_the_bound_with_biases_and_fixed_channels_too(
    rotary: bool, biased: bool
) -> None:
    # The last channel is one that does not turn. With x along the first channel, bias and map add up.
    rotation = RotaryEmbedding(torch.tensor([1.0], dtype=torch.float64)) if rotary else None
    more: dict[str, Any] = {"rotary": rotation} if rotary else {"sinks": True}  # either way key biases count
    output = torch.zeros(1, 3, D_MODEL, dtype=torch.float64)
    output[0, -1, 5] = 1.0
    before, after = (
        with_semantics(one_head(*(pointing(3, biased=biased, times=times) for _ in "qkv"), output), **more)
        for times in (0.5, 0.8)
    )
    x = torch.zeros(1, 2, D_MODEL, dtype=torch.float64)
    x[..., 0] = math.sqrt(D_MODEL)
    moved = (scores(after, x) - scores(before, x)).abs().amax()
    assert float(score_bound(before, after)) == pytest.approx(float(moved), rel=1e-12)
    values = [channels(one, x).v[0] @ one.W_O[0] for one in (before, after)]
    moved = (values[0] - values[1]).norm(dim=-1).amax()
    assert float(output_bound(before, after)) == pytest.approx(float(moved), rel=1e-12)


@pytest.mark.parametrize("traits", [{"qk_norm": True}, {"positions": "disentangled"}])
def test_scores_that_are_no_form_have_no_bound(traits: dict[str, Any]) -> None:
    weights = make("factored", biased=False)
    weights = with_semantics(weights, **traits)
    with pytest.raises(RewriteRefusedError, match="no bound of the scores is known: "):
        score_bound(weights, weights)
