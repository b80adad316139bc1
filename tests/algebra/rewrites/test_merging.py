"""Key-value heads merged: nothing moves if they are equal up to gauge, else the least there is."""

from dataclasses import replace
from typing import Any, Literal

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
    Untouched,
    assert_layers_agree,
    assert_same_function,
    dense,
    make,
    output_of,
    random_input,
    turned_by,
    with_semantics,
)
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadNorm, Semantics
from triptych.core.algebra.weights import AttentionWeights, Link, Side
from triptych.core.attention import MultiHeadAttention
from triptych.rewriting.functions.head_order import repeat_kv_heads
from triptych.rewriting.functions.merging import merge_kv_heads


def served(copies: int) -> int:
    return NUM_HEADS // copies


def in_random_gauge(weights: AttentionWeights, *, rotary: bool = False) -> AttentionWeights:
    """Every head in a gauge of its own, the same function. Keys and values have a copy a head."""
    heads, d_k, d_v = weights.num_heads, weights.W_Q.shape[-1], weights.W_V.shape[-1]
    G, M = (torch.randn(heads, d, d, dtype=torch.float64) for d in (d_k, d_v))
    q, k, v = (
        weights.multiplied(side).repeat(heads).then(Link(change))
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


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("bilinear", "differential")])
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
    weights = with_semantics(
        equal_maps(make("factored", biased=biased)), positions="rotary", qk_norm=True, sinks=True
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
    weights = with_semantics(equal_maps(make("factored"), sides=("k",)), positions="rotary")
    merged, record = merge_kv_heads(weights, 2, bounded=True)
    assert torch.equal(merged.W_K, weights.W_K)
    assert torch.equal(merged.W_Q, weights.W_Q)
    assert record.choice.startswith("W_OV")
    keyed = with_semantics(equal_maps(make("factored"), sides=("v",)), positions="rotary")
    merged, record = merge_kv_heads(keyed, 2, bounded=True)
    assert torch.equal(merged.W_V, keyed.W_V)
    assert record.choice.startswith("W_QK")
    with pytest.raises(RewriteRefusedError, match=r"ov: the maps of values differ, and .* are clipped"):
        merge_kv_heads(with_semantics(weights, positions="none", clip=2.0), 2, bounded=True)


def test_equal_maps_with_other_biases_are_not_the_same() -> None:
    weights = equal_maps(make("factored"))
    (k,) = weights.k
    weights = replace(weights, k=(replace(k, bias=torch.randn_like(k.weight[:, 0])),))
    merged, record = merge_kv_heads(weights, 2)
    assert record.tier == "rounding-exact"
    assert_same_function(weights, merged)
    reason = "qk: the key biases of a group cannot be one, and something takes part in the softmax"
    with pytest.raises(RewriteRefusedError, match=reason):
        merge_kv_heads(with_semantics(weights, sinks=True), 2)


def test_value_biases_that_differ_go_into_the_output() -> None:
    weights = equal_maps(make("factored"))
    (v,) = weights.v
    weights = replace(weights, v=(replace(v, bias=torch.randn_like(v.weight[:, 0])),))
    merged, record = merge_kv_heads(weights, 2)
    assert record.tier == "rounding-exact"
    assert merged.head_bias("v") is None
    assert any("value biases of a group cannot be one" in note for note in record.notes)
    assert_same_function(weights, merged)
    dropped = with_semantics(weights, dropout=0.1)
    reason = "ov: the value biases of a group cannot be one, and attention dropout of 0.1 is on"
    with pytest.raises(RewriteRefusedError, match=reason):
        merge_kv_heads(dropped, 2)
    near, record = merge_kv_heads(dropped, 2, bounded=True)
    assert near.head_bias("v") is not None
    before, after = (
        np.einsum("hc,hcd->hd", w.multiplied("v").repeat(4).bias.numpy(), w.W_O.numpy())  # type: ignore[union-attr]
        for w in (dropped, near)
    )
    assert record.bound == pytest.approx(np.linalg.norm(before - after, axis=1).max(), rel=1e-9)


def test_numbers_that_do_not_divide_are_refused() -> None:
    weights = make("factored")
    for name, number, said in (
        ("factored", 3, "3 key-value heads cannot serve 4 heads: .* divide 4"),
        ("factored", 0, "0 key-value heads cannot serve 4 heads"),
        ("grouped", 4, "there are 2 key-value heads, fewer than 4; repeat_kv_heads"),
        ("bilinear", 2, "no map makes keys: .*; factor it first"),
    ):
        with pytest.raises(RewriteRefusedError, match=said):
            merge_kv_heads(make(name), number)
    same, record = merge_kv_heads(weights, 4)
    assert same is weights
    assert record.notes == ("there are 4 key-value heads",)


def test_six_heads_in_three_groups_cannot_become_two() -> None:
    q, k, v = (torch.randn(n, D_MODEL, 4, dtype=torch.float64) for n in (6, 3, 3))
    o = torch.randn(6, 4, D_MODEL, dtype=torch.float64)
    weights = AttentionWeights(D_MODEL, 6, (Link(q),), (Link(k),), (Link(v),), (Link(o),), Semantics(0.5))
    with pytest.raises(
        RewriteRefusedError, match="the present 3 cannot be shared out among 2 key-value heads"
    ):
        merge_kv_heads(weights, 2)


def test_something_between_the_maps_of_a_chain_is_refused() -> None:
    weights = make("stacked")
    parted = replace(weights, k=(replace(weights.k[0], norm=HeadNorm(1e-6)), weights.k[1]))
    with pytest.raises(RewriteRefusedError, match=r"heads refused: there is a norm after map 1 of k"):
        merge_kv_heads(parted, 2, bounded=True)


# Merging what positions turn.


def rotation_of(pairing: Literal["halves", "interleaved"], num_pairs: int, start: int = 0) -> RotaryEmbedding:
    return RotaryEmbedding(torch.logspace(0, -2, num_pairs, dtype=torch.float64), pairing, start)


def rotary_layer(groups: int, width: int, *, biased: bool, kind: str = "self") -> AttentionWeights:
    weights = make("grouped", kind, biased=biased, num_kv_heads=groups, d_k=width, d_v=5)
    return with_semantics(weights, positions="rotary")


def turned_apart(weights: AttentionWeights, rotation: RotaryEmbedding) -> AttentionWeights:
    """Every head with keys of its own, each pair in a random gauge of its own: the same function."""
    heads, width = weights.num_heads, weights.W_Q.shape[-1]
    of_q, of_k = (torch.zeros(heads, width, width, dtype=torch.float64) for _ in range(2))
    first, second = rotation.pairs
    stays = [channel for channel in range(width) if channel not in first + second]
    for head in range(heads):
        for a, b in zip(first, second, strict=True):
            x, y = torch.randn(2).tolist()
            of_k[head][torch.tensor([[a], [b]]), torch.tensor([a, b])] = torch.tensor(
                [[x, y], [-y, x]], dtype=torch.float64
            )
        if stays:
            free = torch.tensor(stays)
            of_k[head][free[:, None], free] = torch.randn(len(stays), len(stays), dtype=torch.float64)
        of_q[head] = torch.linalg.inv(of_k[head]).mT
    weights = repeat_kv_heads(weights).weights
    q, k = (weights.multiplied(side).then(Link(G)) for side, G in (("q", of_q), ("k", of_k)))
    return replace(weights, q=(q,), k=(k,))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("start", "width"), [(0, 6), (1, 9)])
