"""Heads permuted, left out and repeated: what stays the same, by how much the rest moves."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from heads import (
    D_MODEL,
    KINDS,
    LENGTH,
    NAMES,
    NUM_HEADS,
    Untouched,
    assert_layers_agree,
    assert_same_function,
    dense,
    gathered,
    make,
    random_input,
    with_semantics,
)
from tolerances import assert_same
from triptych.core.algebra.cost import writing_cost
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.positions import DisentangledBias
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadNorm, Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import MultiHeadAttention
from triptych.rewriting.functions.head_order import SortHeads, permute_heads, repeat_kv_heads
from triptych.rewriting.functions.merging import merge_kv_heads
from triptych.rewriting.functions.pruning import PruneHeads, measure_importance, prune_heads
from triptych.rewriting.functions.rewrite import LayerToRewrite

# Permuting.


@pytest.mark.parametrize("name", NAMES)
def test_heads_come_in_another_order(name: str) -> None:
    weights, order = make(name), [3, 2, 0, 1]
    permuted, record = permute_heads(weights, order)
    assert record.tier == "bit-exact"
    assert record.choice == "order 3, 2, 0, 1"
    for side in ("W_Q", "W_K", "W_V", "W_O"):
        assert torch.equal(getattr(permuted, side), getattr(weights, side)[order])
    assert record.after == writing_cost(permuted)
    if all(link.learned for link in weights.links()):
        assert record.before == record.after


def test_maps_stay_as_many_as_they_were() -> None:
    for name in NAMES:
        weights = make(name)
        permuted = permute_heads(weights, [2, 3, 1, 0]).weights
        for side in ("q", "k", "v", "o"):
            assert [one.copies for one in permuted.chain(side)] == [one.copies for one in weights.chain(side)]
        for one, other in itertools.combinations(("q", "k", "v"), 2):
            assert permuted.tied(one, other) == weights.tied(one, other)
    latent = permute_heads(make("latent"), [2, 3, 1, 0]).weights
    assert latent.k[0] is latent.v[0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_groups_move_whole_or_not_at_all(order: tuple[int, ...]) -> None:
    weights = make("grouped")
    whole = {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 1}), frozenset({2, 3})}
    if whole:
        permuted = permute_heads(weights, order).weights
        assert_same_function(weights, permuted)
        assert permuted.k[0].copies == 2
        return
    apart = next(pair for pair in (order[:2], order[2:]) if pair[0] // 2 != pair[1] // 2)
    reason = (
        f"^permute_heads refused: heads {apart[0]} and {apart[1]} would come to share a map, but read two, "
        f"{apart[0] // 2} and {apart[1] // 2} of 2; move whole groups, or .*repeat_kv_heads"
    )
    with pytest.raises(RewriteRefusedError, match=reason):
        permute_heads(weights, order)


def test_fixed_slices_become_learned_only_if_they_move() -> None:
    weights = make("direct")
    permuted = permute_heads(weights, [1, 0, 3, 2]).weights
    assert permuted.tied("q", "k")
    assert permuted.tied("k", "v")
    assert permuted.q[0].learned
    same, record = permute_heads(weights, [0, 1, 2, 3])
    assert same is weights
    assert record.notes == ("the heads are in that order",)
    four = permute_heads(make("four_matrix"), [1, 0, 3, 2]).weights
    assert [one.learned for one in four.o] == [True, False, True]


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2], [0, 1, 2, 3, 4]])
def test_what_is_no_permutation_is_refused(order: list[int]) -> None:
    said = str(order).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(
        RewriteRefusedError, match=f"the order {said} does not name each of the 4 heads 0 to 3 once"
    ):
        permute_heads(make("factored"), order)


def test_distances_follow_heads_that_change_places() -> None:
    weights = make("factored")
    d_k = weights.W_Q.shape[-1]
    tables = torch.randn(2, weights.num_heads, 6, d_k, dtype=torch.float64)
    bias = DisentangledBias(tables[0], tables[1], 3, None, weights.scale)
    weights = with_semantics(weights, bias=bias)
    x, order = torch.randn(2, 7, weights.d_model, dtype=torch.float64), [2, 0, 3, 1]
    expected = run_layer(weights, x)
    permuted = permute_heads(weights, order).weights
    torch.testing.assert_close(run_layer(permuted, x), expected, rtol=0, atol=1e-10)
    assert float((run_layer(with_semantics(permuted, bias=bias), x) - expected).abs().max()) > 1e-3
    pruned = prune_heads(weights, [1, 2], bounded=True).weights
    silent = replace(weights, o=(replace(weights.o[0], weight=weights.o[0].weight.clone()),))
    silent.o[0].weight[[1, 2]] = 0.0
    torch.testing.assert_close(run_layer(pruned, x), run_layer(silent, x), rtol=0, atol=1e-10)


def with_norms_of_heads(over: str, key_norms: int = 2) -> AttentionWeights:
    """Two groups, whose queries and keys are normalised with numbers of each head's own."""
    weights = make("grouped")

    def norm(heads: int) -> HeadNorm:
        width = weights.q[0].d_out
        shape = (heads, width) if over == "head" else (heads * width,)
        gains = torch.rand(shape, dtype=torch.float64) + 0.5
        return HeadNorm(1e-6, gains, torch.randn(shape, dtype=torch.float64), over == "head", over)  # type: ignore[arg-type]

    return with_semantics(weights, q_norm=norm(4), k_norm=norm(key_norms), sinks=torch.arange(4.0).double())


