"""Heads permuted, left out, repeated and merged: what stays the same, by how much the rest moves."""

import itertools
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads import (
    D_MODEL,
    LENGTH,
    MEMORY_LENGTH,
    NUM_HEADS,
    Untouched,
    assert_same_function,
    make_layer,
    output_of,
    random_input,
)
from tolerances import assert_same
from triptych.algebra.cost import writing_cost
from triptych.algebra.rewrites.heads import permute_heads, prune_heads, repeat_kv_heads
from triptych.algebra.rewrites.merging import merge_kv_heads
from triptych.algebra.rewrites.record import RewriteRefusedError
from triptych.algebra.weights import AttentionWeights, Link, Side
from triptych.attention import MultiHeadAttention
from triptych.attention.projections import PARAMETERISATIONS

NAMES = tuple(PARAMETERISATIONS)
KINDS = ("self", "causal", "cross")
Array = NDArray[np.float64]
Form = Literal["qk", "ov"]


def make(name: str, kind: Any = "self", *, biased: bool = True, **options: int) -> AttentionWeights:
    return make_layer(name, biased=biased, **options).weights(kind)


def with_traits(weights: AttentionWeights, **traits: Any) -> AttentionWeights:
    return replace(weights, traits=replace(weights.traits, **traits))


def outputs(layer: MultiHeadAttention, kind: str, x: Tensor, memory: Tensor) -> Tensor:
    if kind == "cross":
        return layer(x, memory=memory).output.detach()
    return layer(x, causal=kind == "causal").output.detach()


def assert_layers_agree(before: AttentionWeights, after: AttentionWeights) -> None:
    """Real layers made of both give the same output."""
    x, memory = random_input(LENGTH), random_input(MEMORY_LENGTH)
    one, two = (
        outputs(MultiHeadAttention.from_weights(w), before.traits.kind, x, memory) for w in (before, after)
    )
    torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-10 * float(one.abs().max()))


def dense(weights: AttentionWeights, form: Form) -> Array:
    left, right = (weights.W_Q, weights.W_K.mT) if form == "qk" else (weights.W_V, weights.W_O)
    return np.stack([a @ b for a, b in zip(left.numpy(), right.numpy(), strict=True)])


def served(copies: int) -> int:
    return NUM_HEADS // copies


# Permuting.


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_heads_does_not_matter(name: str, kind: str, biased: bool) -> None:
    weights = make(name, kind, biased=biased)
    order = [3, 2, 0, 1]
    with Untouched(weights):
        permuted, record = permute_heads(weights, order)
    assert record.tier == "bit-exact"
    assert record.choice == "order 3, 2, 0, 1"
    for side in ("W_Q", "W_K", "W_V", "W_O"):
        assert torch.equal(getattr(permuted, side), getattr(weights, side)[order])
    assert_same_function(weights, permuted)
    assert_layers_agree(weights, permuted)
    assert record.after == writing_cost(permuted)
    if name != "direct":
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


@pytest.mark.parametrize("positions", ["alibi", "relative"])
def test_a_bias_of_each_head_would_stay_behind(positions: str) -> None:
    weights = with_traits(make("factored"), positions=positions)
    reason = f"{positions} positions add a bias of each head's own"
    with pytest.raises(RewriteRefusedError, match=f"^permute_heads refused: {reason}"):
        permute_heads(weights, [1, 0, 2, 3])
    with pytest.raises(RewriteRefusedError, match=f"^prune_heads refused: {reason}"):
        prune_heads(weights, [0], bounded=True)


def test_what_may_be_each_heads_own_is_noted() -> None:
    weights = with_traits(make("factored"), sinks=True, qk_norm=True, positions="rotary")
    notes = permute_heads(weights, [1, 0, 2, 3]).record.notes
    assert [note.split(" of ")[0] for note in notes] == ["a sink", "a gain"]


# Pruning.