@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
@pytest.mark.parametrize("to", [1, 2])
def test_heads_equal_up_to_the_gauge_of_pairs_are_merged(
    to: int, pairing: Any, start: int, width: int, biased: bool
) -> None:
    rotation = rotation_of(pairing, 3, start)
    weights = turned_apart(rotary_layer(to, width, biased=biased), rotation)
    x = random_input(7)
    expected = run_layer(with_semantics(weights, rotary=rotation), x)
    with Untouched(weights):
        merged, record = merge_kv_heads(with_semantics(weights, rotary=rotation), to)
    assert (record.tier, record.bound) == ("rounding-exact", 0.0)
    assert (merged.num_key_heads, merged.num_value_heads) == (to, to)
    found = run_layer(with_semantics(merged, rotary=rotation), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    assert record.after.cached_numbers == to * (width + 5)


def turned_forms(weights: AttentionWeights, rotation: RotaryEmbedding, distance: int) -> Tensor:
    """W_Q R(m) W_Kᵀ with the biases as rows, by turning queries at position m."""
    maps = []
    for side in ("q", "k"):
        link = weights.multiplied(side).repeat(weights.num_heads)  # type: ignore[arg-type]
        maps.append(
            link.weight if link.bias is None else torch.cat([link.weight, link.bias[:, None, :]], dim=1)
        )
    return turned_by(rotation, maps[0], distance) @ turned_by(rotation, maps[1], 0).mT


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("start", "width"), [(0, 4), (1, 7)])
def test_the_bound_is_the_move_over_distances(start: int, width: int, biased: bool) -> None:
    # Whole turns in 12 steps: the mean over them is that over all distances.
    rotation = RotaryEmbedding(2 * torch.pi * torch.tensor([1 / 12, 1 / 4], dtype=torch.float64), start=start)
    weights = rotary_layer(4, width, biased=biased)
    with pytest.raises(
        RewriteRefusedError, match=r"^merge_kv_heads refused: W_QK of group \d .*bounded=True"
    ):
        merge_kv_heads(with_semantics(weights, rotary=rotation), 2)
    merged, record = merge_kv_heads(with_semantics(weights, rotary=rotation), 2, bounded=True)
    squares = [
        (turned_forms(weights, rotation, m) - turned_forms(merged, rotation, m)).square().sum((-2, -1))
        for m in range(12)
    ]
    of_heads = torch.stack(squares).mean(0).sqrt()
    same_values = merge_kv_heads(
        with_semantics(
            weights, rotary=rotation, v=(replace(weights.v[0], weight=weights.v[0].weight[:1], bias=None),)
        ),
        2,
        bounded=True,
    )
    assert same_values.record.bound == pytest.approx(float(of_heads.max()), rel=1e-10)
    assert record.tier == "bounded"


