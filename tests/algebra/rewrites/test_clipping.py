"""Layers that clip queries, keys and values: what leaves those numbers alone is allowed, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from heads import LENGTH, make_layer, make_norm, random_input, with_semantics
from triptych.core.algebra.function import channels, run_layer
from triptych.core.algebra.norm_folding import fold_norm
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten
from triptych.core.algebra.weights import AttentionWeights
from triptych.rewriting.functions import (
    drop_key_bias,
    expand,
    factor,
    fold,
    fold_value_bias,
    gauge_fix,
    measure_importance,
    merge_kv_heads,
    permute_heads,
    prune_heads,
    repeat_kv_heads,
    to_latent,
    truncate,
)
from triptych.rewriting.functions.bounds import output_bound, score_bound

Rewrite = Callable[[AttentionWeights], Rewritten]
CLIP = 1.5


def clipped(name: str, **options: int) -> AttentionWeights:
    """A causal layer of random numbers that clips."""
    weights = make_layer(name, biased=True, **options).weights("causal")
    return with_clip(weights, CLIP)


def with_clip(weights: AttentionWeights, clip: float | None) -> AttentionWeights:
    return with_semantics(weights, clip=clip)


def output(weights: AttentionWeights, x: Tensor) -> Tensor:
    norm = weights.norm
    if norm is not None:
        x = x * (norm.weight + norm.offset) + (0.0 if norm.bias is None else norm.bias)
    return run_layer(weights, x)


def assert_clipping_bites(weights: AttentionWeights, x: Tensor) -> None:
    """Some channels of queries, keys and values are clipped and some are not."""
    for found in channels(weights, x):
        share = float((found.abs() == CLIP).double().mean())
        assert 0.05 < share < 0.95
    assert (output(weights, x) - output(with_clip(weights, None), x)).abs().max() > 0.1


def twins() -> AttentionWeights:
    """Heads that have the same key and value maps, two by two."""
    weights = clipped("grouped", num_kv_heads=2)
    return repeat_kv_heads(weights).weights


def with_a_dead_head() -> AttentionWeights:
    weights = clipped("factored")
    o = weights.o[0].weight.clone()
    o[1] = 0
    return replace(weights, o=(replace(weights.o[0], weight=o),))


def behind_a_norm() -> AttentionWeights:
    weights = clipped("factored")
    return replace(weights, norm=make_norm())


ALLOWED: dict[str, tuple[Callable[[], AttentionWeights], Rewrite]] = {
    "fold_norm": (behind_a_norm, fold_norm),
    "fold": (partial(clipped, "stacked"), partial(fold, keep="folded")),
    "fold the fourth matrix": (partial(clipped, "four_matrix"), partial(fold, keep="folded")),
    "expand": (partial(clipped, "shared"), expand),
    "permute_heads": (partial(clipped, "factored"), partial(permute_heads, order=[2, 0, 3, 1])),
    "prune_heads": (with_a_dead_head, partial(prune_heads, heads=[1])),
    "repeat_kv_heads": (partial(clipped, "grouped", num_kv_heads=2), repeat_kv_heads),
    "merge_kv_heads of equal ones": (twins, partial(merge_kv_heads, num_kv_heads=2)),
    "to_latent": (partial(clipped, "factored"), to_latent),
}
REFUSED: dict[str, tuple[Callable[[], AttentionWeights], Rewrite]] = {
    "drop_key_bias": (partial(clipped, "factored"), drop_key_bias),
    "fold_value_bias": (partial(clipped, "factored"), fold_value_bias),
    "gauge_fix of W_QK": (partial(clipped, "factored"), partial(gauge_fix, forms=("qk",))),
    "gauge_fix of W_OV": (partial(clipped, "factored"), partial(gauge_fix, forms=("ov",))),
    "truncate W_QK": (partial(clipped, "factored"), partial(truncate, qk_rank=5)),
    "truncate W_OV": (partial(clipped, "factored"), partial(truncate, ov_rank=5)),
    "fold the form": (partial(clipped, "factored"), partial(fold, sides=("qk",), keep="folded")),
    "factor": (partial(clipped, "bilinear"), factor),
    "merge_kv_heads": (partial(clipped, "factored"), partial(merge_kv_heads, num_kv_heads=2, bounded=True)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_leaves_queries_keys_and_values_alone_is_done(name: str) -> None:
    make, rewrite = ALLOWED[name]
    weights, x = make(), random_input(LENGTH)
    result = rewrite(weights).weights
    assert result is not weights
    assert result.semantics.clip == CLIP
    if weights.norm is None:
        assert_clipping_bites(weights, x)
    assert_clipping_bites(result, x)
    torch.testing.assert_close(output(result, x), output(weights, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_what_moves_channels_or_biases_is_refused_because_the_output_would_move(name: str) -> None:
    make, rewrite = REFUSED[name]
    weights, x = make(), random_input(LENGTH)
    with pytest.raises(RewriteRefusedError, match=r"queries, keys and values are clipped at ±1\.5"):
        rewrite(weights)
    moved = with_clip(rewrite(with_clip(weights, None)).weights, CLIP)
    assert (output(moved, x) - output(weights, x)).abs().max() > 1e-3


def test_no_bound_of_scores_or_outputs_is_claimed() -> None:
    weights = clipped("factored")
    for bound in (score_bound, output_bound):
        with pytest.raises(RewriteRefusedError, match=r"no bound of the .* is known: .* clipped"):
            bound(weights, weights)


def test_a_head_whose_form_is_zero_only_without_clipping_is_not_dead() -> None:
    weights = clipped("factored")
    v, o = weights.v[0].weight.clone(), weights.o[0].weight.clone()
    v[1], o[1] = 0, 0
    v[1, :, 0], o[1, 0] = 1.0, 1.0
    v[1, :, 1], o[1, 1] = 0.5, -2.0
    bias = torch.zeros_like(weights.v[0].bias) if weights.v[0].bias is not None else None
    weights = replace(
        weights, v=(replace(weights.v[0], weight=v, bias=bias),), o=(replace(weights.o[0], weight=o),)
    )
    x = random_input(LENGTH)
    assert float(measure_importance(with_clip(weights, None))[1]) < 1e-10
    assert float(measure_importance(weights)[1]) > 1
    with pytest.raises(RewriteRefusedError, match="head 1 does something"):
        prune_heads(weights, [1])
    without, record = prune_heads(weights, [1], bounded=True)
    assert record.bound > 1
    assert (output(without, x) - output(weights, x)).abs().max() > 1e-3
