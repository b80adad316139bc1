"""Forms of lower rank, the nearest there are, and keys and values from one latent."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import (
    D_MODEL,
    KINDS,
    LENGTH,
    MEMORY_LENGTH,
    NAMES,
    NUM_HEADS,
    Array,
    Form,
    Untouched,
    assert_layers_agree,
    assert_same_function,
    dense,
    make,
    output_of,
    outputs,
    random_input,
    with_semantics,
)
from triptych.core.algebra.cost import writing_cost
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadNorm
from triptych.core.algebra.weights import AttentionWeights, Link, Side
from triptych.core.attention import MultiHeadAttention
from triptych.rewriting.functions.latent import to_latent
from triptych.rewriting.functions.rank import truncate


def assert_the_layer_computes(weights: AttentionWeights) -> None:
    """A real layer holds the weights and computes what they say."""
    x = random_input(LENGTH)
    memory = random_input(MEMORY_LENGTH) if weights.semantics.kind == "cross" else None
    expected = output_of(weights, x, memory)
    layer = MultiHeadAttention.from_weights(weights)
    actual = outputs(layer, weights.semantics.kind, x, x if memory is None else memory).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def row(weights: AttentionWeights, form: Form) -> Array:
    """The bias as one more row of each form."""
    bias = weights.head_bias("q" if form == "qk" else "v")
    reader = weights.W_K.mT if form == "qk" else weights.W_O
    if bias is None:
        return np.zeros((weights.num_heads, 1, reader.shape[-1]))
    return np.einsum("hc,hcd->hd", bias.numpy(), reader.numpy())[:, None]


def stacks(forms: Array, form: Form, groups: int) -> Iterator[Array]:
    """The forms of each group one below the other, what its heads have in common on the right."""
    turned = forms.swapaxes(1, 2) if form == "ov" else forms
    for group in np.split(turned, groups):
        yield np.concatenate(list(group))


def groups_of(weights: AttentionWeights, form: Form) -> int:
    if form == "qk":
        return weights.num_key_heads if weights.k else weights.num_heads
    return weights.num_value_heads


def nearest(weights: AttentionWeights, form: Form, rank: int) -> Array:
    """By NumPy's SVD of what is stacked, written out."""
    found = []
    for stack in stacks(dense(weights, form), form, groups := groups_of(weights, form)):
        U, S, Vh = np.linalg.svd(stack, full_matrices=False)
        near = (U[:, :rank] * S[:rank]) @ Vh[:rank]
        found.extend(np.split(near, weights.num_heads // groups))
    forms = np.stack(found)
    return forms.swapaxes(1, 2) if form == "ov" else forms


def low_rank(weights: AttentionWeights, side: Side, rank: int) -> AttentionWeights:
    """The last map of a side loses its other channels, without showing it."""
    *first, last = weights.chain(side)
    mixed = torch.randn(last.copies, rank, last.d_out, dtype=torch.float64)
    bias = None if last.bias is None else (last.bias[:, None, :rank] @ mixed)[:, 0]
    chain = (*first, replace(last, weight=last.weight[..., :rank] @ mixed, bias=bias))
    return replace(weights, **{str(side): chain})


# Truncation.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_the_nearest_forms_of_a_rank(name: str, rank: int, biased: bool) -> None:
    weights = make(name, biased=biased)
    with Untouched(weights):
        result, record = truncate(weights, qk_rank=rank, ov_rank=rank)
    assert record.tier == "bounded"
    assert result.W_Q.shape == result.W_K.shape == (NUM_HEADS, D_MODEL, rank)
    assert result.W_V.shape == (NUM_HEADS, D_MODEL, rank)
    moves: list[float] = []
    for form in ("qk", "ov"):
        old, new = dense(weights, form), dense(result, form)
        np.testing.assert_allclose(new, nearest(weights, form, rank), atol=1e-9 * np.abs(old).max())
        groups = groups_of(weights, form)
        for before, after in zip(stacks(old, form, groups), stacks(new, form, groups), strict=True):
            S = np.linalg.svd(before, compute_uv=False)
            error = np.linalg.norm(before - after)
            assert error == pytest.approx(np.sqrt((S[rank:] ** 2).sum()), rel=1e-10)
        folded = form == "ov" and any("value bias" in note for note in record.notes)
        rows = 0.0 if folded else row(weights, form) - row(result, form)
        change = np.concatenate((old - new, np.broadcast_to(rows, (NUM_HEADS, 1, D_MODEL))), axis=1)
        moves.extend(np.linalg.norm(change, axis=(1, 2)))
    assert record.bound == pytest.approx(max(moves), rel=1e-10)
    assert_the_layer_computes(result)
    assert record.after == writing_cost(result)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_error_of_a_group_is_the_tail_of_its_stack(groups: int) -> None:
    weights = make("grouped", biased=False, num_kv_heads=groups)
    result, record = truncate(weights, qk_rank=3)
    assert result.k[0].copies == groups
    assert record.after.cached_numbers == groups * (3 + 6)
    tails = [
        np.sqrt((np.linalg.svd(stack, compute_uv=False)[3:] ** 2).sum())
        for stack in stacks(dense(weights, "qk"), "qk", groups)
    ]
    moves = np.linalg.norm(dense(weights, "qk") - dense(result, "qk"), axis=(1, 2))
    np.testing.assert_allclose(np.sqrt((moves.reshape(groups, -1) ** 2).sum(axis=1)), tails, rtol=1e-10)
    assert record.bound == pytest.approx(moves.max(), rel=1e-12)
    assert record.choice == f"W_QK: rank 3 of 6, ‖Δ‖ at most {moves.max():.6g}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_is_enough_is_exact(name: str, biased: bool, kind: str) -> None:
    weights = make(name, kind, biased=biased)
    ranks: dict[str, Any] = {"ov_rank": 6, "qk_rank": 24 if name in ("bilinear", "collaborative") else 6}
    with Untouched(weights):
        result, record = truncate(weights, **ranks)
    assert record.tier == "rounding-exact"
    assert record.bound == 0.0
    assert_same_function(weights, result)
    assert_layers_agree(weights, result)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["factored", "grouped", "stacked", "latent", "four_matrix"])
def test_forms_that_have_the_rank_lose_nothing(name: str, biased: bool) -> None:
    weights = low_rank(low_rank(make(name, biased=biased), "k", 4), "v", 3)
    result, record = truncate(weights, qk_rank=4, ov_rank=3)
    assert record.tier == "rounding-exact"
    assert_same_function(weights, result)
    assert_layers_agree(weights, result)
    assert record.after.parameters < record.before.parameters


def test_one_matrix_becomes_a_product() -> None:
    weights = make("bilinear")
    result, record = truncate(weights, qk_rank=3)
    assert MultiHeadAttention.from_weights(result).parameterisation.name == "factored"
    assert record.notes == ("keys got a map",)
    assert record.after.parameters < record.before.parameters
    ov_only = truncate(weights, ov_rank=3).weights
    assert MultiHeadAttention.from_weights(ov_only).parameterisation.name == "bilinear"


def test_the_structure_stays_where_a_layer_can_have_it() -> None:
    def kind(name: str, **ranks: Any) -> str:
        return MultiHeadAttention.from_weights(truncate(make(name), **ranks).weights).parameterisation.name

    for name in ("factored", "grouped", "stacked", "latent"):
        assert kind(name, qk_rank=3, ov_rank=2) == kind(name, qk_rank=3) == kind(name, ov_rank=2) == name
    assert kind("symmetric", qk_rank=3) == kind("shared", qk_rank=3) == "factored"
    assert (
        kind("symmetric", ov_rank=3) == kind("shared", ov_rank=3) == kind("direct", ov_rank=3) == "symmetric"
    )
    assert kind("four_matrix", qk_rank=3) == kind("four_matrix", ov_rank=3) == "factored"
    assert kind("collaborative", ov_rank=3) == "collaborative"
    latent = truncate(make("latent"), qk_rank=3).weights
    assert latent.k[0] is latent.v[0]


def test_what_was_done_besides_is_said() -> None:
    assert truncate(make("shared", biased=False), qk_rank=3).record.notes == (
        "queries and keys had one map and have two now",
        "keys and values had one map and have two now",
    )
    assert (
        truncate(make("direct"), qk_rank=3).record.notes[0]
        == "the fixed slices of the input became learned maps"
    )
    assert truncate(make("four_matrix"), qk_rank=3).record.notes == (
        "the maps of the output were multiplied into one",
    )
    assert truncate(make("collaborative"), qk_rank=3).record.notes == (
        "the maps of queries were multiplied into one",
    )


def test_a_query_bias_outside_the_channels_makes_it_bounded() -> None:
    weights = make("factored")
    (q,) = weights.q
    weight = q.weight.clone()
    weight[..., 4:] = 0.0
    weights = replace(weights, q=(replace(q, weight=weight),))
    result, record = truncate(weights, qk_rank=4)
    assert record.tier == "bounded"
    lost = np.linalg.norm(row(weights, "qk") - row(result, "qk"), axis=(1, 2))
    assert record.bound == pytest.approx(lost.max(), rel=1e-9)
    np.testing.assert_allclose(dense(result, "qk"), dense(weights, "qk"), atol=1e-12)


def test_what_the_channels_cannot_carry_of_a_value_bias_goes_into_the_output() -> None:
    weights = make("grouped")
    (v,) = weights.v
    weight = v.weight.clone()
    weight[..., 4:] = 0.0
    weights = replace(weights, v=(replace(v, weight=weight),))
    result, record = truncate(weights, ov_rank=4)
    assert record.tier == "rounding-exact"
    assert record.notes == ("the value bias does not fit the channels left: it went into that of the output",)
    assert_same_function(weights, result)
    kept, record = truncate(with_semantics(weights, dropout=0.1), ov_rank=4)
    assert record.tier == "bounded"
    assert record.notes[0].startswith(
        "the value bias lost what does not fit the channels left: attention dropout"
    )
    assert torch.equal(kept.o_bias, weights.o_bias)  # type: ignore[arg-type]
    lost = np.linalg.norm(row(weights, "ov") - row(kept, "ov"), axis=(1, 2))
    assert record.bound == pytest.approx(lost.max(), rel=1e-9)


def test_no_square_of_the_models_width_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make("grouped")
    sizes: list[tuple[int, ...]] = []
    for name in ("svd", "svdvals", "qr"):
        original = getattr(torch.linalg, name)

        def spy(matrix: Tensor, *args: Any, _original: Any = original, **options: Any) -> Any:
            sizes.append(tuple(matrix.shape[-2:]))
            return _original(matrix, *args, **options)

        monkeypatch.setattr(torch.linalg, name, spy)
    truncate(weights, qk_rank=2, ov_rank=2)
    assert sizes
    assert all(columns <= 12 for _, columns in sizes)


@pytest.mark.parametrize(("form", "width"), [("qk", 6), ("ov", 7)])
@pytest.mark.parametrize("rank", [-1, 0, 8])
def test_a_rank_out_of_range_is_refused_with_both_numbers(form: str, width: int, rank: int) -> None:
    weights = make("factored", d_k=6, d_v=7)
    ranks: dict[str, Any] = {f"{form}_rank": rank}
    reason = f"^truncate refused: {form}_rank is {rank}: a form of width {width} takes 1 to {width}"
    with pytest.raises(RewriteRefusedError, match=reason):
        truncate(weights, **ranks)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        (
            {"positions": "rotary"},
            "qk: under rotary positions only one non-zero complex scalar .*; leave qk out",
        ),
        ({"sinks": True}, "qk: fewer channels cannot carry the key bias, and something takes part"),
    ],
)
def test_channels_that_cannot_go_stay(traits: dict[str, Any], reason: str) -> None:
    with pytest.raises(RewriteRefusedError, match=f"^truncate refused: {reason}"):
        truncate(with_semantics(make("factored"), **traits), qk_rank=3, ov_rank=3)


