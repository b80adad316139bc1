"""Numbers of rows with which products give a row the same bits."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from triptych.literals import Precision
from triptych.running.decoding import PRECISIONS
from triptych.running.decoding import row_counts as rows
from triptych.running.decoding.linear_maps import Maps, PackedLinear
from triptych.running.decoding.row_counts import ProductShape, RowCounts, row_counts

NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 29, 32, 33, 65, 117, 126, 200, 300)
# Widths, feed-forward layers and queries, keys and values of published models.
SHAPES = [(576, 960), (960, 1600), (2560, 960), (896, 1152), (4864, 896), (2048, 3072), (8192, 2048)]
SHAPES += [(4096, 6144), (4096, 14336), (14336, 4096)]
VOCABULARIES = [(576, 49152), (896, 151936), (2048, 49152)]
SHORT = [(1536, 576), (1024, 3072)]
LONG = [pytest.param(*shape, marks=pytest.mark.slow) for shape in (*SHAPES, *VOCABULARIES)]


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_FOUND", {})
    monkeypatch.setattr(rows, "_LAYOUTS", {})


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def made(d_in: int, d_out: int, precision: Precision) -> tuple[nn.Module, Tensor]:
    """A map all of whose products are rounding, but in int8; and rows for it."""
    maps = Maps(precision, torch.float32, packed=True)
    if precision != "int8" and not PackedLinear.serves(torch.device("cpu"), maps.dtype):
        pytest.skip("this processor has no such products")
    draw = torch.Generator().manual_seed(1)
    places = torch.randperm(d_in, generator=draw)
    half = torch.randn(min(d_out, 256), d_in // 2, generator=draw).bfloat16().float()
    weight = torch.cat([half, -half], dim=1)[:, places].repeat(-(-d_out // 256), 1)[:d_out]
    given = torch.randn(max(NUMBERS), d_in // 2, generator=draw).bfloat16().float()
    x = torch.cat([given, given], dim=1)[:, places].to(maps.dtype)
    if precision == "int8":
        x = torch.randn(x.shape, generator=draw)
    return maps.linear(weight, None), x


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("d_in", "d_out"), [*SHORT, *LONG])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    d_in: int, d_out: int, precision: Precision
) -> None:
    layer, x = made(d_in, d_out, precision)
    most = 65 if d_out > 1 << 15 else max(NUMBERS)
    together = layer(x[:most])
    for number in NUMBERS:
        if number < most:
            assert torch.equal(layer(x[:number]), together[:number]), number
            assert torch.equal(layer(x[most - number : most]), together[most - number :]), number


def differing(classes: Callable[[int], int]) -> Callable[..., Callable[[Tensor], Tensor]]:
    """Products whose rows say to which class their number belongs."""

    def make(shape: ProductShape, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        assert float((weight.double().sum(dim=1)).abs().max()) < 1e-9
        return lambda x: torch.full((len(x), shape.d_out), float(classes(len(x))))

    return make


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (lambda n: 0, RowCounts(1, sys.maxsize, (), True)),
        (lambda n: int(n == 1), RowCounts(2, sys.maxsize, (), True)),
        (lambda n: int(n < 16), RowCounts(1, 8, (), True)),
        (lambda n: int(n > 32), RowCounts(1, 32, (), True)),
        (lambda n: int(n in (1, 33)), RowCounts(2, 32, (200, 128, 64), True)),
        (lambda n: n // 32, RowCounts(1, 8, (24, 16), True)),
        (lambda n: n, RowCounts(1, 1, (), True)),
    ],
    ids=["all alike", "one row", "few rows", "many rows", "some", "blocks", "none alike"],
)
def test_what_is_found_is_what_products_of_each_number_give(
    classes: Callable[[int], int], expected: RowCounts
) -> None:
    shape = ProductShape(6, 5, torch.float32, False, 32)
    assert row_counts(shape, 300, differing(classes)) == expected


def test_many_rows_are_compared_when_there_are_many() -> None:
    shape = ProductShape(6, 5, torch.float32, False, 32)
    assert row_counts(shape, 3, differing(lambda n: int(n == 1))) == RowCounts(2, 32)
    assert row_counts(shape, 33, differing(lambda n: int(n == 1))).most == sys.maxsize


def test_pieces_have_numbers_of_rows_that_were_compared() -> None:
    counts = RowCounts(2, 32, (128, 64), True)
    assert counts.pieces(300) == [128, 128, 32, 12]
    assert counts.pieces(65) == [64, 1]
    assert counts.pieces(32) == [32]
