"""Biases that can go, and every reason why they sometimes cannot."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from heads import LENGTH, NAMES, assert_same_function, make, output_of, random_input, storages, with_semantics
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadNorm
from triptych.core.algebra.weights import Link
from triptych.rewriting.functions.biases import drop_key_bias, fold_value_bias

WITHOUT_KEY_MAP = ("bilinear", "direct")


# Keys.


@pytest.mark.parametrize("name", NAMES)
def test_the_key_bias_goes(name: str) -> None:
    weights = make(name)
    result, record = drop_key_bias(weights)
    assert result.head_bias("k") is None
    assert (result is weights) == (name in WITHOUT_KEY_MAP)
    assert len(set(storages(result))) == len(list(result.links()))
    assert record.after.parameters == result.num_parameters


@pytest.mark.parametrize("name", NAMES)
def test_keys_without_a_bias_stay_as_they_are(name: str) -> None:
    weights = with_semantics(make(name, biased=False), positions="rotary")
    result, record = drop_key_bias(weights)
    assert result is weights
    assert record.tier == "bit-exact"
    assert record.notes == ("the keys have no bias",)


def test_keys_tied_to_another_side_are_given_their_own_map_first() -> None:
    weights = make("symmetric")
    result, record = drop_key_bias(weights)
    assert record.notes == ("k shared a map with q: it has its own now",)
    assert result.q is weights.q
    assert result.v is weights.v
    result, record = drop_key_bias(make("key_value"))
    assert record.notes == ("k shared a map with v: it has its own now",)
    result, record = drop_key_bias(make("shared"))
    assert record.notes == ("k shared a map with q and v: it has its own now", "v was given a map of its own")
    assert not result.tied("q", "v")


def test_a_latent_stays_shared_and_its_bias_goes_into_the_values() -> None:
    weights = make("latent")
    result, record = drop_key_bias(weights)
    assert result.k[0] is result.v[0]
    assert result.k[0].bias is None
    assert result.v[1].bias is not None
    assert record.notes == ("the bias of the map shared with v went into the last map of v",)
    # Not where the values' last map has no place for a bias.
    weights = with_semantics(weights, bias_slots=frozenset("qko"))
    result, record = drop_key_bias(weights)
    assert_same_function(weights, result)
    assert result.v is weights.v
    assert result.k[0] is not result.v[0]
    assert record.notes == ("k shared a map with v: it has its own now",)


def test_a_latent_without_a_bias_of_its_own_is_left_alone() -> None:
    weights = make("latent")
    down = replace(weights.k[0], bias=None)
    weights = replace(weights, k=(down, weights.k[1]), v=(down, weights.v[1]))
    result, record = drop_key_bias(weights)
    assert result.k[0] is result.v[0] is down
    assert result.v is weights.v
    assert record.notes == ()
    assert_same_function(weights, result)


@pytest.mark.parametrize("positions", ["none", "relative", "alibi"])
def test_what_is_added_to_scores_does_not_hinder(positions: str) -> None:
    weights = with_semantics(make("factored"), positions=positions, dropout=0.1)
    assert drop_key_bias(weights).weights.head_bias("k") is None


@pytest.mark.parametrize("place", [0, 1])
def test_a_key_bias_before_a_norm_is_no_bias_of_the_keys(place: int) -> None:
    weights = make("stacked")
    links = list(weights.k)
    links[place] = replace(links[place], norm=HeadNorm(1e-6))
    with pytest.raises(RewriteRefusedError, match=f"there is a norm after map {place + 1} of k"):
        drop_key_bias(replace(weights, k=tuple(links)))


def test_a_key_bias_after_a_norm_is_dropped() -> None:
    weights = make("stacked")
    first, second = weights.k
    weights = replace(weights, k=(replace(first, bias=None, norm=HeadNorm(1e-6)), second))
    with pytest.raises(RewriteRefusedError, match="there is a norm after map 1 of k"):
        drop_key_bias(replace(weights, k=(replace(first, norm=HeadNorm(1e-6)), second)))
    assert drop_key_bias(weights).weights.k[1].bias is None


# Values.


@pytest.mark.parametrize("name", [name for name in NAMES if name != "differential"])
def test_the_value_bias_goes(name: str) -> None:
    weights = make(name)
    result = fold_value_bias(weights).weights
    assert result.head_bias("v") is None
    assert (result is weights) == (name in ("direct", "identity_value", "identity_ov"))
    assert len(set(storages(result))) == len(list(result.links()))


def test_the_bias_of_a_group_counts_once_for_every_head_that_reads_it() -> None:
    weights = replace(make("grouped"), o_bias=None)
    bias, W_O = weights.v[0].bias, weights.o[0].weight
    assert bias is not None
    expected = bias[0] @ W_O[0] + bias[0] @ W_O[1] + bias[1] @ W_O[2] + bias[1] @ W_O[3]
    result = fold_value_bias(weights).weights
    torch.testing.assert_close(result.o_bias, expected, rtol=1e-13, atol=1e-13)


def test_values_without_a_bias_stay_as_they_are() -> None:
    weights = with_semantics(make("factored", biased=False), dropout=0.1)
    result, record = fold_value_bias(weights)
    assert result is weights
    assert record.notes == ("the values have no bias",)


def test_values_tied_to_another_side_are_given_their_own_map_first() -> None:
    weights = make("shared")
    result, record = fold_value_bias(weights)
    assert record.notes == ("v shared a map with q and k: it has its own now",)
    assert result.q is result.k is weights.q
    result = fold_value_bias(make("key_value")).weights
    assert result.head_bias("k") is not None


def test_a_latent_stays_shared_and_its_bias_goes_into_the_keys() -> None:
    result = fold_value_bias(make("latent")).weights
    assert result.k[0] is result.v[0]
    assert result.k[1].bias is not None
    both = drop_key_bias(result).weights
    assert all(link.bias is None for link in (*both.k, *both.v))


def test_rotary_positions_caps_and_normalised_keys_do_not_hinder_the_values() -> None:
    weights = with_semantics(make("factored"), positions="rotary", qk_norm=True, soft_cap=30.0)
    assert fold_value_bias(weights).weights.head_bias("v") is None


@pytest.mark.parametrize(("side", "place"), [("v", 0), ("v", 1), ("o", 0)])
def test_a_value_bias_does_not_pass_a_norm_on_its_way(side: str, place: int) -> None:
    weights = replace(make("stacked"), o=make("four_matrix").o)
    links = list(weights.v if side == "v" else weights.o)
    links[place] = replace(links[place], norm=HeadNorm(1e-6))
    parted = replace(weights, v=tuple(links)) if side == "v" else replace(weights, o=tuple(links))
    with pytest.raises(RewriteRefusedError, match=f"there is a norm after map {place + 1} of {side}"):
        fold_value_bias(parted)


def test_the_test_would_see_a_bias_that_is_lost() -> None:
    weights = make("factored")
    lost = replace(weights, v=(Link(weights.v[0].weight),))
    x = random_input(LENGTH)
    assert np.abs(output_of(weights, x) - output_of(lost, x)).max() > 0.1