def without_effect(weights: AttentionWeights, heads: list[int]) -> AttentionWeights:
    """Some heads have no output: their last output map is zero."""
    *first, last = weights.o
    weight = last.weight.clone()
    weight[heads] = 0.0
    return replace(weights, o=(*first, replace(last, weight=weight)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [[1], [2, 3], [3, 0], [2, 0, 1]])
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
    if name not in ("direct", "grouped"):
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
    weights = AttentionWeights(D_MODEL, 8, 0.5, (Link(q),), (Link(k),), (Link(v),), (Link(o),))
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
    with pytest.raises(RewriteRefusedError, match="there is no head 4: there are 4, 0 to 3"):
        prune_heads(weights, [0, 4])
    with pytest.raises(RewriteRefusedError, match="there is no head -1"):
        prune_heads(weights, [-1])
    with pytest.raises(RewriteRefusedError, match="head 1 is named twice"):
        prune_heads(weights, [1, 1])
    with pytest.raises(RewriteRefusedError, match="all 4 heads are named, and one must be left"):
        prune_heads(weights, [0, 1, 2, 3], bounded=True)
    same, record = prune_heads(weights, [])
    assert same is weights
    assert record.notes == ("no head was named",)


# Repeating.


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_every_head_gets_a_copy_of_its_own(groups: int, kind: str, biased: bool) -> None:
    weights = make("grouped", kind, biased=biased, num_kv_heads=groups)
    with Untouched(weights):
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
    assert_same_function(weights, repeated)
    assert_layers_agree(weights, repeated)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("grouped", "collaborative")])
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
    assert record.notes == ("1 maps of keys became 4", "the maps of queries were multiplied out")
    assert_same_function(weights, repeated)
    assert_layers_agree(weights, repeated)


# Merging.


