"""The measures of a layer's heads against dense matrices, and where there is nothing to measure."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import make_layer
from triptych.core.algebra.semantics import Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.seeing.layer_measures import HeadMeasures, RotaryPairs, measure_heads
from triptych.seeing.similarity import MapSimilarity, compare_maps, span

D, HEADS, WIDTH, VALUE = 24, 4, 6, 5


def map_similarity(one: torch.Tensor, other: torch.Tensor) -> MapSimilarity:
    (Q, R), (other_Q, other_R) = torch.linalg.qr(one), torch.linalg.qr(other)
    return compare_maps(span(R, D), span(other_R, D), Q.mT @ other_Q, D)


def layer(
    dtype: torch.dtype = torch.float64, groups: int = HEADS, kind: str = "self", seed: int = 0
) -> AttentionWeights:
    generator = torch.Generator().manual_seed(seed)

    def link(copies: int, d_in: int, d_out: int) -> Link:
        return Link(torch.randn(copies, d_in, d_out, generator=generator, dtype=torch.float64).to(dtype))

    return AttentionWeights(
        d_model=D,
        num_heads=HEADS,
        q=(link(HEADS, D, WIDTH),),
        k=(link(groups, D, WIDTH),),
        v=(link(groups, D, VALUE),),
        o=(link(HEADS, VALUE, D),),
        semantics=Semantics(1.0, kind),  # type: ignore[arg-type]
    )


def dense(weights: AttentionWeights) -> tuple[np.ndarray, np.ndarray]:
    """W_QK and W_OV of every head as whole matrices."""
    W_Q, W_K, W_V, W_O = (W.double() for W in (weights.W_Q, weights.W_K, weights.W_V, weights.W_O))
    return (W_Q @ W_K.mT).numpy(), (W_V @ W_O).numpy()


def assert_near(one: Tensor | None, other: object, tolerance: float) -> None:
    assert one is not None
    np.testing.assert_allclose(one.numpy(), np.asarray(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-9)])
def test_measures_are_those_of_the_whole_matrices(groups: int, dtype: torch.dtype, tolerance: float) -> None:
    weights = layer(dtype, groups)
    found = measure_heads(weights)
    qk, ov = dense(weights)
    for spectrum, matrices, width in ((found.qk, qk, WIDTH), (found.ov, ov, VALUE)):
        S = np.linalg.svd(matrices, compute_uv=False)[:, :width]
        assert_near(spectrum.values, S, tolerance)
        shares = S / S.sum(-1, keepdims=True)
        assert_near(spectrum.effective_rank, np.exp(-(shares * np.log(shares)).sum(-1)), tolerance)
        assert_near(spectrum.frobenius_norm, np.linalg.norm(matrices, axis=(1, 2)), tolerance)
    symmetric = (qk + qk.transpose(0, 2, 1)) / 2
    share = np.linalg.norm(symmetric, axis=(1, 2)) ** 2 / np.linalg.norm(qk, axis=(1, 2)) ** 2
    assert found.symmetry is not None
    assert_near((1 + found.symmetry) / 2, share, tolerance)
    values = np.linalg.eigvals(ov)
    assert_near(found.copying, values.real.sum(-1) / np.abs(values).sum(-1), 1e-8)
    assert_near(found.norms["o"], np.linalg.norm(weights.W_O.double().numpy(), axis=(1, 2)), tolerance)
    for pair, (one, other) in {"qk": "QK", "qv": "QV", "kv": "KV"}.items():
        expected = map_similarity(*(getattr(weights, f"W_{side}").double() for side in (one, other)))
        similarity = found.similarity[pair]  # type: ignore[index]
        assert similarity is not None
        for name in ("overlap", "procrustes", "cka", "chance", "p_value", "angles"):
            assert_near(getattr(similarity, name), getattr(expected, name), 1e-7)


def near_to_losing_rank() -> AttentionWeights:
    weights = layer(torch.float32)
    W = weights.q[0].weight.clone()
    W[1, :, 3] = W[1, :, 2] + 1e-6 * W[1, :, 3]
    return replace(weights, q=(Link(W),))


def test_a_map_near_to_losing_rank_keeps_float32s_digits() -> None:
    weights = near_to_losing_rank()
    S = np.linalg.svd(dense(weights)[0], compute_uv=False)[:, :WIDTH]
    np.testing.assert_allclose(measure_heads(weights).qk.values.numpy(), S, rtol=1e-5)


def test_a_dead_head_has_rank_0_and_leaves_the_others_alone() -> None:
    weights = layer(torch.float32)
    W = weights.v[0].weight.clone()
    W[2] = 0
    found, whole = measure_heads(replace(weights, v=(Link(W),))), measure_heads(weights)
    assert found.ov.rank(1e-6).tolist() == [VALUE, VALUE, 0, VALUE]
    assert found.ov.effective_rank[2] == 0
    others = [0, 1, 3]
    assert_near(found.ov.values[others], whole.ov.values[others], 1e-10)
    assert_near(found.qk.values, whole.qk.values, 1e-10)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_head_that_is_not_finite_is_left_out_and_the_others_are_not(value: float) -> None:
    weights = layer(torch.float32)
    W = weights.k[0].weight.clone()
    W[3, 5, 1] = value
    found, whole = measure_heads(replace(weights, k=(Link(W),))), measure_heads(weights)
    assert found.finite.tolist() == [True, True, True, False]
    assert found.qk.values[3].isnan().all()
    assert_near(found.qk.values[:3], whole.qk.values[:3], 1e-10)
    assert found.symmetry is not None
    assert bool(found.symmetry[3].isnan())
    assert not bool(found.symmetry[:3].isnan().any())


def mean_square_scores(weights: AttentionWeights, pairs: RotaryPairs, frequencies: Tensor) -> np.ndarray:
    """‖W_Q R(m) W_Kᵀ‖² averaged over distances m, R turning every pair: the slow reference."""
    total = np.zeros(HEADS)
    distances = np.arange(0, 20_000, 7)
    W_Q, W_K = weights.W_Q.double(), weights.W_K.double()
    for m in distances:
        R = torch.eye(WIDTH, dtype=torch.float64)
        for a, b, slow, theta in zip(pairs.first, pairs.second, pairs.slow, frequencies, strict=True):
            if not slow:
                cos, sin = math.cos(m * float(theta)), math.sin(m * float(theta))
                R[a, a], R[a, b], R[b, a], R[b, b] = cos, -sin, sin, cos
        total += ((W_Q @ R @ W_K.mT) ** 2).sum((1, 2)).numpy()
    return total / len(distances)


@pytest.mark.parametrize("slow", [(False, False), (False, True)])
def test_rotary_pairs_have_the_energy_of_scores_over_distances(slow: tuple[bool, bool]) -> None:
    weights = layer()
    pairs = RotaryPairs(first=(1, 2), second=(3, 4), slow=slow)
    found = measure_heads(weights, pairs)
    energy = found.qk.values.square().sum(-1)
    expected = mean_square_scores(weights, pairs, torch.tensor([1.0, 0.37]))
    np.testing.assert_allclose(energy.numpy(), expected, rtol=0.02)
    assert found.qk.values.shape[-1] == WIDTH - slow.count(False)
    assert found.symmetry is None
    assert bool((found.qk.values.diff() <= 0).all())


def test_rotary_pairs_that_are_all_slow_are_no_pairs() -> None:
    weights = layer()
    slow = measure_heads(weights, RotaryPairs(first=(0, 2), second=(1, 3), slow=(True, True)))
    assert_near(slow.qk.values, measure_heads(weights).qk.values, 1e-12)


def test_a_map_that_all_heads_share_is_multiplied_without_copies_of_it() -> None:
    shared, bias = torch.randn(1, 12, 5, dtype=torch.float64), torch.randn(1, 5, dtype=torch.float64)
    own, own_bias = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    for first in (Link(shared), Link(shared, bias)):
        for second in (Link(own), Link(own, own_bias)):
            found, slow = first.then(second), first.repeat(4).then(second)
            assert_near(found.weight, slow.weight, 1e-14)
            assert (found.bias is None) == (slow.bias is None)
            if found.bias is not None and slow.bias is not None:
                assert_near(found.bias, slow.bias, 1e-14)


def test_maps_multiplied_out_are_wide_and_still_shared() -> None:
    weights = layer().to(torch.bfloat16)
    down, up = Link(torch.randn(1, D, 4).bfloat16()), Link(torch.randn(HEADS, 4, WIDTH).bfloat16())
    chain = (down, up)
    stacked = replace(weights, q=chain, k=chain)
    found = stacked.with_single_links()
    assert found.q is found.k
    assert found.dtype == torch.float32
    assert_near(found.W_Q.double(), down.weight.double() @ up.weight.double(), 1e-6)
    assert weights.with_single_links() is not None
    assert weights.with_single_links().dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_narrower_than_heads_have_no_more_rank_than_they_have(dtype: torch.dtype) -> None:
    q, down = (Link(torch.randn(1, D, 3).to(dtype)) for _ in "qd")
    up_q, up_k, up_v = (Link(torch.randn(HEADS, 3, width).to(dtype)) for width in (WIDTH, WIDTH, VALUE))
    weights = replace(layer(dtype), q=(q, up_q), k=(down, up_k), v=(Link(down.weight.clone()), up_v))
    found, exact = measure_heads(weights), weights.to(torch.float64)
    eigenvalues = torch.linalg.eigvals(exact.W_V @ exact.W_O)
    assert_near(found.copying, eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1), 1e-6)
    for pair, (one, other) in {"qk": "QK", "qv": "QV", "kv": "KV"}.items():
        expected = map_similarity(*(getattr(exact, f"W_{side}") for side in (one, other)))
        similarity = found.similarity[pair]  # type: ignore[index]
        assert similarity is not None
        assert_near(similarity.overlap, expected.overlap, 1e-6)
        assert_near(similarity.chance, [3 / D] * HEADS, 1e-12)


def test_what_turned_channels_are_multiplied_by_counts() -> None:
    weights = layer()
    turned = [0, 1, 2, 3]
    times = torch.ones(WIDTH, dtype=torch.float64)
    times[turned] = 1.3
    wide = replace(weights, q=(Link(weights.q[0].weight * times),), k=(Link(weights.k[0].weight * times),))
    pairs = RotaryPairs(first=(0, 2), second=(1, 3), slow=(False, True))
    expected = measure_heads(wide, pairs).qk.values
    assert_near(measure_heads(weights, replace(pairs, factor=1.3)).qk.values, expected, 1e-12)
    assert not torch.allclose(measure_heads(weights, pairs).qk.values, expected)


def test_queries_of_cross_attention_are_not_compared() -> None:
    found: HeadMeasures = measure_heads(layer(kind="cross"))
    assert found.similarity["qk"] is found.similarity["qv"] is None
    assert found.similarity["kv"] is not None
    assert found.symmetry is None


def test_maps_of_unlike_inputs_have_no_likeness_and_no_eigenvalues() -> None:
    weights = layer(kind="cross")
    wider = torch.randn(HEADS, 2 * D, WIDTH, dtype=torch.float64), torch.randn(HEADS, 2 * D, VALUE).double()
    found = measure_heads(replace(weights, k=(Link(wider[0]),), v=(Link(wider[1]),)))
    assert found.copying is None
    assert found.similarity["kv"] is not None
    assert found.qk.values.shape == (HEADS, WIDTH)


def test_many_heads_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = layer(torch.float32, groups=2)
    whole = measure_heads(weights)
    monkeypatch.setattr("triptych.seeing.layer_measures._NUMBERS_AT_A_TIME", D * WIDTH)
    pieces = measure_heads(weights)
    assert_near(pieces.qk.values, whole.qk.values, 1e-12)
    assert_near(pieces.copying, whole.copying, 1e-12)


def test_products_of_maps_in_half_precision_are_measured_without_its_rounding() -> None:
    stored = make_layer("latent", biased=False).weights("self").mapped(torch.Tensor.bfloat16)
    exact = stored.mapped(torch.Tensor.double)
    found, wanted = measure_heads(stored), measure_heads(exact)
    torch.testing.assert_close(found.qk.values, wanted.qk.values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.ov.values, wanted.ov.values, rtol=1e-5, atol=1e-6)
    for form, other in ((stored.qk, exact.qk), (stored.ov, exact.ov)):
        torch.testing.assert_close(
            form.singular_values().double(), other.singular_values(), rtol=1e-5, atol=1e-5
        )