def test_the_other_form_can_be_truncated() -> None:
    turned = with_semantics(make("factored"), positions="rotary", qk_norm=True, sinks=True)
    assert torch.equal(truncate(turned, ov_rank=3).weights.W_Q, turned.W_Q)
    assert truncate(with_semantics(make("factored", biased=False), sinks=True), qk_rank=3).record.bound > 0
    with pytest.raises(RewriteRefusedError, match="neither qk_rank nor ov_rank is given"):
        truncate(turned)
    weights = make("stacked")
    behind = Link(torch.eye(weights.v[1].d_out, dtype=weights.dtype)[None], learned=False)
    parted = replace(weights, v=(*weights.v[:1], replace(weights.v[1], norm=HeadNorm(1e-6)), behind))
    with pytest.raises(RewriteRefusedError, match="there is a norm after map 2 of v"):
        truncate(parted, ov_rank=3)
    assert truncate(parted, qk_rank=3).weights.v is not None


@pytest.mark.parametrize("form", ["qk", "ov"])
def test_every_group_may_have_a_rank_of_its_own(form: Form) -> None:
    weights, ranks = make("grouped", biased=False), [1, 4]
    result, record = truncate(weights, **{f"{form}_rank": ranks})  # type: ignore[arg-type]
    assert dense(result, form).shape == (NUM_HEADS, D_MODEL, D_MODEL)
    assert (result.W_Q if form == "qk" else result.W_V).shape[-1] == 4
    for group, rank in enumerate(ranks):
        alone = nearest(weights, form, rank)[2 * group : 2 * group + 2]
        np.testing.assert_allclose(dense(result, form)[2 * group : 2 * group + 2], alone, atol=1e-10)
    assert record.choice.startswith(f"W_{form.upper()}: ranks 1, 4 of 6, ")
    exact = truncate(weights, **{f"{form}_rank": [6, 6]}).record  # type: ignore[arg-type]
    assert exact.tier == "rounding-exact"
    with pytest.raises(RewriteRefusedError, match=f"{form}_rank names 3 numbers: there are 2 "):
        truncate(weights, **{f"{form}_rank": [1, 2, 3]})  # type: ignore[arg-type]


