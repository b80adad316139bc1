"""Sinusoidal positions."""

import math

import pytest
import torch

from tolerances import assert_same
from triptych.attention import SinusoidalPositions, sinusoidal


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
