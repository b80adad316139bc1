"""Products of maps: which writing is kept, the numbers of both, and what stands in the way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from heads import D_MODEL, NAMES, NUM_HEADS, assert_same_function, make_layer, storages, with_semantics
from tolerances import assert_same
from triptych.core.algebra.cost import writing_cost
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadNorm
from triptych.core.algebra.weights import AttentionWeights, Chain, Link
from triptych.rewriting.functions.folding import expand, factor, fold


def make(name: str, kind: Any = "self", *, biased: bool = False, **options: int) -> AttentionWeights:
    return make_layer(name, biased=biased, **options).weights(kind)


def link(*shape: int, bias: bool = False) -> Link:
    weight = torch.randn(*shape, dtype=torch.float64)
    return Link(weight, torch.randn(shape[0], shape[-1], dtype=torch.float64) if bias else None)


# Folding of chains.


def test_stacked_maps_are_folded_and_the_record_has_both_numbers() -> None:
    weights = make("stacked", d_k=6, d_v=5)
    folded, record = fold(weights)
    assert record.choice == (
        "q: folded, 576 parameters instead of 1,152; k: folded, 576 parameters instead of 1,152; "
        "v: folded, 480 parameters instead of 1,056"
    )
    assert record.tier == "rounding-exact"
    assert record.before == writing_cost(weights)
    assert record.after == writing_cost(folded)
    assert record.before.parameters - record.after.parameters == 3 * D_MODEL**2


def test_the_fourth_matrix_and_its_factor_go_into_the_output_map() -> None:
    weights = make("four_matrix", d_k=5, d_v=6)
    folded, record = fold(weights)
    assert record.choice == "o: folded, 576 parameters instead of 720"
    assert folded.q is weights.q
    expected = weights.o[0].weight @ weights.o[2].weight / 5**0.5
    assert_same(folded.W_O, expected, kind="output")


def test_heads_that_mix_one_set_of_channels_stay_a_product() -> None:
    weights = make("collaborative", d_shared=10)
    kept, record = fold(weights)
    assert kept is weights
    assert record.tier == "bit-exact"
    assert record.choice == "q: product kept, 280 parameters instead of 960"
    assert fold(weights, keep="folded").record.choice == "q: folded, 960 parameters instead of 280"


def test_the_product_can_be_kept_though_it_is_dearer() -> None:
    weights = make("four_matrix")
    kept, record = fold(weights, keep="product")
    assert kept is weights
    assert record.choice == "o: product kept, 720 parameters instead of 576"


# d_in d_out / (d_in + d_out), all heads of the second map side by side: 24 · 24 / 48.
@pytest.mark.parametrize(("inner", "folds"), [(11, False), (12, False), (13, True)])
def test_a_product_of_small_inner_width_is_kept(inner: int, folds: bool) -> None:
    weights = make("factored")
    weights = replace(weights, q=(link(1, D_MODEL, inner), link(NUM_HEADS, inner, D_MODEL // NUM_HEADS)))
    result, record = fold(weights)
    assert (result is not weights) == folds
    assert f"{576 if folds else inner * 48:,} parameters instead of" in record.choice


# Product 24 r + 48 r numbers, folded 4 · 24 · 12.
@pytest.mark.parametrize(
    ("d_latent", "folds"), [(4, False), (15, False), (16, False), (17, True), (20, True)]
)
def test_keys_and_values_from_a_latent_are_decided_together(d_latent: int, folds: bool) -> None:
    weights = make("latent", d_latent=d_latent)
    result, record = fold(weights)
    assert (result is not weights) == folds
    both = (1152, 72 * d_latent) if folds else (72 * d_latent, 1152)
    verdict = "folded" if folds else "product kept"
    assert record.choice == "k and v: {}, {:,} parameters instead of {:,}".format(verdict, *both)
    only_k = fold(weights, sides=("k",))
    assert only_k.record.choice == record.choice
    assert only_k.record.notes == (("v decided together with k: they share a map",) if folds else ())


# Product 1440 + 20 t numbers with the cache of t tokens, folded 1152 + 48 t.
@pytest.mark.parametrize(("tokens", "folds"), [(1, True), (10, True), (11, False), (1000, False)])
def test_counted_in_bytes_a_latent_is_kept_for_its_cache(tokens: int, folds: bool) -> None:
    weights = make("latent", d_latent=20)
    result, record = fold(weights, by="bytes", tokens=tokens)
    assert (result is not weights) == folds
    numbers = {f"{8 * (1440 + 20 * tokens):,}", f"{8 * (1152 + 48 * tokens):,}"}
    assert all(number in record.choice for number in numbers)
    assert f"bytes of maps and of a cache of {tokens:,} tokens" in record.choice


def test_two_sides_of_one_chain_are_folded_once_and_stay_one() -> None:
    twice = (link(1, D_MODEL, D_MODEL, bias=True), link(NUM_HEADS, D_MODEL, 6, bias=True))
    weights = replace(make("factored"), q=twice, k=twice)
    folded, record = fold(weights, sides=("q",))
    assert folded.q is folded.k
    assert record.choice.startswith("q and k: folded, 600 parameters instead of ")
    assert_same_function(weights, folded)
    tied = replace(make("factored"), k=twice, v=twice)
    folded = fold(tied).weights
    assert folded.k is folded.v
    assert folded.q is tied.q


def test_single_and_fixed_maps_have_nothing_to_fold() -> None:
    for name in ("factored", "direct", "grouped", "bilinear", "shared"):
        weights = make(name)
        result, record = fold(weights, keep="folded")
        assert result is weights
        assert record.notes[0].startswith("nothing to fold")
    assert fold(make("direct"), sides=("qk",)).record.choice == ""


def test_nothing_is_folded_through_a_norm() -> None:
    weights, norm = make("stacked"), HeadNorm(1e-6)
    first, second = weights.k
    parted = replace(weights, k=(replace(first, norm=norm), second))
    with pytest.raises(RewriteRefusedError, match=r"^fold refused: there is a norm after map 1 of k"):
        fold(parted)
    assert len(fold(parted, sides=("q", "v")).weights.q) == 1
    with pytest.raises(RewriteRefusedError, match="there is a norm after map 1 of k"):
        fold(parted, sides=("qk",))
    # A norm after the last map stays where it is.
    at_the_end = replace(weights, v=(weights.v[0], replace(weights.v[1], norm=norm)))
    assert fold(at_the_end).weights.v[-1].norm is norm


def test_a_sequence_has_a_token() -> None:
    with pytest.raises(ValueError, match="tokens is 0"):
        fold(make("stacked"), by="flops", tokens=0)


# Folding of the form.


@pytest.mark.parametrize("biased", [False, True])
def test_of_one_matrix_a_head_the_key_bias_is_dropped(biased: bool) -> None:
    folded, record = fold(make("shared", biased=biased), sides=("qk",), keep="folded")
    assert folded.k == ()
    assert folded.q[0].weight.shape == (NUM_HEADS, D_MODEL, D_MODEL)
    assert ("the key bias was dropped" in record.notes) == biased


@pytest.mark.parametrize(("d_k", "folds"), [(11, False), (12, False), (13, True)])
def test_one_matrix_a_head_is_chosen_above_half_the_models_width(d_k: int, folds: bool) -> None:
    weights = make("factored", d_k=d_k)
    result, record = fold(weights, sides=("qk",))
    assert (result.k == ()) == folds
    assert f"{2304:,}" in record.choice
    assert f"{192 * d_k:,}" in record.choice
    assert result.scale == weights.scale


# With d_k = 18: 2 h · 288 FLOPs a token saved, 2 h · 6 a pair spent.
@pytest.mark.parametrize(("tokens", "folds"), [(1, True), (47, True), (48, False), (49, False)])
def test_counted_in_flops_pairs_pay_for_the_wider_keys(tokens: int, folds: bool) -> None:
    weights = make("factored", d_k=18)
    result, record = fold(weights, sides=("qk",), by="flops", tokens=tokens)
    assert (result is not weights) == folds
    product, folded = (
        tokens * 8 * per_token + tokens**2 * 8 * (width + 6) for per_token, width in ((864, 18), (576, 24))
    )
    cheap, dear = (folded, product) if folds else (product, folded)
    assert f"{cheap:,} FLOPs for {tokens} tokens instead of {dear:,}" in record.choice


def test_the_form_comes_before_its_factors() -> None:
    weights = make("stacked")
    folded, record = fold(weights, sides=("q", "k", "v", "qk"), keep="folded")
    assert [part.split(":")[0] for part in record.choice.split("; ")] == ["qk", "v"]
    assert_same_function(weights, folded)
    # Kept as two, they are looked at one by one.
    record = fold(weights, sides=("q", "k", "v", "qk")).record
    assert [part.split(",")[0] for part in record.choice.split("; ")] == [
        "qk: product kept",
        "q: folded",
        "k: folded",
        "v: folded",
    ]


@pytest.mark.parametrize(
    ("traits", "reason"), [({"soft_cap": 30.0}, "soft-capped at ±30"), ({"sinks": True}, "a sink")]
)
def test_a_form_with_a_key_bias_that_counts_is_refused(traits: dict[str, Any], reason: str) -> None:
    with pytest.raises(RewriteRefusedError, match=f"no place for the key bias, and .*{reason}"):
        fold(with_semantics(make("factored", biased=True), **traits), sides=("qk",))
    assert fold(with_semantics(make("factored"), **traits), sides=("qk",), keep="folded").weights.k == ()


# Taking a form apart.


def test_a_form_is_taken_apart_at_its_rank() -> None:
    one = fold(make("factored", d_k=5), sides=("qk",), keep="folded").weights
    result, record = factor(one)
    assert record.choice == "d_k = 5"
    assert record.tier == "rounding-exact"
    assert record.bound == 0.0
    assert result.q[0].weight.shape == result.k[0].weight.shape == (NUM_HEADS, D_MODEL, 5)
    assert result.v is one.v
    assert_same(result.q[0].weight.norm(dim=1), result.k[0].weight.norm(dim=1), kind="output")


def test_a_form_of_full_rank_is_taken_apart_at_full_width_only() -> None:
    weights = make("bilinear", biased=True)
    result = factor(weights).weights
    assert result.q[0].d_out == D_MODEL
    assert_same_function(weights, result)
    with pytest.raises(
        RewriteRefusedError, match=r"the form of head 0 has rank 24, more than d_k = 23.* d_k = 24"
    ):
        factor(weights, d_k=23)
    with pytest.raises(RewriteRefusedError, match="d_k is 25: a form of 24 × 24 takes 1 to 24"):
        factor(weights, d_k=25)


def test_the_head_whose_rank_is_too_large_is_named() -> None:
    weights = make("factored", d_k=5)
    thin = replace(weights, q=(replace(weights.q[0], weight=weights.q[0].weight.clone()),))
    for head in (0, 1, 3):
        thin.q[0].weight[head, :, 3:] = 0.0
    one = fold(thin, sides=("qk",), keep="folded").weights
    with pytest.raises(RewriteRefusedError, match="the form of head 2 has rank 5, more than d_k = 4"):
        factor(one, d_k=4)


def test_a_query_bias_outside_the_rows_of_the_form_takes_a_channel_of_its_own() -> None:
    weights = make("factored", d_k=5)
    one = fold(weights, sides=("qk",), keep="folded").weights
    bias = torch.randn(NUM_HEADS, D_MODEL, dtype=torch.float64)
    biased = replace(one, q=(replace(one.q[0], bias=bias),))
    with pytest.raises(RewriteRefusedError, match="has rank 6, more than d_k = 5"):
        factor(biased, d_k=5)
    result, record = factor(biased)
    assert record.choice == "d_k = 6"
    assert_same_function(biased, result)


def test_below_its_rank_the_nearest_form_is_taken_and_the_bound_is_met() -> None:
    weights = make("bilinear")
    result, record = factor(weights, d_k=7, bounded=True)
    moved = (result.qk.dense() - weights.qk.dense()).flatten(1).norm(dim=1)
    assert record.tier == "bounded"
    assert_same(torch.tensor(record.bound, dtype=torch.float64), moved.max(), kind="output")
    enough = factor(fold(make("factored"), sides=("qk",), keep="folded").weights, d_k=6, bounded=True)
    assert enough.record.tier == "rounding-exact"


def test_a_form_rounded_before_is_taken_apart_within_the_tolerance_and_says_so() -> None:
    one = fold(make("factored", d_k=5), sides=("qk",), keep="folded").weights
    rounded = one.to(torch.float32).to(torch.float64)
    assert factor(rounded).weights.q[0].d_out == D_MODEL
    result, record = factor(rounded, tolerance=1e-6)
    assert result.q[0].d_out == 5
    assert record.tier == "bounded"
    assert 0 < record.bound < 1e-5


def test_one_matrix_for_all_heads_gives_one_pair_of_maps() -> None:
    weights = replace(make("bilinear"), q=(link(1, D_MODEL, D_MODEL, bias=True),))
    result = factor(weights).weights
    assert result.k[0].copies == 1
    assert_same_function(weights, result)


@pytest.mark.parametrize(
    ("make_weights", "reason"),
    [
        (lambda: make("factored"), "a product already; truncate"),
        (lambda: replace(make("bilinear"), q=()), "neither queries nor keys have a map"),
        (
            lambda: replace(make("bilinear"), q=(replace(make("bilinear").q[0], norm=HeadNorm(1e-6)),)),
            "there is a norm after map 1 of q",
        ),
    ],
)
def test_what_is_not_one_matrix_is_not_taken_apart(
    make_weights: Callable[[], AttentionWeights], reason: str
) -> None:
    with pytest.raises(RewriteRefusedError, match=f"^factor refused: .*{reason}"):
        factor(make_weights())


# Separate maps.


@pytest.mark.parametrize("name", NAMES)
def test_expanded_nothing_is_shared(name: str) -> None:
    weights = make(name, biased=True)
    result, record = expand(weights)
    assert len(set(storages(result))) == sum(len(result.chain(side)) for side in ("q", "k", "v", "o"))
    assert all(link.learned for side in (result.q, result.k, result.v) for link in side)
    if name == "collaborative":
        assert result.q[0].copies == result.k[0].copies == NUM_HEADS
    if name in ("latent", "collaborative"):
        assert record.tier == "rounding-exact"
    else:
        assert record.tier == "bit-exact"
    if name in ("factored", "bilinear", "stacked", "four_matrix", "grouped"):
        assert result is weights
        assert record.notes == ("nothing is tied: queries, keys and values have maps of their own",)


@pytest.mark.parametrize("name", ["symmetric", "shared", "key_value", "direct"])
def test_expanded_maps_are_the_very_same_numbers(name: str) -> None:
    weights = make(name, biased=True)
    result = expand(weights).weights
    for side in ("q", "k", "v"):
        assert_same(result.per_head(side), weights.per_head(side), kind="exact")
        if weights.head_bias(side) is not None:
            assert_same(result.head_bias(side), weights.head_bias(side), kind="exact")


def test_a_map_behind_a_norm_is_not_multiplied_out() -> None:
    weights = make("latent")
    down = replace(weights.k[0], norm=HeadNorm(1e-6))
    parted: dict[str, Chain] = {"k": (down, weights.k[1]), "v": (down, weights.v[1])}
    with pytest.raises(RewriteRefusedError, match="expand refused: there is a norm after map 1 of k"):
        expand(replace(weights, **parted))


def test_semantics_are_handed_on() -> None:
    weights = with_semantics(make("stacked"), kind="cross", soft_cap=20.0)
    assert fold(weights).weights.semantics is weights.semantics
    shared = with_semantics(make("shared"), kind="cross", soft_cap=20.0)
    assert expand(shared).weights.semantics is shared.semantics
