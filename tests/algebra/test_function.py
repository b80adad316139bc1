"""What stands between the maps and the softmax: each part against its definition, position by position."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads import NUM_HEADS, make_layer, random_input, with_semantics
from triptych.core.algebra.function import channels, probabilities, run_layer
from triptych.core.algebra.positions import (
    ALiBi,
    DisentangledBias,
    PatchPositionBias,
    RelativePositionBias,
    RotaryEmbedding,
)
from triptych.core.algebra.semantics import AdditiveScores, HeadGate, HeadNorm, Semantics, Temperature
from triptych.core.attention.steps import for_heads

Array = NDArray[np.float64]
B, H, N, M, W = 2, 4, 5, 7, 6


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_close(found: Tensor, expected: Array) -> None:
    np.testing.assert_allclose(np.broadcast_to(found.numpy(), expected.shape), expected, rtol=1e-6, atol=1e-9)


def normalised(row: Array, eps: float, *, centred: bool) -> Array:
    row = row - row.mean() if centred else row
    return row / math.sqrt((row**2).mean() + eps)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("count", [None, 4, 6])
def test_a_norm_of_each_head(centred: bool, own: bool, count: int | None) -> None:
    x, width = drawn(B, H, N, W) + 0.5, count or W
    gain, shift = (drawn(H, width) if own else drawn(width) for _ in range(2))
    norm = HeadNorm(0.03, gain, shift, centred, channels=count)
    assert norm.per_head is own
    expected = x.numpy().copy()
    for b, h, n in np.ndindex(B, H, N):
        g, s = (part[h] if own else part for part in (gain.numpy(), shift.numpy()))
        expected[b, h, n, :width] = normalised(expected[b, h, n, :width], 0.03, centred=centred) * g + s
    assert_close(norm(x), expected)
    plain = HeadNorm(0.03, centred=centred)
    assert not plain.per_head
    assert_close(plain(x)[0, 1, 2], normalised(x[0, 1, 2].numpy(), 0.03, centred=centred))


@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_over_all_heads_side_by_side(centred: bool) -> None:
    x, gain, shift = drawn(B, H, N, W) + 0.5, drawn(H * W), drawn(H * W)
    norm = HeadNorm(0.03, gain, shift, centred, over="all heads")
    assert norm.per_head
    expected = np.empty((B, H, N, W))
    for b, n in np.ndindex(B, N):
        row = normalised(x[b, :, n].reshape(-1).numpy(), 0.03, centred=centred)
        expected[b, :, n] = (row * gain.numpy() + shift.numpy()).reshape(H, W)
    assert_close(norm(x), expected)


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("in_picture", [False, True])
def test_rotary_pairs_are_turned_by_their_angle(pairing: Any, start: int, in_picture: bool) -> None:
    frequencies = torch.tensor([1.0, 0.3], dtype=torch.float64)
    places = torch.tensor([[0, 0], [1, 3], [2, 5], [4, 1], [7, 2]]).double() if in_picture else None
    x = drawn(B, H, N, W)
    rotation = RotaryEmbedding(frequencies, pairing, start, 1.2, places)
    expected = x.numpy().copy()
    for n, f in np.ndindex(N, 2):
        first, second = (
            (start + f, start + f + 2) if pairing == "halves" else (start + 2 * f, start + 2 * f + 1)
        )
        assert (rotation.pairs[0][f], rotation.pairs[1][f]) == (first, second)
        place = n if places is None else float(places[n, f])
        turn = np.exp(1j * place * float(frequencies[f])) * 1.2
        z = (x[:, :, n, first].numpy() + 1j * x[:, :, n, second].numpy()) * turn
        expected[:, :, n, first], expected[:, :, n, second] = z.real, z.imag
    assert_close(rotation(x), expected)
    assert rotation.reach(9).tolist() == ([7.0, 5.0] if in_picture else [9.0, 9.0])
    if in_picture:
        with pytest.raises(ValueError, match="there are 6 positions, and a picture has 5"):
            rotation(x, 1)


def test_the_temperature_grows_in_steps() -> None:
    q, positions = drawn(B, H, N, W), torch.tensor([0, 2, 3, 11, 12])
    found = Temperature(0.1, 4.0, first=1)(q, positions)
    for n, steps in enumerate((0, 0, 1, 3, 3)):
        assert_close(found[:, :, n], q[:, :, n].numpy() * (1 + 0.1 * math.log(1 + steps)))


def positions_of(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(queries) + 2, torch.arange(keys)


def test_slopes_take_off_what_lies_between() -> None:
    slopes, (i, j) = drawn(H).abs(), positions_of(N, M)
    found = ALiBi(slopes)(drawn(B, H, N, W), drawn(B, H, M, W), i, j)
    expected = np.array([[[-float(s) * abs(int(a) - int(b)) for b in j] for a in i] for s in slopes])
    assert_close(found, expected)


# As the original's code has it: buckets of distances key − query, 8 in all, up to 20.
BOTH_WAYS = {0: 0, -1: 1, -2: 2, -4: 2, -6: 2, -7: 3, -19: 3, -50: 3, 1: 5, 2: 6, 6: 6, 7: 7, 30: 7}
BACKWARDS = {3: 0, 0: 0, -1: 1, -2: 2, -3: 3, -4: 4, -5: 4, -6: 5, -8: 5, -9: 6, -13: 6, -14: 7, -40: 7}


@pytest.mark.parametrize(("both_ways", "buckets"), [(True, BOTH_WAYS), (False, BACKWARDS)])
def test_a_table_has_a_number_for_each_bucket_of_distances(both_ways: bool, buckets: dict[int, int]) -> None:
    table = drawn(8, H)
    i, j = torch.tensor([60]), torch.tensor([60 + distance for distance in buckets])
    found = RelativePositionBias(table, both_ways, 20)(drawn(B, H, 1, W), drawn(B, H, len(j), W), i, j)
    assert found.shape == (H, 1, len(j))
    assert_close(found[:, 0], np.stack([table[bucket].numpy() for bucket in buckets.values()], axis=1))


def test_patches_have_a_number_for_each_distance_in_rows_and_columns() -> None:
    rows, columns = 2, 3
    count = (2 * rows - 1) * (2 * columns - 1)
    table, positions = drawn(count + 3, H), torch.arange(1 + rows * columns)
    q = drawn(B, H, len(positions), W)
    found = PatchPositionBias(table, rows, columns)(q, q, positions, positions)
    for i, j in np.ndindex(7, 7):
        (a, b), (c, d) = divmod(i - 1, columns), divmod(j - 1, columns)
        place = (a - c + rows - 1) * (2 * columns - 1) + (b - d + columns - 1)
        if i == 0 or j == 0:
            place = count + (2 if i == j else 0 if i == 0 else 1)
        assert_close(found[:, i, j], table[place].numpy())
    with pytest.raises(ValueError, match="there are 8 positions, and a picture has 7"):
        PatchPositionBias(table, rows, columns)(q, q, positions + 1, positions)


@pytest.mark.parametrize("parts", ["keys", "queries", "both"])
def test_distances_meet_content_both_ways(parts: str) -> None:
    span = 3
    q, k, (i, j) = drawn(B, H, N, W), drawn(B, H, M, W), positions_of(N, M)
    keys, queries = (drawn(H, 2 * span, W) if parts in (one, "both") else None for one in ("keys", "queries"))
    found = DisentangledBias(keys, queries, span, None, 0.4)(q, k, i, j)
    expected = np.zeros((B, H, N, M))
    for b, h, n, m in np.ndindex(B, H, N, M):
        place = min(max(int(i[n]) - int(j[m]) + span, 0), 2 * span - 1)
        if keys is not None:
            expected[b, h, n, m] += 0.4 * float(q[b, h, n] @ keys[h, place])
        if queries is not None:
            expected[b, h, n, m] += 0.4 * float(k[b, h, m] @ queries[h, place])
    assert_close(found, expected)


def test_far_distances_share_buckets_in_equal_ratios() -> None:
    # span 8: distances up to 4 have their own; 5 … 31 fall into 5 … 7, those past the longest into the last.
    bucket = {-40: -8, -31: -7, -12: -6, -5: -5, -4: -4, 0: 0, 4: 4, 5: 5, 7: 5, 8: 6, 15: 6, 16: 7, 31: 7}
    tables, k = drawn(1, 16, W), drawn(1, 1, 1, W)
    for distance, place in bucket.items():
        q = drawn(1, 1, 1, W)
        at = torch.tensor([50 + distance]), torch.tensor([50])
        found = DisentangledBias(tables, None, 8, 32, 1.0)(q, k, *at)
        assert float(found) == pytest.approx(float(q[0, 0, 0] @ tables[0, place + 8])), distance


PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, NUM_HEADS)},
    "window": {"window": 2},
    "chunk": {"chunk": 3},
    "clip": {"clip": 0.7},
    "norms": {"q_norm": HeadNorm(1e-6), "k_norm": HeadNorm(1e-6, centred=True)},
    "norm of values": {"v_norm": HeadNorm(1e-6)},
    "additive scores": {"scores": AdditiveScores(torch.linspace(-1, 1, NUM_HEADS * W).view(NUM_HEADS, W))},
    "rotary": {"rotary": RotaryEmbedding(torch.tensor([0.7, 0.1]))},
    "temperature": {"temperature": Temperature(0.5, 2.0)},
    "bias": {"bias": ALiBi(torch.linspace(0.1, 1, NUM_HEADS)), "soft_cap": 2.0},
    "gate": {
        "gate": HeadGate(torch.linspace(-1, 1, NUM_HEADS * 24).view(NUM_HEADS, 24).sin(), torch.arange(4.0))
    },
}


def softmax(row: Array) -> Array:
    found = np.exp(row - row.max())
    return np.asarray(found / found.sum())


@pytest.mark.parametrize("kind", ["self", "causal"])
@pytest.mark.parametrize("name", PARTS)
def test_a_layer_is_what_its_parts_make_of_it(name: str, kind: str) -> None:
    plain, x = make_layer("grouped", biased=True).weights(kind), random_input(N)  # type: ignore[arg-type]
    weights = with_semantics(plain, **PARTS[name])
    semantics = weights.semantics
    x.clamp_(-2, 2)
    mask = torch.ones(N, N, dtype=torch.bool)
    mask[2:, 0] = False
    q, k, v = (for_heads(t, NUM_HEADS) for t in channels(plain, x))
    if semantics.q_norm is not None and semantics.k_norm is not None:
        q, k = semantics.q_norm(q), semantics.k_norm(k)
    if semantics.v_norm is not None:
        v = torch.from_numpy(np.apply_along_axis(normalised, 3, v.numpy(), 1e-6, centred=False))
    if semantics.clip is not None:
        q, k, v = (t.where(t.abs() < 0.7, 0.7 * t.sign()) for t in (q, k, v))
    places = torch.arange(N)
    if semantics.rotary is not None:
        q, k = semantics.rotary(q), semantics.rotary(k)
    if semantics.temperature is not None:
        q = semantics.temperature(q, places)
    expected = np.zeros((B, NUM_HEADS, N, N))
    for b, h, i in np.ndindex(B, NUM_HEADS, N):
        row = weights.scale * (k[b, h] @ q[b, h, i]).numpy()
        if isinstance(semantics.scores, AdditiveScores):
            row = np.tanh(q[b, h, i].numpy() + k[b, h].numpy()) @ semantics.scores.weight[h].numpy()
        if semantics.bias is not None:
            row = row - np.array([float(torch.linspace(0.1, 1, NUM_HEADS)[h]) * abs(i - j) for j in range(N)])
        if semantics.soft_cap is not None:
            row = semantics.soft_cap * np.tanh(row / semantics.soft_cap)
        for j in range(N):
            hidden = kind == "causal" and j > i
            hidden |= semantics.window is not None and abs(i - j) >= semantics.window
            hidden |= semantics.chunk is not None and i // semantics.chunk != j // semantics.chunk
            if hidden or not mask[i, j]:
                row[j] = -np.inf
        if semantics.sinks is not None:
            row = np.append(row, float(semantics.sinks[h]))
        expected[b, h, i] = softmax(row)[:N]
    one, other, _ = channels(weights, x)
    assert_close(probabilities(weights, one, other, mask), expected)
    assert weights.o_bias is not None
    mixed = np.einsum("bhij,bhjc->bhic", expected, v.numpy())
    if semantics.gate is not None:
        W, bias = (part.double().numpy() for part in semantics.gate.tensors().values())
        for b, h, i in np.ndindex(B, NUM_HEADS, N):
            mixed[b, h, i] /= 1 + math.exp(-float(x[b, i].numpy() @ W[h] + bias[h]))
    out = np.einsum("bhic,hcd->bid", mixed, weights.W_O.numpy()) + weights.o_bias.numpy()
    assert_close(run_layer(weights, x, mask=mask), out)


def test_heads_that_are_left_keep_their_sinks_and_distances() -> None:
    tables = drawn(H, 6, W), drawn(H, 6, W)
    gate = HeadGate(drawn(H, 5))
    semantics = Semantics(
        1.0, sinks=drawn(H), bias=DisentangledBias(*tables, 3, None, 1.0), window=4, gate=gate
    )
    found = semantics.select_heads([2, 0])
    assert found.sinks is not None
    assert semantics.sinks is not None
    assert found.sinks.tolist() == semantics.sinks[[2, 0]].tolist()
    assert isinstance(found.bias, DisentangledBias)
    for part, table in zip((found.bias.keys, found.bias.queries), tables, strict=True):
        assert part is not None
        assert torch.equal(part, table[[2, 0]])
    assert found.window == 4
    assert found.gate is not None
    assert torch.equal(found.gate.weight, gate.weight[[2, 0]])
    assert found.gate.bias is None
    bare = Semantics(1.0, bias=ALiBi(torch.arange(float(H)))).select_heads([1])
    assert bare.sinks is None
    assert isinstance(bare.bias, ALiBi)
    assert bare.bias.slopes.tolist() == [1]


def test_pictures_have_so_many_positions_and_texts_no_end() -> None:
    assert Semantics(1.0, rotary=RotaryEmbedding(torch.ones(2))).num_positions is None
    assert Semantics(1.0, rotary=RotaryEmbedding(torch.ones(2), places=torch.zeros(9, 2))).num_positions == 9
    assert Semantics(1.0, bias=PatchPositionBias(drawn(18, H), 2, 3)).num_positions == 7
    assert Semantics(1.0).num_positions is None
