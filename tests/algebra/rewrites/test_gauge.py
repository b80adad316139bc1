"""The gauge that all writings of a layer share: found from any of them, and what has none."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import (
    D_MODEL,
    LENGTH,
    NAMES,
    NUM_HEADS,
    assert_layers_agree,
    assert_same_function,
    dense,
    make,
    random_input,
    with_semantics,
)
from triptych.core.algebra.cost import writing_cost
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadNorm
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.rewriting.functions.gauge import gauge_fix

WITH_QK_GAUGE = tuple(name for name in NAMES if name not in ("bilinear", "collaborative"))


def link(weight: Tensor, bias: Tensor | None = None) -> Link:
    return Link(weight, bias)


def assert_forms_equal(one: AttentionWeights, other: AttentionWeights) -> None:
    for form in ("qk", "ov"):
        expected = dense(one, form)
        np.testing.assert_allclose(dense(other, form), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def random_gauge(groups: int, width: int) -> Tensor:
    return torch.randn(groups, width, width, dtype=torch.float64)


def in_other_gauge(weights: AttentionWeights) -> AttentionWeights:
    """The same layer of one map a side, every channel mixed with others of its group."""
    served_k, served_v = (weights.num_heads // chain[0].copies for chain in (weights.k, weights.v))
    G, M = (random_gauge(chain[0].copies, chain[0].d_out) for chain in (weights.k, weights.v))
    O = torch.linalg.inv(M).repeat_interleave(served_v, dim=0) @ weights.o[0].weight  # noqa: E741
    return replace(
        weights,
        q=(weights.q[0].then(Link(G.repeat_interleave(served_k, dim=0))),),
        k=(weights.k[0].then(Link(torch.linalg.inv(G).mT.contiguous())),),
        v=(weights.v[0].then(Link(M)),),
        o=(Link(O),),
    )


@pytest.mark.parametrize("name", WITH_QK_GAUGE)
def test_a_fixed_gauge_is_said_to_change_nothing(name: str) -> None:
    weights = make(name)
    fixed, record = gauge_fix(weights)
    assert record.tier == "rounding-exact"
    assert record.bound == 0.0
    assert record.before == writing_cost(weights)
    assert record.after == writing_cost(fixed)


@pytest.mark.parametrize("name", WITH_QK_GAUGE)
def test_both_maps_of_a_form_share_its_singular_values(name: str) -> None:
    fixed = gauge_fix(make(name)).weights
    for one, other, groups in (
        (fixed.W_Q, fixed.W_K, fixed.num_key_heads),
        (fixed.W_O.mT, fixed.W_V, fixed.num_value_heads),
    ):
        served = fixed.num_heads // groups
        for group in range(groups):
            own = np.concatenate(one[group * served : (group + 1) * served].numpy())
            common = other[group * served].numpy()
            S = np.linalg.svd(own @ common.T, compute_uv=False)[: common.shape[1]]
            # Orthogonal columns of length √σ, on both sides, largest first.
            np.testing.assert_allclose(own.T @ own, np.diag(S), atol=1e-11 * S[0])
            np.testing.assert_allclose(common.T @ common, np.diag(S), atol=1e-11 * S[0])


def test_without_groups_it_is_the_gauge_of_each_form() -> None:
    weights = make("factored", d_k=5, d_v=7)
    fixed = gauge_fix(weights).weights
    for form, left, right in ((weights.qk, fixed.W_Q, fixed.W_K), (weights.ov, fixed.W_V, fixed.W_O.mT)):
        expected = form.gauge_fix()
        torch.testing.assert_close(left, expected.left, rtol=0, atol=1e-11)
        torch.testing.assert_close(right, expected.right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_gauge_of_a_layer_is_fixed_to_the_same_numbers(groups: int) -> None:
    weights = make("grouped", num_kv_heads=groups, d_k=5, d_v=3)
    other = in_other_gauge(weights)
    assert_same_function(weights, other)
    one, two = gauge_fix(weights).weights, gauge_fix(other).weights
    for side in ("q", "k", "v", "o"):
        (mine,), (theirs,) = one.chain(side), two.chain(side)
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=0, atol=1e-9)
        assert (mine.bias is None) == (theirs.bias is None)
        if mine.bias is not None and theirs.bias is not None:
            torch.testing.assert_close(mine.bias, theirs.bias, rtol=0, atol=1e-8)
    again = gauge_fix(one).weights
    torch.testing.assert_close(again.W_Q, one.W_Q, rtol=0, atol=1e-11)
    torch.testing.assert_close(again.W_O, one.W_O, rtol=0, atol=1e-11)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_largest_entry_of_every_column_is_positive(groups: int) -> None:
    fixed = gauge_fix(make("grouped", num_kv_heads=groups)).weights
    for columns in (fixed.W_Q.reshape(groups, -1, fixed.W_Q.shape[-1]), fixed.v[0].weight):
        largest = columns.gather(1, columns.abs().argmax(dim=1, keepdim=True))
        assert bool((largest > 0).all())


def test_the_structure_stays() -> None:
    latent = gauge_fix(make("latent")).weights
    assert latent.k[0] is latent.v[0]
    stacked = make("stacked")
    fixed = gauge_fix(stacked).weights
    assert [len(fixed.chain(side)) for side in ("q", "k", "v", "o")] == [2, 2, 2, 1]
    assert torch.equal(fixed.q[0].weight, stacked.q[0].weight)
    four = gauge_fix(make("four_matrix")).weights
    assert [factor.learned for factor in four.o] == [True, False, True]
    symmetric, record = gauge_fix(make("symmetric"))
    assert symmetric.tied("q", "k")
    assert record.notes == ()
    assert record.before == record.after
    for name in WITH_QK_GAUGE:
        weights = make(name)
        fixed = gauge_fix(weights).weights
        assert fixed.W_Q.shape == weights.W_Q.shape
        assert fixed.W_O.shape == weights.W_O.shape
        assert fixed.num_key_heads == weights.num_key_heads


def test_what_is_untied_is_said() -> None:
    assert gauge_fix(make("key_value")).record.notes == ("keys and values had one map and have two now",)
    assert gauge_fix(make("shared")).record.notes == ("keys and values had one map and have two now",)
    result, record = gauge_fix(make("direct"))
    assert record.notes == (
        "the fixed slices of the input became learned maps",
        "keys and values had one map and have two now",
    )
    assert record.after.parameters > record.before.parameters
    assert all(link.learned for link in result.links())


# Forms of less rank than channels, biases included. The sink makes constants of a row count.


def output_with_sink(weights: AttentionWeights, x: Tensor) -> Tensor:
    q, k, v = (
        x[:, None] @ W + (0.0 if b is None else b[:, None])
        for W, b in (
            (weights.W_Q, weights.head_bias("q")),
            (weights.W_K, weights.head_bias("k")),
            (weights.W_V, weights.head_bias("v")),
        )
    )
    scores = weights.scale * q @ k.mT
    p = torch.cat((scores, torch.zeros_like(scores[..., :1])), dim=-1).softmax(dim=-1)[..., :-1]
    return (p @ v @ weights.W_O).sum(dim=1)


def assert_same_with_sink(one: AttentionWeights, other: AttentionWeights) -> None:
    x = random_input(LENGTH)
    expected = output_with_sink(one, x)
    actual = output_with_sink(other, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_channels_beyond_the_width_of_the_model_are_kept(groups: int, biased: bool) -> None:
    weights = make("grouped", biased=biased, num_kv_heads=groups, d_k=D_MODEL + 6, d_v=D_MODEL + 3)
    fixed = gauge_fix(weights).weights
    assert fixed.W_Q.shape == weights.W_Q.shape
    assert fixed.W_V.shape == weights.W_V.shape
    assert_same_function(weights, fixed)
    assert_same_with_sink(weights, fixed)
    assert_layers_agree(weights, fixed)
    assert_forms_equal(weights, fixed)
    if groups == NUM_HEADS or not biased:
        assert float(fixed.W_Q[..., D_MODEL:].abs().max()) < 1e-9
        assert float(fixed.W_K[..., D_MODEL:].abs().max()) < 1e-9


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dead", ["q", "k", "v", "o"])
def test_a_bias_that_acts_where_its_form_is_zero_goes_on_acting(dead: Any, groups: int) -> None:
    weights = make("grouped", num_kv_heads=groups)
    (only,) = weights.chain(dead)
    weight = only.weight.clone()
    weight[: max(1, only.copies // 2)] = 0.0
    weights = replace(weights, **{dead: (replace(only, weight=weight),)})
    fixed = gauge_fix(weights).weights
    assert_forms_equal(weights, fixed)
    assert_same_with_sink(weights, fixed)
    assert_layers_agree(weights, fixed)


@pytest.mark.parametrize("name", ["factored", "grouped", "symmetric"])
def test_a_form_of_lower_rank_leaves_zeros(name: str) -> None:
    weights = make(name, biased=False)
    thin = weights.q[0].weight.clone()
    thin[..., 4:] = thin[..., :2]
    q = (Link(thin),)
    weights = replace(weights, q=q, k=q if name == "symmetric" else weights.k)
    fixed = gauge_fix(weights).weights
    assert_forms_equal(weights, fixed)
    assert not bool(fixed.W_Q[..., 4:].any())
    assert not bool(fixed.W_K[..., 4:].any())


def test_half_precision_is_computed_in_single() -> None:
    weights = make("grouped").to(torch.bfloat16)
    fixed = gauge_fix(weights).weights
    assert fixed.dtype == torch.bfloat16
    near = gauge_fix(weights.to(torch.float32)).weights.to(torch.bfloat16)
    assert torch.equal(fixed.W_Q, near.W_Q)


# Refusals.


@pytest.mark.parametrize(
    ("name", "traits", "reason"),
    [
        (
            "factored",
            {"positions": "rotary"},
            'qk: .*one non-zero complex scalar per rotary pair.*; forms=."ov",. leaves qk alone',
        ),
        ("bilinear", {}, "qk: no gauge: no map makes keys.*; factor it first, or forms="),
        (
            "collaborative",
            {},
            "qk: all heads share one key map .*diagonal gauge only; expand it first, or forms=",
        ),
    ],
)
def test_a_form_without_a_gauge_of_its_own_is_refused(name: str, traits: dict[str, Any], reason: str) -> None:
    with pytest.raises(RewriteRefusedError, match=f"^gauge_fix refused: {reason}"):
        gauge_fix(with_semantics(make(name), **traits))


def test_the_other_form_can_be_fixed() -> None:
    turned = with_semantics(make("grouped"), positions="rotary")
    fixed, record = gauge_fix(turned, forms=("ov",))
    assert fixed.q[0].weight is turned.q[0].weight
    assert record.checked == ("W_OV: no clipping", "W_OV: no norms of values", "W_OV: no gates of channels")
    plain = make("grouped")
    assert torch.equal(gauge_fix(plain, forms=("qk",)).weights.W_V, plain.W_V)
    both = with_semantics(make("grouped"), clip=2.0)
    with pytest.raises(RewriteRefusedError, match=r"channel by channel and with their biases$"):
        gauge_fix(both)


def test_maps_behind_a_norm_are_fixed_and_a_norm_behind_which_none_is_refused() -> None:
    weights = make("stacked")
    gain = torch.rand(weights.k[0].d_out, dtype=torch.float64) + 0.5
    parted = replace(weights, k=(replace(weights.k[0], norm=HeadNorm(1e-6, gain)), weights.k[1]))
    fixed, x = gauge_fix(parted).weights, random_input(LENGTH)
    torch.testing.assert_close(run_layer(fixed, x), run_layer(parted, x))
    assert not torch.equal(fixed.k[1].weight, parted.k[1].weight)
    behind = Link(torch.eye(weights.k[1].d_out, dtype=torch.float64)[None], learned=False)
    last = replace(weights, k=(*weights.k[:1], replace(weights.k[1], norm=HeadNorm(1e-6)), behind))
    with pytest.raises(RewriteRefusedError, match=r"^gauge_fix refused: there is a norm after map 2 of k"):
        gauge_fix(last)
    assert gauge_fix(last, forms=("ov",)).record.bound == 0.0


def test_a_form_that_is_not_is_named() -> None:
    unchecked = inspect.unwrap(gauge_fix)  # the types are checked in tests only
    with pytest.raises(ValueError, match="forms names vo: the forms are qk and ov"):
        unchecked(make("factored"), forms=("qk", "vo"))


def test_no_form_named_is_nothing_done() -> None:
    weights = make("direct")
    assert gauge_fix(weights, forms=()).weights.q[0].weight is weights.q[0].weight
