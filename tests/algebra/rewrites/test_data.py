"""Ranks by what a text does: the least error on it, as much as said, in every gauge."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads import D_MODEL, NUM_HEADS, Form, Untouched, assert_same_function, gathered, make, with_semantics
from triptych.core.algebra.function import channels, probabilities, run_layer
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadGate
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention.steps import for_heads
from triptych.rewriting.functions.rank import measure_energies, truncate

NAMES = ("factored", "grouped", "stacked", "latent", "bilinear", "shared", "collaborative", "direct")


def some_text(tokens: int = 40) -> Tensor:
    """Some directions much more than others, and not about zero."""
    scales = torch.logspace(0.5, -1.5, D_MODEL, dtype=torch.float64)
    return torch.randn(2, tokens, D_MODEL, dtype=torch.float64) * scales + 0.3


def scores(weights: AttentionWeights, x: Tensor, *, centred: bool) -> Tensor:
    """Of all queries of a text with all its keys, `[heads, tokens, tokens]`."""
    q, k, _ = channels(weights, x)
    q, k = (t.transpose(0, 1).flatten(1, 2) for t in (q, for_heads(k, weights.num_heads)))
    found = q @ k.mT
    return found - found.mean(dim=-1, keepdim=True) if centred else found


def head_outputs(before: AttentionWeights, after: AttentionWeights, x: Tensor, *, centred: bool) -> Tensor:
    """What the heads add under the attention weights of one writing, with the values of the other."""
    q, k, _ = channels(before, x)
    v = for_heads(channels(after, x).v, after.num_heads)
    found = (probabilities(before, q, k) @ v @ after.W_O).transpose(0, 1).flatten(1, 2)
    return found - found.mean(dim=1, keepdim=True) if centred else found


def errors(
    before: AttentionWeights, after: AttentionWeights, x: Tensor, form: Form, *, centred: bool
) -> tuple[Tensor, Tensor]:
    """Of every head, by the text itself: the mean square error, and the mean square."""
    if form == "qk":
        was, now = (scores(one, x, centred=centred) for one in (before, after))
        return (was - now).square().mean((1, 2)), was.square().mean((1, 2))
    was, now = (head_outputs(before, one, x, centred=centred) for one in (before, after))
    return (was - now).square().sum(-1).mean(1), was.square().sum(-1).mean(1)


def of_rank(form: Form, rank: int | list[int]) -> dict[str, Any]:
    return {f"{form}_rank": rank}


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("form", ["qk", "ov"])
@pytest.mark.parametrize("name", NAMES)
def test_the_error_on_the_text_is_the_energy_left_out(name: str, form: Form, centred: bool) -> None:
    weights, x, rank = make(name), some_text(), 3
    moments = gathered(weights, x)
    with Untouched(weights):
        result, record = truncate(weights, moments, **of_rank(form, rank), centred=centred)
    error, whole = errors(weights, result, x, form, centred=centred)
    energies = measure_energies(weights, form, moments, centred=centred)
    groups = len(energies)
    assert record.error == pytest.approx(float((error / whole).max()), rel=1e-9)
    assert record.tier == "bounded"
    if form == "ov" and groups < NUM_HEADS:
        return  # no such equality for values that heads of other attention share
    # The prior is no part of the text.
    near = {"rtol": 1e-9, "atol": 1e-11 * float(whole.max())}
    torch.testing.assert_close(whole.view(groups, -1).sum(1), energies.sum(1), **near)
    torch.testing.assert_close(error.view(groups, -1).sum(1), energies[:, rank:].sum(1), **near)


@pytest.mark.parametrize("name", ["factored", "grouped", "stacked"])
@pytest.mark.parametrize("form", ["qk", "ov"])
@pytest.mark.parametrize("centred", [False, True])
def test_no_other_channels_are_better_on_the_text(name: str, form: Form, centred: bool) -> None:
    weights, x, rank = make(name), some_text(), 2
    best = truncate(weights, gathered(weights, x), **of_rank(form, rank), centred=centred).weights
    least = float(errors(weights, best, x, form, centred=centred)[0].sum())
    free = truncate(weights, **of_rank(form, rank)).weights
    assert float(errors(weights, free, x, form, centred=centred)[0].sum()) > 1.05 * least
    ends = ("q", "k") if form == "qk" else ("v", "o")
    for _ in range(10):
        # Near ones, and projections on other channels altogether.
        for other in (perturbed(best, ends[1], 0.02), projected(weights, form, rank)):
            assert float(errors(weights, other, x, form, centred=centred)[0].sum()) > least


def perturbed(weights: AttentionWeights, side: str, size: float) -> AttentionWeights:
    """One of the maps a little otherwise, in directions that the other end does not make up for."""
    *first, last = weights.chain(side)  # type: ignore[arg-type]
    weight = last.weight + size * torch.randn_like(last.weight) * last.weight.abs().mean()
    return replace(weights, **{side: (*first, replace(last, weight=weight))})


def projected(weights: AttentionWeights, form: Form, rank: int) -> AttentionWeights:
    """The channels of every head projected on `rank` random ones."""
    side = "q" if form == "qk" else "v"
    *first, last = weights.chain(side)  # type: ignore[arg-type]
    frame = torch.linalg.qr(torch.randn(last.d_out, rank, dtype=torch.float64)).Q
    return replace(weights, **{side: (*first, last.then(Link((frame @ frame.mT)[None])))})


@pytest.mark.parametrize("name", ["factored", "grouped"])
def test_the_mean_output_on_the_text_stays_where_the_output_has_a_bias(name: str) -> None:
    weights, x = make(name), some_text()
    result = truncate(weights, gathered(weights, x), ov_rank=2).weights
    was, now = (run_layer(one, x).mean((0, 1)) for one in (weights, result))
    torch.testing.assert_close(now, was, rtol=1e-9, atol=1e-9)
    bare = replace(with_semantics(weights, bias_slots=frozenset("qkv")), o_bias=None)
    assert truncate(bare, gathered(bare, x), ov_rank=2).weights.o_bias is None


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(["qk", "ov"]), st.booleans(), st.integers(1, 2))
def test_what_comes_out_does_not_depend_on_the_gauge(
    seed: int, form: Form, centred: bool, groups: int
) -> None:
    torch.manual_seed(seed)
    weights, x = make("grouped", num_kv_heads=2 * groups), some_text()
    G, M = (torch.randn(2 * groups, 6, 6, dtype=torch.float64) for _ in range(2))
    q, k, v, o = (weights.multiplied(side) for side in ("q", "k", "v", "o"))
    gauged = replace(
        weights,
        q=(q.then(Link(torch.linalg.inv(G).mT.contiguous())),),
        k=(k.then(Link(G)),),
        v=(v.then(Link(M)),),
        o=(Link(torch.linalg.inv(M)).then(o),),
    )
    one, other = (
        truncate(writing, gathered(writing, x), **of_rank(form, 3), centred=centred)
        for writing in (weights, gauged)
    )
    assert one.record.error == pytest.approx(other.record.error, rel=1e-6)
    assert one.record.bound == pytest.approx(other.record.bound, rel=1e-4)


@pytest.mark.parametrize("form", ["qk", "ov"])
@pytest.mark.parametrize("name", ["factored", "grouped", "bilinear"])
def test_a_text_of_few_directions_needs_few_channels(name: str, form: Form) -> None:
    weights = make(name, biased=False)
    x = torch.randn(2, 30, 3, dtype=torch.float64) @ torch.randn(3, D_MODEL, dtype=torch.float64)
    moments = gathered(weights, x)
    for rank in (3, 5):
        result, record = truncate(weights, moments, **of_rank(form, rank), centred=False)
        error, whole = errors(weights, result, x, form, centred=False)
        assert float((error / whole).max()) < 1e-15
        assert record.error is not None
        assert record.error < 1e-15
        assert record.tier == "bounded"
        assert all(bool(tensor.isfinite().all()) for tensor in result.tensors())


@pytest.mark.parametrize("name", ["factored", "grouped", "stacked"])
def test_the_whole_width_is_exact_whatever_the_text(name: str) -> None:
    weights = make(name)
    moments = gathered(weights, torch.ones(1, 2, D_MODEL, dtype=torch.float64))
    result, record = truncate(weights, moments, qk_rank=6, ov_rank=6)
    assert (record.tier, record.bound) == ("rounding-exact", 0.0)
    assert_same_function(weights, result)


@pytest.mark.parametrize("form", ["qk", "ov"])
@pytest.mark.parametrize("name", ["factored", "grouped", "bilinear"])
def test_inputs_without_direction_lead_to_the_nearest_forms(name: str, form: Form) -> None:
    weights = make(name, biased=False)
    moments = gathered(weights, some_text())
    by_prior = truncate(weights, moments, **of_rank(form, 3), prior=1e9, centred=False).weights
    nearest = truncate(weights, **of_rank(form, 3)).weights
    found, expected = (getattr(one, form).dense() for one in (by_prior, nearest))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("form", ["qk", "ov"])
def test_energies_without_a_text_are_squared_singular_values(form: Form) -> None:
    weights = make("grouped")
    dense = getattr(weights, form).dense().numpy()
    if form == "ov":
        dense = dense.swapaxes(1, 2)
    stacks = dense.reshape(2, -1, D_MODEL)
    expected = np.linalg.svd(stacks, compute_uv=False)[:, :6] ** 2
    np.testing.assert_allclose(measure_energies(weights, form).numpy(), expected, rtol=1e-10)
    assert measure_energies(make("bilinear"), "qk").shape == (4, D_MODEL)


def test_every_group_may_have_a_rank_of_its_own() -> None:
    weights, x = make("grouped"), some_text()
    moments = gathered(weights, x)
    result, record = truncate(weights, moments, qk_rank=[1, 4], ov_rank=[5, 2])
    assert (result.W_Q.shape[-1], result.W_V.shape[-1]) == (4, 5)
    assert not bool(result.W_K[:2, :, 1:].any())
    assert not bool(result.W_O[2:, 2:].any())
    assert record.choice.startswith("W_QK: ranks 1, 4, which leaves out at most ")
    for form, ranks in (("qk", [1, 4]), ("ov", [5, 2])):
        found = errors(weights, result, x, form, centred=True)[0]  # type: ignore[arg-type]
        for group, rank in enumerate(ranks):
            alone = truncate(weights, moments, **of_rank(form, rank)).weights  # type: ignore[arg-type]
            expected = errors(weights, alone, x, form, centred=True)[0]  # type: ignore[arg-type]
            of_group = slice(2 * group, 2 * group + 2)
            torch.testing.assert_close(found[of_group], expected[of_group], rtol=1e-9, atol=0)


@pytest.mark.parametrize("part", ["gate", "sinks"])
def test_a_value_bias_that_does_not_come_through_whole_is_counted_as_moved(part: str) -> None:
    weights, x = make("factored"), some_text()
    link = weights.v[0]
    bare = replace(weights, v=(replace(link, weight=link.weight[..., :1].expand(-1, -1, 6).contiguous()),))
    assert truncate(bare, gathered(bare, x), ov_rank=1).record.bound == 0
    gate = HeadGate(torch.randn(NUM_HEADS, D_MODEL, dtype=torch.float64))
    beside: dict[str, dict[str, Any]] = {"gate": {"gate": gate}, "sinks": {"sinks": True}}
    changed = with_semantics(bare, **beside[part])
    done = truncate(changed, gathered(changed, x), ov_rank=1)
    assert done.record.bound > 0.1
    assert done.record.tier == "bounded"


def test_narrow_weights_stay_narrow() -> None:
    weights, x = make("factored").to(torch.float32), some_text().float()
    result, record = truncate(weights, gathered(weights, x), qk_rank=3, ov_rank=3)
    assert result.dtype == torch.float32
    assert record.error is not None
    assert float(errors(weights, result, x, "qk", centred=True)[0].max()) > 0


@pytest.mark.parametrize(
    ("traits", "form", "reason"),
    [
        ({"sinks": True}, "qk", "something takes part in the softmax"),
        ({"soft_cap": 30.0}, "qk", "the scores are soft-capped"),
        ({"bias_slots": frozenset("qkv")}, "ov", "the output map has no bias slot in the target format"),
    ],
)
def test_a_mean_that_counts_is_not_taken_off(traits: dict[str, Any], form: Form, reason: str) -> None:
    weights = with_semantics(make("factored"), **traits)
    moments = gathered(weights, some_text())
    with pytest.raises(
        RewriteRefusedError, match=f"{form}: the mean cannot be taken off: {reason}.*centred=False"
    ):
        truncate(weights, moments, **of_rank(form, 3), centred=True)
    by_itself, record = truncate(weights, moments, **of_rank(form, 3))
    assert "about their mean" not in record.choice
    asked = truncate(weights, moments, **of_rank(form, 3), centred=False).weights
    torch.testing.assert_close(by_itself.W_Q, asked.W_Q)
    torch.testing.assert_close(by_itself.W_V, asked.W_V)


def test_moments_of_another_layer_are_refused() -> None:
    moments = gathered(make("factored"), some_text())
    with pytest.raises(RewriteRefusedError, match="4 × 6 channels of keys, the layer has 2 × 6; gather them"):
        truncate(make("grouped"), moments, qk_rank=2)
