"""Positions: added to embeddings, turned into queries and keys, taken from scores."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tolerances import assert_same
from triptych.core.algebra.positions import GrowingBase, RotaryEmbedding, alibi_slopes
from triptych.core.algebra.semantics import Semantics
from triptych.core.attention import SinusoidalPositions, sinusoidal
from triptych.core.attention.position_modules import (
    AlibiPositions,
    AttentionPositions,
    LearnedPositions,
    NoPositions,
    PositionIds,
    RotaryPositions,
)

ROTARIES = [
    RotaryPositions(pairing="halves"),
    RotaryPositions(pairing="interleaved"),
    RotaryPositions(rotary_dim=6, pairing="halves"),
    RotaryPositions(rotary_dim=6, pairing="interleaved", base=500.0),
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("d_model", [2, 8, 7])
def test_the_table_is_the_papers_formula(d_model: int) -> None:
    expected = [
        [
            (math.cos if channel % 2 else math.sin)(position / 10_000 ** ((channel - channel % 2) / d_model))
            for channel in range(d_model)
        ]
        for position in range(11)
    ]
    assert_same(sinusoidal(11, d_model), torch.tensor(expected, dtype=torch.float64), kind="output")


@pytest.mark.parametrize("d_model", [1, 2, 8, 7])
def test_the_halves_are_the_same_columns_sines_first(d_model: int) -> None:
    halves, interleaved = sinusoidal(11, d_model, "halves"), sinusoidal(11, d_model, "interleaved")
    expected = torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], dim=1)
    assert_same(halves, expected, kind="exact")
    assert_same(sinusoidal(11, d_model), interleaved, kind="exact")


def test_keys_that_share_a_position_have_it() -> None:
    ids = torch.arange(3)
    assert PositionIds(ids, 3, sharing=2).positions_of_first_keys(6).tolist() == [0, 0, 1, 1, 2, 2]
    assert PositionIds(ids, 3).positions_of_first_keys(3).tolist() == [0, 1, 2]


def test_positions_are_added_in_the_layout_that_was_chosen() -> None:
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    added = SinusoidalPositions(7, "halves")(x, start=3)
    assert_same(added, x + sinusoidal(8, 7, "halves")[3:], kind="exact")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_positions_are_added_in_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 8, dtype=dtype)
    added = SinusoidalPositions(8)(x)
    assert_same(added, x + sinusoidal(5, 8).to(dtype), kind="exact")


def test_a_start_continues_where_the_earlier_tokens_ended() -> None:
    positions = SinusoidalPositions(8)
    x = torch.randn(2, 9, 8)
    whole = positions(x)
    parts = [positions(x[:, :4]), positions(x[:, 4:5], start=4), positions(x[:, 5:], start=5)]
    assert_same(torch.cat(parts, dim=1), whole, kind="exact")


def test_the_table_grows_with_the_text_and_keeps_what_it_gave() -> None:
    positions = SinusoidalPositions(4)
    short, long = torch.zeros(1, 3, 4), torch.zeros(1, 700, 4)
    before = positions(short)
    assert_same(positions(long)[0], sinusoidal(700, 4).float(), kind="exact")
    assert_same(positions(short), before, kind="exact")


def test_a_change_of_dtype_is_followed_both_ways() -> None:
    positions = SinusoidalPositions(4)
    positions(torch.zeros(1, 3, 4, dtype=torch.bfloat16))
    precise = positions(torch.zeros(1, 3, 4, dtype=torch.float64))
    assert_same(precise[0], sinusoidal(3, 4), kind="exact")


def test_the_table_is_not_saved() -> None:
    positions = SinusoidalPositions(4)
    positions(torch.zeros(1, 3, 4))
    assert positions.state_dict() == {}


def test_learned_rows_are_added_from_the_start_given() -> None:
    positions = LearnedPositions(9, 8)
    x = torch.randn(2, 9, 8)
    whole = positions(x)
    assert_same(whole, x + positions.weight, kind="exact")
    parts = [positions(x[:, :4]), positions(x[:, 4:5], start=4), positions(x[:, 5:], start=5)]
    assert_same(torch.cat(parts, dim=1), whole, kind="exact")


def test_learned_rows_get_the_gradient_of_their_position() -> None:
    positions = LearnedPositions(9, 8)
    positions(torch.randn(2, 3, 8), start=4).sum().backward()
    assert positions.weight.grad is not None
    assert positions.weight.grad.sum(dim=1).tolist() == [0] * 4 + [16] * 3 + [0] * 2
    assert set(positions.state_dict()) == {"weight"}


def test_learned_rows_begin_as_large_as_sinusoidal_ones() -> None:
    rows = LearnedPositions(500, 64).weight.detach()
    of_sines = float(sinusoidal(500, 64).square().mean())
    assert float(rows.square().mean()) == pytest.approx(of_sines, rel=0.03)


def test_a_text_longer_than_the_learned_positions_is_refused_with_both_numbers() -> None:
    positions = LearnedPositions(9, 8)
    with pytest.raises(ValueError, match="the text needs 10 positions and 9 were learned: shorten it, or"):
        positions(torch.randn(2, 3, 8), start=7)
    with pytest.raises(ValueError, match="max_tokens is 0: at least one position is needed"):
        LearnedPositions(0, 8)


def test_no_positions_add_nothing() -> None:
    x = torch.randn(2, 3, 8)
    assert NoPositions()(x, start=4) is x
    assert NoPositions().state_dict() == {}


def embedded(positions: AttentionPositions, width: int = 10) -> RotaryEmbedding:
    rotary = positions.added_to(Semantics(1.0), width, 1).rotary
    assert rotary is not None
    return rotary


def alibi_bias(num_heads: int, query_len: int, key_len: int, dtype: torch.dtype) -> Tensor:
    bias = AlibiPositions().added_to(Semantics(1.0), 8, num_heads).bias
    assert bias is not None
    q, places = torch.zeros(1, num_heads, query_len, 8, dtype=dtype), torch.arange(key_len)
    return bias(q, q, places[key_len - query_len :], places)


def turned_by_numpy(rotary: RotaryPositions, heads: np.ndarray, start: int) -> np.ndarray:
    """Each pair of channels as one complex number, times e^(i m θ), one position at a time."""
    turned = rotary.rotary_dim or heads.shape[-1]
    result = heads.copy()
    for m in range(heads.shape[2]):
        for f in range(turned // 2):
            a, b = (f, f + turned // 2) if rotary.pairing == "halves" else (2 * f, 2 * f + 1)
            theta = rotary.base ** (-2 * f / turned)
            pair = (heads[:, :, m, a] + 1j * heads[:, :, m, b]) * np.exp(1j * (start + m) * theta)
            result[:, :, m, a], result[:, :, m, b] = pair.real, pair.imag
    return result


@pytest.mark.parametrize("start", [0, 3, 300])
@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
def test_rotary_multiplies_pairs_as_complex_numbers(rotary: RotaryPositions, start: int) -> None:
    heads = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    expected = torch.from_numpy(turned_by_numpy(rotary, heads.numpy(), start))
    assert_same(embedded(rotary)(heads, start), expected, kind="output")
    in_float32 = embedded(rotary)(heads.float(), start)
    assert in_float32.dtype == torch.float32
    assert_same(in_float32, expected.float(), kind="output")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
def test_a_start_continues_the_rotation_exactly(rotary: RotaryPositions, dtype: torch.dtype) -> None:
    heads = torch.randn(2, 3, 700, 10).to(dtype)
    parts = [heads[:, :, :200], heads[:, :, 200:201], heads[:, :, 201:]]  # across a growing table
    growing = embedded(rotary)
    continued = [growing(part, start) for part, start in zip(parts, (0, 200, 201), strict=True)]
    whole = embedded(rotary)(heads)
    assert whole.dtype == dtype
    assert_same(torch.cat(continued, dim=2), whole, kind="exact")


def test_bfloat16_is_rounded_once() -> None:
    heads = torch.randn(2, 3, 700, 10).bfloat16()
    rotary = embedded(RotaryPositions())
    assert_same(rotary(heads, 9_000), rotary(heads.float(), 9_000).bfloat16(), kind="exact")


@pytest.mark.parametrize("rotary", ROTARIES, ids=str)
def test_gradients_flow_through_the_rotation_after_a_table_made_in_inference_mode(
    rotary: RotaryPositions,
) -> None:
    fresh = embedded(rotary)
    with torch.inference_mode():
        fresh(torch.randn(1, 1, 4, 10, dtype=torch.float64))
    heads = torch.randn(2, 3, 7, 10, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(heads)
    (gradient,) = torch.autograd.grad(fresh(heads, 2), heads, upstream)
    # The inverse of a rotation is its transpose: ⟨R x, u⟩ = ⟨x, Rᵀ u⟩ and R Rᵀ u = u.
    assert_same(fresh(gradient, 2), upstream, kind="gradient")


def test_the_length_of_a_text_is_its_last_position_and_not_what_there_is_room_for() -> None:
    heads, ids = torch.randn(2, 3, 5, 10, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    plain = embedded(RotaryPositions())
    growing = dataclasses.replace(plain, long=GrowingBase(3, 10_000.0, 2.0))
    assert_same(growing.at(heads, ids, end=5), plain.at(heads, ids, end=5), kind="exact")
    assert_same(growing.at(heads, ids + 1, end=9), growing.of_length(4).at(heads, ids + 1, 4), kind="exact")
    assert (growing.at(heads, ids + 1, end=9) - plain.at(heads, ids + 1, end=9)).abs().max() > 0.01


def refusal(positions: AttentionPositions, width: int) -> str:
    """Why positions do not go with queries and keys of a width; "" if they do."""
    try:
        positions.check(width)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("rotary_dim", "width", "message"),
    [
        (5, 8, "rotary_dim is 5: it must be even"),
        (0, 8, "rotary_dim is 0: it must be even and at least 2"),
        (-2, 8, "rotary_dim is -2: it must be even and at least 2"),
        (10, 8, "rotary_dim is 10, but queries and keys are 8 wide"),
        (None, 7, "rotary_dim is 7: it must be even"),
    ],
)
def test_a_rotation_that_does_not_fit_is_refused_with_its_numbers(
    rotary_dim: int | None, width: int, message: str
) -> None:
    assert message in refusal(RotaryPositions(rotary_dim), width)


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8, 16])
def test_alibi_slopes_of_a_power_of_two_are_a_geometric_row(num_heads: int) -> None:
    assert alibi_slopes(num_heads) == [2 ** (-8 * (i + 1) / num_heads) for i in range(num_heads)]


def test_alibi_slopes_are_those_published() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    # Section 3 of the paper gives 8 and 16 heads; the authors' code fills 12 up from those of 16.
    of_16 = [2 ** (-i / 2) for i in range(1, 17)]
    assert alibi_slopes(12) == [*alibi_slopes(8), of_16[0], of_16[2], of_16[4], of_16[6]]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]


@pytest.mark.parametrize(("query_len", "key_len"), [(5, 5), (2, 5), (1, 5), (1, 1)])
def test_alibi_takes_the_distance_times_the_slope(query_len: int, key_len: int) -> None:
    bias = alibi_bias(12, query_len, key_len, torch.float64)
    offset = key_len - query_len
    expected = [
        [[-slope * abs(offset + i - j) for j in range(key_len)] for i in range(query_len)]
        for slope in alibi_slopes(12)
    ]
    assert_same(bias, torch.tensor(expected, dtype=torch.float64), kind="output")


def test_alibi_counts_in_float32_and_rounds_once() -> None:
    bias = alibi_bias(4, 1, 700, torch.bfloat16)
    assert bias.dtype == torch.bfloat16
    assert_same(bias, alibi_bias(4, 1, 700, torch.float32).bfloat16(), kind="exact")


def test_the_positions_of_a_row_are_its_own() -> None:
    ids = torch.tensor([[0, 1, 2], [5, 6, 7], [8, 9, 9]])
    rows = [PositionIds(ids, 10).of_row(row, 2).ids.tolist() for row in range(3)]
    assert rows == [[[0, 1]], [[5, 6]], [[8, 9]]]
    assert PositionIds(ids[0], 10).of_row(2, 2).ids.tolist() == [0, 1]
