"""Rows compared some at a time, with short proofs first, against the comparison of all entries at once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from triptych.rewriting.differences import row_maps
from triptych.rewriting.differences.affine_maps import (
    PLAIN,
    AffineMap,
    Reading,
    affine,
    rounded_rows,
    unfolded_rows,
)
from triptych.rewriting.differences.attention_pairs import relative_by_products, relative_of_forms
from triptych.rewriting.differences.bases import Factors, check_identity
from triptych.rewriting.differences.matching import row_signature
from triptych.rewriting.differences.rounded import Rounded, are_few, excess
from triptych.rewriting.differences.row_maps import RowMap
from triptych.rewriting.differences.tensor_changes import _groups

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROWS, WIDTH = 37, 24


@pytest.fixture(autouse=True, params=[(1 << 17, 128), (50, 7)], ids=["whole", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, columns = request.param
    monkeypatch.setattr(row_maps, "_ENTRIES_AT_A_TIME", entries)
    monkeypatch.setattr(row_maps, "_FIRST_COLUMNS", columns)


def whole(own: RowMap) -> Rounded:
    """All rows with their biases, as one map."""
    weight = Rounded.stored(own.weight, own.dtype).mT.times(own.scale)
    bias = None if own.bias is None else Rounded.stored(own.bias, own.bias_dtype).times(own.bias_scale)
    rows = affine(weight, bias).reading(own.read, centre=own.centre).rows()
    return rows.reshape(*rows.shape[1:]).mT


def reading(generator: torch.Generator, *, shift: bool, spread: float = 0.5) -> Reading:
    gain = 1 + spread * torch.randn(WIDTH, generator=generator).double()
    own = 0.1 * torch.randn(WIDTH, generator=generator).double()
    return Reading(gain, own if shift else None, centred=shift)


def pair_of(seed: int, dtype: torch.dtype) -> tuple[RowMap, RowMap]:
    """A map with a norm before it, and the same map with the norm folded in; some rows are changed."""
    generator = torch.Generator().manual_seed(seed)
    # A shift adds up in another order in blocks, which float64 shows.
    has_shift = seed % 2 == 1 and dtype != torch.float64
    weight = torch.randn(ROWS, WIDTH, generator=generator)
    weight[5] = 0.0
    weight[6, :3] = 1e-40  # less than the normal numbers of most dtypes
    bias = torch.randn(ROWS, generator=generator).to(dtype)
    one = RowMap(
        weight.to(dtype), dtype, bias, dtype, reading(generator, shift=has_shift), scale=(1.0, 0.7)[seed % 2]
    )
    folded = whole(one).numbers.to(dtype)
    changed = folded[:, :-1].clone()
    units = (changed[3:30].abs() * torch.finfo(dtype).eps).double()
    steps = torch.randint(-4, 5, units.shape, generator=generator)
    is_moved = torch.rand(units.shape, generator=generator) < 0.05
    changed[3:30] = (changed[3:30].double() + units * steps * is_moved).to(dtype)
    changed[30] = torch.randn(WIDTH, generator=generator).to(dtype)
    changed[31, 2] = torch.nan
    changed[32, 20] = torch.inf
    other = RowMap(changed, dtype, folded[:, -1].contiguous(), dtype)
    return one, other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_rows_that_rounding_explains_are_those_of_the_whole_comparison(dtype: torch.dtype, seed: int) -> None:
    one, other = pair_of(seed, dtype)
    mine, theirs = whole(one), whole(other)
    explained = excess(mine, theirs).amax(dim=1) <= 1
    assert torch.equal(row_maps.explained_rows(one, other), explained)
    assert 0 < int(explained.sum()) < ROWS
    rounds = rounded_rows(one.read, other.read, WIDTH)
    rounds[4] = False
    for rounded in (rounds, torch.tensor([True]), torch.tensor([False])):
        found = row_maps.compare_rows(one, other, rounded)
        equal = mine.numbers == theirs.numbers
        assert torch.equal(found.same, (equal | rounded).all(dim=1) & (explained | equal.all(dim=1)))
        assert torch.equal(found.explained, explained)


@pytest.mark.parametrize("seed", range(4))
def test_entries_near_the_allowed_rounding_are_judged_one_by_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(400, WIDTH, generator=generator).bfloat16()
    one = RowMap(weight, torch.bfloat16, read=reading(generator, shift=False))
    numbers = whole(one).numbers[:, :-1]
    # A folded value that is up to eight units away, in one entry of a row.
    moved = numbers.clone()
    places = torch.randint(0, WIDTH, (400, 1), generator=generator)
    by = torch.empty(400, 1).uniform_(-8, 8, generator=generator).double()
    moved.scatter_add_(1, places, by * 2.0**-8 * numbers.gather(1, places).abs())
    other = RowMap(moved.bfloat16(), torch.bfloat16)
    explained = excess(whole(one), whole(other)).amax(dim=1) <= 1
    assert torch.equal(row_maps.explained_rows(one, other), explained)
    assert 40 < int(explained.sum()) < 360


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_rows_have_the_values_of_the_whole_map(dtype: torch.dtype, seed: int) -> None:
    one, other = pair_of(seed, dtype)
    centred = replace(one, centre=True)
    for own in (one, other, centred):
        expected = whole(own)
        rows = own.with_biases()
        assert torch.allclose(rows.numbers.nan_to_num(), expected.numbers.nan_to_num(), rtol=1e-14)
        assert torch.allclose(rows.squares.nan_to_num(), expected.squares.nan_to_num(), rtol=1e-12, atol=0)
        assert torch.equal(own.numbers().nan_to_num(), rows.numbers[:, :-1].nan_to_num())
        assert torch.equal(own.numbers().nan_to_num(), expected.numbers[:, :-1].nan_to_num())
        finite = expected.numbers[expected.numbers.isfinite()]
        assert float(own.largest) == pytest.approx(float(finite.abs().max()), rel=1e-14)
        some = torch.tensor([3, 1, 20])
        chosen = own.chosen(some).with_biases().numbers
        assert torch.allclose(chosen.nan_to_num(), expected.numbers[some].nan_to_num(), rtol=1e-14)
        assert torch.equal(row_maps.used_rows(own, with_biases=True), expected.numbers.any(dim=1))
    kept = one.part(0, 30)
    signature = row_maps.row_signatures(kept, 1, with_biases=True)
    assert torch.allclose(signature, row_signature(whole(kept).numbers, 1))
    mine, theirs = whole(kept).numbers, whole(other.part(0, 30)).numbers
    assert row_maps.differ_in_few(kept, other.part(0, 30)) == are_few(mine[:, :-1], theirs[:, :-1])
    change = row_maps.change_of_rows(kept, other.part(0, 30))
    assert change.size == pytest.approx(float(mine.norm()))
    assert change.change == pytest.approx(float((mine - theirs).norm()))


def stored_map(maps: list[RowMap]) -> AffineMap:
    weight = torch.cat([own.weight for own in maps])
    bias = torch.cat([torch.zeros(len(own)) if own.bias is None else own.bias for own in maps])
    dtype = maps[0].dtype
    return affine(Rounded.stored(weight, dtype).mT, Rounded.stored(bias, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_columns_that_ignore_a_norm_are_those_of_the_whole_comparison(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ones, others = list[RowMap](), list[RowMap]()
    gain = torch.randn(WIDTH, generator=generator).double()
    # From below the rounding of the values to far above it, and two channels without a change.
    sizes = torch.finfo(dtype).eps * torch.logspace(-2, 2, WIDTH, dtype=torch.float64)
    sizes[:2] = 0.0
    shift = None if seed % 3 else torch.randn(WIDTH, generator=generator).double()
    reads = Reading(gain, shift), Reading(gain * (1 + sizes))
    for _ in range(1 + seed % 2):
        weight = torch.randn(ROWS, WIDTH, generator=generator)
        weight[::7] = 0.0
        weight[1, ::3] = 1e-41
        bias = torch.randn(ROWS, generator=generator).to(dtype)
        ones.append(RowMap(weight.to(dtype), dtype, bias, dtype, reads[0]))
        folded = (weight.to(dtype).double() / (1 + sizes)).to(dtype)
        # Some columns were folded in half of their rows only.
        is_old = torch.rand(ROWS, WIDTH, generator=generator) < torch.linspace(0, 1, WIDTH)
        others.append(replace(ones[-1], weight=torch.where(is_old, weight.to(dtype), folded), read=reads[1]))
    expected = unfolded_rows(stored_map(ones), stored_map(others), reads)
    assert torch.equal(row_maps.ignored_columns(ones, others), expected)
    assert 0 < int(expected.sum()) < WIDTH


def test_columns_of_rows_with_infinities_are_judged_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, WIDTH, generator=generator)
    weight[:30, 0] = torch.inf
    weight[:30, 1] = torch.nan
    one = RowMap(weight, torch.float32, read=Reading(torch.full((WIDTH,), 2.0).double()))
    other = RowMap(torch.where(weight.isfinite(), 2 * weight, 0.0), torch.float32)
    expected = unfolded_rows(stored_map([one]), stored_map([other]), (one.read, PLAIN))
    assert torch.equal(row_maps.ignored_columns([one], [other]), expected)


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3, 1.0])
def test_relative_differences_of_forms_by_products_are_those_of_the_forms(size: float) -> None:
    generator = torch.Generator().manual_seed(1)

    def factors(width: int = 4) -> Tensor:
        return torch.randn(3, 20, width, generator=generator).double()

    left, right = factors(), factors()
    basis = torch.randn(4, 4, generator=generator).double()
    for turned in (torch.eye(4).double(), basis):
        others = left @ turned + size * factors(), right @ turned.inverse().mT
        a = Factors(Rounded.exact(left), Rounded.exact(right))
        b = Factors(*map(Rounded.exact, others))
        for head in range(3):
            expected = relative_of_forms(a, b, head)
            found = relative_by_products(a, b, head)
            # Factors in another basis are not near, though their forms are.
            assert found is not None or (size < 1e-4 and turned is basis)
            assert found is None or found == pytest.approx(expected, rel=1e-5)


def test_factors_in_place_are_judged_as_by_all_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    left = torch.randn(5, 150, 4, generator=generator)
    moved = left.clone()
    moved[1, 3, 2] += 1e-3
    moved[2, 149, 2] += 1e-3
    a = Factors(Rounded.stored(left), Rounded.stored(left))
    b = Factors(Rounded.stored(moved), Rounded.stored(left))
    found = check_identity(a, b)
    expected = excess(a.left, b.left).amax(dim=(-2, -1)) <= 1
    assert found.explained.tolist() == expected.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("group", [None, 4, 12])
def test_sampled_groups_are_those_of_the_reshaped_matrix(group: int | None) -> None:
    matrix = torch.arange(60.0 * 24).view(60, 24)
    for own in (matrix, matrix.mT):
        if group is None or own.shape[1] % group == 0:
            rows = own.reshape(-1, own.shape[1] if group is None else group)
            step = max(1, len(rows) // 64)
            assert torch.equal(_groups(own, group), rows[:: step | 1].double())