@pytest.mark.parametrize("loudness", [(1.0, 1.0, 1.0, 1.0), (0.1, 3.0, 1.0, 0.3)])
def test_no_other_common_key_of_a_pair_moves_less(loudness: tuple[float, ...]) -> None:
    rotation = rotation_of("halves", 2)
    weights = rotary_layer(4, 4, biased=False)
    (q,) = weights.q  # heads whose queries are long count for more
    louder = q.weight * torch.tensor(loudness, dtype=torch.float64)[:, None, None]
    weights = replace(weights, q=(replace(q, weight=louder),))
    merged = merge_kv_heads(with_semantics(weights, rotary=rotation), 1, bounded=True).weights

    def pairs(one: AttentionWeights) -> tuple[Tensor, Tensor]:
        q, k = (torch.complex(maps[..., :2], maps[..., 2:]) for maps in (one.W_Q, one.W_K))
        return q, k

    def moved(q: Tensor, k: Tensor) -> float:
        was_q, was_k = pairs(weights)
        forms = torch.einsum("hdf,hef->hfde", was_q, was_k.conj()) - torch.einsum(
            "hdf,hef->hfde", q, k.conj()
        )
        return float(forms.abs().square().sum())

    was_q, was_k = pairs(weights)
    # Of a pair, Σ ‖u‖² v vᴴ has the energy as its trace; one line keeps its largest eigenvalue at most.
    seen = torch.einsum("hdf,hef,hgf->feg", was_q.abs().square() + 0j, was_k, was_k.conj())
    kept = torch.linalg.eigvalsh(seen)[:, -1]
    least = float((seen.diagonal(dim1=-2, dim2=-1).real.sum(-1) - kept).sum())
    assert moved(*pairs(merged)) == pytest.approx(least, rel=1e-10)


def test_rotary_heads_that_cannot_be_merged_are_refused() -> None:
    rotation = rotation_of("halves", 2)
    with pytest.raises(RewriteRefusedError, match="turns channels up to 6, of heads 4 wide"):
        merge_kv_heads(with_semantics(rotary_layer(2, 4, biased=False), rotary=rotation_of("halves", 3)), 1)
    with pytest.raises(RewriteRefusedError, match=r"^merge_kv_heads refused: 3 key"):
        merge_kv_heads(with_semantics(rotary_layer(2, 4, biased=False), rotary=rotation), 3)