@pytest.mark.parametrize("over", ["head", "all heads"])
def test_norms_of_heads_follow_them(over: str) -> None:
    weights, x = with_norms_of_heads(over), random_input(LENGTH)
    silent, shared = without_effect(weights, [1]), with_norms_of_heads(over)
    shared = replace(
        shared,
        k=(shared.k[0].select_copies(lambda copies: [0, 0]),),
        v=(shared.v[0].select_copies(lambda copies: [0, 0]),),
        semantics=replace(shared.semantics, k_norm=HeadNorm(1e-6, torch.ones(12).double(), over="all heads")),
    )
    for before, done in (
        (weights, permute_heads(weights, [3, 2, 0, 1])),
        (weights, SortHeads().apply(LayerToRewrite("here", weights))),
        (weights, repeat_kv_heads(weights)),
        (silent, prune_heads(weights, [1], bounded=True)),
        (silent, prune_heads(silent, [1])),
        (without_effect(weights, [0, 1]), prune_heads(weights, [0, 1], bounded=True)),
        (shared, merge_kv_heads(shared, 1)),
    ):
        assert_same(run_layer(done.weights, x), run_layer(before, x), kind="output")
        assert_layers_agree(before, done.weights)
    again = permute_heads(repeat_kv_heads(weights).weights, [2, 0, 3, 1]).weights
    assert_same(run_layer(again, x), run_layer(weights, x), kind="output")
    with pytest.raises(RewriteRefusedError, match="the keys of a group are normalised with other numbers"):
        merge_kv_heads(
            replace(weights, k=(weights.k[0].select_copies(lambda copies: [0, 0]),)), 1, bounded=True
        )


def test_heads_that_are_normalised_together_stay_and_move_nothing() -> None:
    weights = with_norms_of_heads("all heads")
    step = PruneHeads(heads=(1, 2))
    done = step.apply(LayerToRewrite("here", weights))
    assert done.record.kept == (0, 1, 2, 3)
    assert done.weights.num_heads == 4
    assert done.weights.W_O[[1, 2]].abs().max() == 0
    assert done.record.bound == pytest.approx(float(weights.ov.norm()[[1, 2]].max()), rel=0.5)
    assert "a norm reads the queries and keys of all heads" in done.record.notes[0]


def test_sinks_follow_their_heads() -> None:
    done = permute_heads(with_semantics(make("factored"), sinks=torch.arange(4.0)), [1, 0, 2, 3])
    assert done.weights.semantics.sinks is not None
    assert done.weights.semantics.sinks.tolist() == [1.0, 0.0, 2.0, 3.0]


# Pruning.


