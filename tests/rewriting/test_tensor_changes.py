"""Explanations of how one tensor became another, and pairs that look alike and are none."""

import pytest
import torch
from torch import Tensor

from triptych.rewriting.differences import tensor_changes as changes
from triptych.rewriting.differences.tensor_changes import Grid

STORED = (torch.float32, torch.float16, torch.bfloat16)


def matrix(rows: int = 96, columns: int = 128) -> Tensor:
    return torch.randn(rows, columns) * 0.05


def quantised(weight: Tensor, group: int, bits: int, *, symmetric: bool) -> Tensor:
    rows = weight.reshape(-1, group)
    if symmetric:
        step = rows.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        return ((rows / step).round() * step).view_as(weight)
    low = rows.amin(dim=1, keepdim=True)
    step = (rows.amax(dim=1, keepdim=True) - low) / (2**bits - 1)
    return (((rows - low) / step).round() * step + low).view_as(weight)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("bits", "group", "symmetric"), [(3, 64, True), (4, 32, False), (8, 128, True)])
def test_levels_and_groups_of_a_grid_are_found(
    stored: torch.dtype, bits: int, group: int, symmetric: bool
) -> None:
    before = matrix()
    after = quantised(before, group, bits, symmetric=symmetric).to(stored)
    of_rows = None if group == before.shape[1] else group
    assert changes.on_grid(before, after, stored) == Grid(2**bits, of_rows, is_even=True)


def test_a_table_of_values_is_no_grid_in_equal_steps() -> None:
    before = matrix()
    levels = torch.erfinv(torch.linspace(-0.95, 0.95, 16)) * 0.1
    after = levels[(before[..., None] - levels).abs().argmin(-1)]
    assert changes.on_grid(before, after, torch.float32) == Grid(16, None, is_even=False)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_numbers_of_a_dtype_are_no_grid(stored: torch.dtype) -> None:
    before = matrix().to(stored)
    assert changes.on_grid(before, (before + 0.1 * matrix()).to(stored), stored) is None


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("rank", [1, 6, 20])
def test_the_rank_of_a_change_is_what_stands_above_rounding(stored: torch.dtype, rank: int) -> None:
    before = matrix().to(stored)
    product = 0.3 * matrix(96, rank) @ torch.randn(rank, 128)
    found = changes.low_rank(before, (before.float() + product).to(stored), stored)
    assert found is not None
    assert found.rank == rank


@pytest.mark.parametrize("rank", [1, 5, 15, 30, 96])
def test_the_rank_found_from_a_part_is_that_of_all_singular_values(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = matrix()
    after = before + 0.3 * matrix(96, rank) @ torch.randn(rank, 128)
    values = torch.linalg.svdvals(after.double() - before.double())
    expected = int((values > 1e-4 * values[0]).sum())
    assert expected == rank
    for rows_of_part in (600, 64):  # the whole matrix, and a part of it
        monkeypatch.setattr(changes, "_SKETCHED", rows_of_part)
        found = changes.low_rank(before, after, torch.float32)
        # Only ranks up to a quarter of the smaller dimension count as low.
        assert (None if found is None else found.rank) == (rank if rank <= 24 else None)


def test_changes_that_are_of_low_rank_by_chance_are_none() -> None:
    before = matrix()
    entry = before.clone()
    entry[3, 4] += 1
    row = before.clone()
    row[5] += 0.1
    trained = before + 0.01 * matrix()
    rounded = before.bfloat16()
    for after in (entry, row, trained):
        assert changes.low_rank(before, after, torch.float32) is None
    assert changes.low_rank(before, rounded, torch.bfloat16) is None


@pytest.mark.parametrize("name", changes.FORMATS)
def test_rounding_is_named_by_its_format(name: str) -> None:
    before = matrix()
    assert changes.rounded_to(before, before.to(changes.FORMATS[name]).float()) == name
    # The same format with a scale that brings the largest entry of a row to the end of its range.
    if "float8" in name:
        scale = before.abs().amax(dim=1, keepdim=True) / torch.finfo(changes.FORMATS[name]).max
        after = ((before / scale).to(changes.FORMATS[name]).float() * scale).bfloat16()
        assert changes.rounded_to(before, after) == f"{name} with scales"


def test_numbers_that_were_cut_off_are_not_rounded() -> None:
    before = matrix()
    cut = (before.view(torch.int32) & -(1 << 16)).view(torch.float32)
    assert changes.rounded_to(before, cut) == "bfloat16, cut off instead of rounded"
    cut[0, 0] = before[0, 0]
    assert changes.rounded_to(before, cut) is None


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_a_mixture_is_found_by_its_shares(stored: torch.dtype) -> None:
    before = matrix().to(stored)
    third = matrix().to(stored)
    after = (0.7 * before.float() + 0.3 * third.float()).to(stored)
    found = changes.mixture(before, third, after, stored)
    assert found is not None
    assert (found.own, found.other) == pytest.approx((0.7, 0.3), abs=1e-3)
    assert changes.mixture(before, third, (after.float() + 0.01 * matrix()).to(stored), stored) is None


def test_pruning_keeps_all_other_entries() -> None:
    before = matrix()
    after = torch.where(before.abs() < 0.02, 0.0, before)
    found = changes.pruned(before, after)
    assert found is not None
    assert found.structure == ""
    of_four = before.view(-1, 4).abs().topk(2, dim=1).indices
    kept = torch.zeros(before.numel() // 4, 4).scatter(1, of_four, 1.0).view_as(before)
    structured = changes.pruned(before, before * kept)
    assert structured is not None
    assert structured.structure == "2 of 4"
    assert changes.pruned(before, after * 1.001) is None


def test_training_changes_most_rows_and_no_row_altogether() -> None:
    before = matrix()
    assert changes.is_spread(before, before + 0.1 * matrix(), 1.0)
    swapped = before.clone()
    swapped[[0, 1]] = before[[1, 0]]
    assert not changes.is_spread(before, swapped, 1.0)


def test_copies_of_heads_in_turn_are_not_repeats() -> None:
    before = matrix(16, 24)
    tiled = before.repeat(2, 1)
    repeated = before.view(2, 8, 24).repeat_interleave(2, dim=0).flatten(0, 1)
    assert changes.is_tiled(before, tiled, 2, 4)
    assert not changes.is_tiled(before, repeated, 2, 4)


def test_both_layouts_of_rotary_pairs_are_told_apart() -> None:
    before = matrix(32, 24)
    halves = before.view(4, 2, 4, 24).transpose(1, 2).reshape(32, 24)
    assert changes.rotary_order(before, halves, 4, 8) == "pairs of halves → neighbouring pairs"
    assert changes.rotary_order(halves, before, 4, 8) == "neighbouring pairs → pairs of halves"
    assert changes.rotary_order(before, before.flip(0), 4, 8) is None