# To a latent.


def full_rank(weights: AttentionWeights) -> int:
    keys = weights.num_key_heads * weights.W_K.shape[-1]
    return keys if weights.tied("k", "v") else keys + weights.num_value_heads * weights.W_V.shape[-1]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("bilinear", "latent")])
def test_all_keys_and_values_come_from_one_latent(name: str) -> None:
    weights = make(name)
    result, record = to_latent(weights)
    r = min(D_MODEL, full_rank(weights))
    assert record.tier == "rounding-exact"
    assert record.bound == 0.0
    assert record.after.cached_numbers == r
    assert result.k[0] is result.v[0]
    assert MultiHeadAttention.from_weights(result).parameterisation.name == "latent"


@pytest.mark.parametrize("groups", [1, 2])
def test_at_full_rank_the_maps_stand_side_by_side(groups: int) -> None:
    weights = make("grouped", num_kv_heads=groups, d_k=3, d_v=4)
    result, record = to_latent(weights)
    beside = torch.cat([*weights.k[0].weight, *weights.v[0].weight], dim=1)
    assert torch.equal(result.k[0].weight[0], beside)
    assert torch.equal(result.W_K, weights.W_K)
    assert torch.equal(result.W_V, weights.W_V)
    assert set(result.k[1].weight.unique().tolist()) == {0.0, 1.0}
    assert record.choice == f"a latent of {groups * 7}: all keys and values side by side"
    assert record.after.cached_numbers == record.before.cached_numbers == groups * 7