def without_effect(weights: AttentionWeights, heads: list[int]) -> AttentionWeights:
    """Some heads have no output: their last output map is zero."""
    *first, last = weights.o
    weight = last.weight.repeat_interleave(weights.num_heads // last.copies, dim=0)
    weight[heads] = 0.0
    return replace(weights, o=(*first, replace(last, weight=weight, learned=True)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "heads", [[1], [3, 0], *(pytest.param(heads, marks=pytest.mark.slow) for heads in ([2, 3], [2, 0, 1]))]
)
def test_heads_without_effect_go(name: str, kind: str, biased: bool, heads: list[int]) -> None:
    weights = without_effect(make(name, kind, biased=biased), heads)
    with Untouched(weights):
        pruned, record = prune_heads(weights, heads)
    left = [head for head in range(4) if head not in heads]
    assert record.tier == "rounding-exact"
    assert record.bound == 0.0
    assert pruned.num_heads == len(left)
    for side in ("W_Q", "W_K", "W_V", "W_O"):
        assert_same(getattr(pruned, side), getattr(weights, side)[left], kind="output")
    assert_same_function(weights, pruned)
    assert_layers_agree(weights, pruned)
    assert record.after == writing_cost(pruned)
    if name != "grouped" and all(link.learned for link in weights.links()):
        assert record.after.parameters < record.before.parameters


@pytest.mark.parametrize(
    ("heads", "copies", "repeated"),
    [([0, 1], 1, False), ([1, 2], 2, False), ([0], 3, True), ([0, 1, 2], 1, False), ([2], 3, True)],
)
def test_a_group_goes_with_its_last_head(heads: list[int], copies: int, repeated: bool) -> None:
    weights = without_effect(make("grouped"), heads)
    pruned, record = prune_heads(weights, heads)
    assert (pruned.k[0].copies, pruned.v[0].copies) == (copies, copies)
    note = "groups of different sizes would be left: of the key-value heads 2 that are left became 3"
    assert record.notes == (note,) * repeated
    assert record.choice == f"{len(heads)} of 4 heads left out: {', '.join(map(str, heads))}"
    assert_same_function(weights, pruned)


def test_key_value_heads_are_repeated_no_more_than_it_takes() -> None:
    q, k, v = (torch.randn(n, D_MODEL, 4, dtype=torch.float64) for n in (8, 2, 2))
    o = torch.randn(8, 4, D_MODEL, dtype=torch.float64)
    o[[0, 2]] = 0.0
    weights = AttentionWeights(D_MODEL, 8, (Link(q),), (Link(k),), (Link(v),), (Link(o),), Semantics(0.5))
    pruned = prune_heads(weights, [2, 0]).weights
    # Groups of 2 and 4 heads are three of 2.
    assert torch.equal(pruned.k[0].weight, k[[0, 1, 1]])
    assert_same_function(weights, pruned)


def test_a_head_may_do_nothing_in_three_ways() -> None:
    weights = make("factored", biased=False)
    (v,), (o,) = weights.v, weights.o
    W_V, W_O = v.weight.clone(), o.weight.clone()
    W_V[0] = 0.0
    W_O[1] = 0.0
    W_V[2, :, :3] = 0.0
    W_O[2, 3:] = 0.0
    weights = replace(weights, v=(replace(v, weight=W_V),), o=(replace(o, weight=W_O),))
    pruned = prune_heads(weights, [0, 1, 2]).weights
    assert_same_function(weights, pruned)


def test_a_head_that_does_something_is_named_with_its_norm() -> None:
    weights = without_effect(make("factored"), [1])
    norms = np.linalg.norm(dense(weights, "ov"), axis=(1, 2))
    worst = 2 if norms[2] > norms[0] else 0
    reason = (
        rf"^prune_heads refused: head {worst} does something: its ‖W_OV‖ is {norms[worst]:.6g}; bounded=True"
    )
    with pytest.raises(RewriteRefusedError, match=reason):
        prune_heads(weights, [1, 0, 2])


@pytest.mark.parametrize("name", NAMES)
def test_what_goes_all_the_same_is_the_bound(name: str) -> None:
    weights = make(name, biased=False)
    norms = np.linalg.norm(dense(weights, "ov"), axis=(1, 2))
    pruned, record = prune_heads(weights, [0, 3], bounded=True)
    assert record.tier == "bounded"
    assert record.bound == pytest.approx(max(norms[0], norms[3]), rel=1e-12)
    assert pruned.num_heads == 2
    np.testing.assert_array_equal(dense(pruned, "ov"), dense(weights, "ov")[1:3])
    MultiHeadAttention.from_weights(pruned)


@pytest.mark.parametrize("biased", [False, True])
def test_the_bound_of_leaving_out_a_head_with_normalised_values_holds_however_small_they_were(
    biased: bool,
) -> None:
    weights = with_semantics(make("factored", "causal", biased=biased), v_norm=HeadNorm(1e-12))
    (v,) = weights.v
    small = replace(v, weight=v.weight * 1e-3, bias=None if v.bias is None else v.bias * 1e-3)
    weights = replace(weights, v=(small,))
    pruned, record = prune_heads(weights, [1], bounded=True)
    x = random_input(LENGTH)
    x = x / x.norm(dim=-1, keepdim=True) * D_MODEL**0.5
    moved = (run_layer(weights, x) - run_layer(pruned, x)).norm(dim=-1).max()
    assert 0.01 < moved / (D_MODEL**0.5 * record.bound) <= 1
    assert record.notes == ("values are normalised: bound by √(d_v / d_model) ‖diag(γ) W_O‖",)
    with pytest.raises(RewriteRefusedError, match=r"head 1 does something: its √.*‖diag\(γ\) W_O‖ is"):
        prune_heads(weights, [1])
    silent = replace(weights, v=(replace(small, weight=small.weight * 0, bias=None),))
    assert prune_heads(silent, [1]).record.bound == 0


def test_a_value_bias_may_act_without_the_values() -> None:
    weights = make("factored")
    (v,) = weights.v
    weight = v.weight.clone()
    weight[2] = 0.0
    weights = replace(weights, v=(replace(v, weight=weight),))
    bias = weights.head_bias("v")
    assert bias is not None
    adds = np.linalg.norm(bias[2].numpy() @ weights.W_O[2].numpy())
    reason = (
        rf"head 2 does something: its value bias adds {adds:.6g} to the output; fold the value bias first"
    )
    with pytest.raises(RewriteRefusedError, match=reason):
        prune_heads(weights, [2])
    assert prune_heads(weights, [2], bounded=True).record.bound == pytest.approx(adds, rel=1e-12)


def test_numbers_of_heads_that_make_no_sense_are_refused() -> None:
    weights = make("factored")
    for heads, said in (
        ([0, 4], "there is no head 4: there are 4, 0 to 3"),
        ([-1], "there is no head -1"),
        ([True], "a head is True: it must be a whole number"),
        ([1, 1], "head 1 is named twice"),
        ([0, 1, 2, 3], "all 4 heads are named, and one must be left"),
    ):
        with pytest.raises(RewriteRefusedError, match=said):
            prune_heads(weights, heads, bounded=True)
    same, record = prune_heads(weights, [])
    assert same is weights
    assert record.notes == ("no head was named",)


# Importance.


def without_head(weights: AttentionWeights, head: int) -> AttentionWeights:
    return without_effect(weights, [head])


@pytest.mark.parametrize("name", ["factored", "grouped", "stacked", "bilinear"])
def test_importance_on_a_text_is_what_the_output_loses_with_the_head(name: str) -> None:
    weights, texts = make(name), [random_input(LENGTH), random_input(9) + 1.0]
    found = measure_importance(weights, gathered(weights, *texts))
    for head in range(NUM_HEADS):
        less = without_head(weights, head)
        lost = [(run_layer(weights, x) - run_layer(less, x)).flatten(0, 1) for x in texts]
        assert float(found[head]) == pytest.approx(float(torch.cat(lost).square().sum(-1).mean().sqrt()))


@pytest.mark.parametrize("name", NAMES)
def test_importance_without_a_text_is_the_bound_of_leaving_a_head_out(name: str) -> None:
    weights = without_effect(make(name), [2])
    found = measure_importance(weights)
    bounds = [prune_heads(weights, [head], bounded=True).record.bound for head in range(NUM_HEADS)]
    np.testing.assert_allclose(found.numpy(), bounds, rtol=1e-12)
    assert float(found[2]) == 0.0


def test_importance_by_the_moments_of_another_layer_is_refused() -> None:
    moments = gathered(make("factored", d_v=5), random_input(LENGTH))
    reason = "the moments are of 4 × 5 channels of mixed values, the layer has 4 × 6; gather them"
    with pytest.raises(RewriteRefusedError, match=f"^measure_importance refused: {reason}"):
        measure_importance(make("factored"), moments)


# Repeating.


@pytest.mark.parametrize("groups", [1, 2])
def test_every_head_gets_a_copy_of_its_own(groups: int) -> None:
    weights = make("grouped", num_kv_heads=groups)
    repeated, record = repeat_kv_heads(weights)
    assert record.tier == "bit-exact"
    assert repeated.k[0].copies == repeated.v[0].copies == 4
    for side in ("W_Q", "W_K", "W_V", "W_O"):
        assert torch.equal(getattr(repeated, side), getattr(weights, side))
    for one in (repeated.k[0], repeated.v[0]):
        assert one.weight.is_contiguous()
        assert one.weight.untyped_storage().nbytes() == one.weight.numel() * 8
    assert record.after.cached_numbers == record.before.cached_numbers * 4 // groups
    assert record.notes == (f"{groups} maps of keys became 4", f"{groups} maps of values became 4")


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("grouped", "differential", "collaborative")]
)
def test_heads_with_keys_and_values_of_their_own_stay(name: str) -> None:
    weights = make(name)
    same, record = repeat_kv_heads(weights)
    assert same is weights
    assert record.tier == "bit-exact"
    assert record.notes == ("every head has its own keys and values, as far as they have maps",)


def test_heads_that_weigh_one_key_map_are_multiplied_out() -> None:
    weights = make("collaborative")
    repeated, record = repeat_kv_heads(weights)
    assert record.tier == "rounding-exact"
    assert record.notes == ("1 maps of keys became 4", "the maps of queries were multiplied into one")
    assert repeated.k[0].copies == NUM_HEADS