def in_random_gauge(weights: AttentionWeights, *, rotary: bool = False) -> AttentionWeights:
    """Every head in a gauge of its own, the same function. Keys and values have a copy a head."""
    heads, d_k, d_v = weights.num_heads, weights.W_Q.shape[-1], weights.W_V.shape[-1]
    G, M = (torch.randn(heads, d, d, dtype=torch.float64) for d in (d_k, d_v))
    q, k, v = (
        weights.multiplied(side).of_heads(heads).then(Link(change))
        for side, change in (("q", G), ("k", torch.linalg.inv(G).mT.contiguous()), ("v", M))
    )
    return replace(weights, q=(q,), k=(k,), v=(v,), o=(Link(torch.linalg.inv(M) @ weights.W_O),))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("groups", "to"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_heads_that_are_equal_up_to_gauge_are_merged(groups: int, to: int, kind: str, biased: bool) -> None:
    original = make("grouped", kind, biased=biased, num_kv_heads=min(groups, to), d_k=5, d_v=7)
    weights = in_random_gauge(original)
    with Untouched(weights):
        merged, record = merge_kv_heads(weights, to)
    assert record.tier == "rounding-exact"
    assert record.bound == 0.0
    assert (merged.k[0].copies, merged.v[0].copies) == (to, to)
    assert merged.W_Q.shape == weights.W_Q.shape
    assert merged.W_V.shape == weights.W_V.shape
    assert record.after.cached_numbers == to * 12
    for form in ("qk", "ov"):
        expected = dense(weights, form)
        np.testing.assert_allclose(dense(merged, form), expected, atol=1e-10 * np.abs(expected).max())
    x, memory = random_input(LENGTH), random_input(MEMORY_LENGTH) if kind == "cross" else None
    expected = output_of(original, x, memory)
    np.testing.assert_allclose(output_of(merged, x, memory), expected, atol=1e-10 * np.abs(expected).max())
    assert_layers_agree(original, merged)
    assert MultiHeadAttention.from_weights(merged).parameterisation.name == "grouped"
    if biased:
        # The value biases are one up to gauge as well: nothing goes into the output.
        assert record.notes == ("the key bias was left out: the softmax is blind to it",)
        assert merged.v[0].bias is not None
        assert torch.equal(merged.o_bias, weights.o_bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bilinear"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("to", [1, 2])
def test_the_nearest_shared_keys_and_values(name: str, biased: bool, to: int) -> None:
    options = {"num_kv_heads": 4} if name == "grouped" else {}
    weights = make(name, biased=biased, **options)
    with Untouched(weights):
        merged, record = merge_kv_heads(weights, to, bounded=True)
    assert record.tier == "bounded"
    assert (merged.num_key_heads, merged.num_value_heads) == (to, to)
    moves: list[float] = []
    for form in ("qk", "ov"):
        old, new = dense(weights, form), dense(merged, form)
        # Queries' sides stacked, keys' sides in common; values' sides in common, outputs' beside.
        stack = old.swapaxes(1, 2) if form == "ov" else old
        width = merged.W_K.shape[-1] if form == "qk" else merged.W_V.shape[-1]
        for group in range(to):
            block = slice(group * served(to), (group + 1) * served(to))
            S = np.linalg.svd(np.concatenate(stack[block]), compute_uv=False)
            optimum = np.sqrt((S[width:] ** 2).sum())
            assert np.linalg.norm((old - new)[block]) == pytest.approx(optimum, rel=1e-9, abs=1e-11)
        moves.extend(np.linalg.norm(old - new, axis=(1, 2)))
    if not biased:
        assert record.bound == pytest.approx(max(moves), rel=1e-10)
    assert record.bound >= max(moves) * (1 - 1e-12)
    layer = MultiHeadAttention.from_weights(merged)
    expected = output_of(merged, x := random_input(LENGTH))
    np.testing.assert_allclose(
        layer(x).output.detach().numpy(), expected, atol=1e-10 * np.abs(expected).max()
    )


def test_heads_that_differ_are_refused_with_the_worst_group() -> None:
    weights = in_random_gauge(make("grouped", num_kv_heads=2, biased=False))
    (k,) = weights.k
    weight = k.weight.clone()
    weight[3] += 0.1 * torch.randn_like(weight[3])
    weights = replace(weights, k=(replace(k, weight=weight),))
    old = dense(weights, "qk")[2:]
    S = np.linalg.svd(np.concatenate(old), compute_uv=False)
    error, norm = np.sqrt((S[6:] ** 2).sum()), np.linalg.norm(old)
    reason = (
        rf"^merge_kv_heads refused: W_QK of group 1 \(heads 2 to 3\) moves by {error:.6g}, "
        f"of a norm of {norm:.6g}; bounded=True merges"
    )
    with pytest.raises(RewriteRefusedError, match=reason):
        merge_kv_heads(weights, 2)
    record = merge_kv_heads(weights, 2, tolerance=0.5).record
    assert (record.tier, record.bound) == ("rounding-exact", 0.0)
    assert merge_kv_heads(weights, 2, bounded=True).record.choice.startswith("W_QK of group 1")


def test_a_query_bias_counts_as_a_row_of_the_form() -> None:
    weights = make("factored")
    merged, record = merge_kv_heads(weights, 2, bounded=True)
    moves = []
    for form, side in (("qk", "q"), ("ov", "v")):
        rows = [dense(w, form) for w in (weights, merged)]
        for place, w in enumerate((weights, merged)):
            bias, reader = w.head_bias(side), w.W_K.mT if form == "qk" else w.W_O
            if bias is not None:
                row = np.einsum("hc,hcd->hd", bias.numpy(), reader.numpy())[:, None]
                rows[place] = np.concatenate((rows[place], row), axis=1)
            elif form == "ov":
                # It went into the output's, so the row is where it was.
                rows[0] = rows[0][:, :D_MODEL]
        moves.append(np.linalg.norm(rows[0] - rows[1], axis=(1, 2)).max())
    assert record.bound == pytest.approx(max(moves), rel=1e-10)
    assert merged.q[0].bias is not None


def equal_maps(weights: AttentionWeights, *, sides: tuple[Side, ...] = ("k", "v")) -> AttentionWeights:
    """Heads 0 and 1, 2 and 3 have the same maps."""
    for side in sides:
        (one,) = weights.chain(side)
        first = [0, 0, 2, 2]
        bias = None if one.bias is None else one.bias[first]
        weights = replace(weights, **{side: (replace(one, weight=one.weight[first], bias=bias),)})
    return weights


@pytest.mark.parametrize("biased", [False, True])
def test_maps_that_are_the_same_are_kept_once_whatever_stands_between(biased: bool) -> None:
    weights = with_traits(
        equal_maps(make("factored", biased=biased)),
        positions="rotary",
        qk_norm=True,
        value_gate=True,
        sinks=True,
    )
    merged, record = merge_kv_heads(weights, 2)
    assert record.tier == "bit-exact"
    assert record.checked == (
        "4 key-value heads can be shared out among 2",
        "the heads of a group are equal up to gauge",
    )
    for side in ("W_Q", "W_K", "W_V", "W_O"):
        assert torch.equal(getattr(merged, side), getattr(weights, side))
    for side in ("q", "k", "v"):
        one, other = merged.head_bias(side), weights.head_bias(side)
        assert (one is None and other is None) or torch.equal(one, other)
    assert_same_function(weights, merged)


def test_one_side_may_be_the_same_and_the_other_mixed() -> None:
    weights = with_traits(equal_maps(make("factored"), sides=("k",)), positions="rotary")
    merged, record = merge_kv_heads(weights, 2, bounded=True)
    assert torch.equal(merged.W_K, weights.W_K)
    assert torch.equal(merged.W_Q, weights.W_Q)
    assert record.choice.startswith("W_OV")
    keyed = equal_maps(make("factored"), sides=("v",))
    with pytest.raises(RewriteRefusedError, match="qk: the maps of keys differ, and under rotary positions"):
        merge_kv_heads(with_traits(keyed, positions="rotary"), 2, bounded=True)
    with pytest.raises(
        RewriteRefusedError, match="qk: the maps of keys differ, and queries and keys are normal"
    ):
        merge_kv_heads(with_traits(keyed, qk_norm=True), 2, bounded=True)
    with pytest.raises(RewriteRefusedError, match="ov: the maps of values differ, and a gate"):
        merge_kv_heads(with_traits(weights, positions="none", value_gate=True), 2, bounded=True)


def test_equal_maps_with_other_biases_are_not_the_same() -> None:
    weights = equal_maps(make("factored"))
    (k,) = weights.k
    weights = replace(weights, k=(replace(k, bias=torch.randn_like(k.weight[:, 0])),))
    merged, record = merge_kv_heads(weights, 2)
    assert record.tier == "rounding-exact"
    assert_same_function(weights, merged)
    reason = "qk: the key biases of a group cannot be one, and something takes part in the softmax"
    with pytest.raises(RewriteRefusedError, match=reason):
        merge_kv_heads(with_traits(weights, sinks=True), 2)


def test_value_biases_that_differ_go_into_the_output() -> None:
    weights = equal_maps(make("factored"))
    (v,) = weights.v
    weights = replace(weights, v=(replace(v, bias=torch.randn_like(v.weight[:, 0])),))
    merged, record = merge_kv_heads(weights, 2)
    assert record.tier == "rounding-exact"
    assert merged.head_bias("v") is None
    assert any("value biases of a group cannot be one" in note for note in record.notes)
    assert_same_function(weights, merged)
    dropped = with_traits(weights, dropout=0.1)
    reason = "ov: the value biases of a group cannot be one, and attention dropout of 0.1 is on"
    with pytest.raises(RewriteRefusedError, match=reason):
        merge_kv_heads(dropped, 2)
    near, record = merge_kv_heads(dropped, 2, bounded=True)
    assert near.head_bias("v") is not None
    before, after = (
        np.einsum("hc,hcd->hd", w.multiplied("v").of_heads(4).bias.numpy(), w.W_O.numpy())  # type: ignore[union-attr]
        for w in (dropped, near)
    )
    assert record.bound == pytest.approx(np.linalg.norm(before - after, axis=1).max(), rel=1e-9)


def test_numbers_that_do_not_divide_are_refused() -> None:
    weights = make("factored")
    with pytest.raises(RewriteRefusedError, match=r"3 key-value heads cannot serve 4 heads: .* divide 4"):
        merge_kv_heads(weights, 3)
    with pytest.raises(RewriteRefusedError, match="0 key-value heads cannot serve 4 heads"):
        merge_kv_heads(weights, 0)
    with pytest.raises(
        RewriteRefusedError, match=r"there are 2 key-value heads, fewer than 4; repeat_kv_heads"
    ):
        merge_kv_heads(make("grouped"), 4)
    with pytest.raises(RewriteRefusedError, match=r"no map makes keys: .*; factor it first"):
        merge_kv_heads(make("bilinear"), 2)
    same, record = merge_kv_heads(weights, 4)
    assert same is weights
    assert record.notes == ("there are 4 key-value heads",)


def test_six_heads_in_three_groups_cannot_become_two() -> None:
    q, k, v = (torch.randn(n, D_MODEL, 4, dtype=torch.float64) for n in (6, 3, 3))
    o = torch.randn(6, 4, D_MODEL, dtype=torch.float64)
    weights = AttentionWeights(D_MODEL, 6, 0.5, (Link(q),), (Link(k),), (Link(v),), (Link(o),))
    with pytest.raises(
        RewriteRefusedError, match="the present 3 cannot be shared out among 2 key-value heads"
    ):
        merge_kv_heads(weights, 2)


def test_something_between_the_maps_of_a_chain_is_refused() -> None:
    weights = make("stacked")
    parted = replace(weights, k=(replace(weights.k[0], after="a norm"), weights.k[1]))
    with pytest.raises(RewriteRefusedError, match=r"^merge_kv_heads refused: a norm stands after map 1 of k"):
        merge_kv_heads(parted, 2, bounded=True)