def test_one_map_for_keys_and_values_is_there_once() -> None:
    for name in ("key_value", "shared"):
        weights = make(name, d_k=4)
        result, record = to_latent(weights)
        assert result.k[0].d_out == 16
        assert record.after.cached_numbers == record.before.cached_numbers
        assert record.notes[0] == "keys and values had one map: the latent has it once"
        assert record.notes[1:] == ("queries got a map of their own",) * (name == "shared")
        assert_same_function(weights, result)


def test_a_full_rank_wider_than_the_model_may_be_asked_for() -> None:
    weights = make("factored")
    wide, record = to_latent(weights, rank=48)
    assert wide.k[0].d_out == 48
    assert record.tier == "rounding-exact"
    assert_same_function(weights, wide)
    narrow = to_latent(weights, rank=24)
    assert narrow.record.choice == "a latent of 24; keys and values side by side are 24 × 48, of rank 24"
    assert_same_function(weights, narrow.weights)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["factored", "grouped", "stacked", "four_matrix", "key_value", "latent"])
def test_a_smaller_latent_moves_the_forms_by_its_bound(name: str, biased: bool) -> None:
    weights = make(name, biased=biased)
    with Untouched(weights):
        result, record = to_latent(weights, rank=9)
    assert record.tier == "bounded"
    assert record.after.cached_numbers == 9
    moves: list[float] = []
    for form in ("qk", "ov"):
        change = dense(weights, form) - dense(result, form)
        change = np.concatenate((change, row(weights, form) - row(result, form)), axis=1)
        moves.extend(np.linalg.norm(change, axis=(1, 2)))
    assert record.bound == pytest.approx(max(moves), rel=1e-10)
    both = [weights.W_K] if weights.tied("k", "v") else [weights.W_K, weights.W_V]
    if name != "grouped":
        old, new = (
            np.concatenate([*torch.cat(maps).numpy()], axis=1)
            for maps in (both, [result.W_K, result.W_V][: len(both)])
        )
        S = np.linalg.svd(old, compute_uv=False)
        assert np.linalg.norm(old - new) == pytest.approx(np.sqrt((S[9:] ** 2).sum()), rel=1e-10)
    assert_the_layer_computes(result)


def test_maps_of_lower_rank_have_a_smaller_exact_latent() -> None:
    weights = make("latent", d_latent=7)
    plain = replace(weights, k=(weights.multiplied("k"),), v=(weights.multiplied("v"),))
    result, record = to_latent(plain, rank=7)
    assert record.tier == "rounding-exact"
    assert record.choice == "a latent of 7; keys and values side by side are 24 × 48, of rank 7"
    assert_same_function(plain, result)
    assert to_latent(plain, rank=6).record.tier == "bounded"
    same, record = to_latent(weights)
    assert same is weights
    assert record.notes == ("keys and values have one latent, of 7",)


@pytest.mark.parametrize("rank", [-1, 0, 25, 47, 49])
def test_a_latent_out_of_range_is_refused_with_the_numbers(rank: int) -> None:
    reason = f"^to_latent refused: rank is {rank}: .* are 24 × 48, which takes 1 to 24, or 48 as they are"
    with pytest.raises(RewriteRefusedError, match=reason):
        to_latent(make("factored"), rank=rank)


def test_a_small_full_rank_is_the_limit() -> None:
    with pytest.raises(RewriteRefusedError, match=r"rank is 15: .* are 24 × 14, which takes 1 to 14$"):
        to_latent(make("grouped", d_k=3, d_v=4), rank=15)


def test_what_has_no_latent_is_refused() -> None:
    with pytest.raises(
        RewriteRefusedError, match=r"^to_latent refused: under rotary .* decoupled rotary makes it bounded"
    ):
        to_latent(with_semantics(make("factored"), positions="rotary"))
    with pytest.raises(
        RewriteRefusedError, match="no map makes keys: they are the input itself; factor it first"
    ):
        to_latent(make("bilinear"))
    weights = make("stacked")
    parted = replace(weights, v=(replace(weights.v[0], norm=HeadNorm(1e-6)), weights.v[1]))
    with pytest.raises(RewriteRefusedError, match="there is a norm after map 1 of v"):
        to_latent(parted)


def test_half_precision_is_computed_in_single() -> None:
    weights = make("grouped", biased=False).to(torch.bfloat16)
    result = truncate(weights, qk_rank=3).weights
    assert result.dtype == torch.bfloat16
    assert torch.equal(result.W_Q, truncate(weights.to(torch.float32), qk_rank=3).weights.W_Q.bfloat16())
    assert to_latent(weights).weights.dtype == torch.bfloat16
    assert isinstance(result.q[0], Link)
