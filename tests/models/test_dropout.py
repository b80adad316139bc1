"""Dropout from 16-bit random numbers."""

import pytest
import torch

from tolerances import assert_same
from triptych.core.models.feed_forward import Dropout


def training(p: float) -> Dropout:
    return Dropout(p).train()


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_mean_and_variance_are_those_of_dropout(p: float) -> None:
    n = 1_000_000
    dropped = training(p)(torch.ones(n, dtype=torch.float64))
    # Each is 0 or 1/(1 − p): mean 1, variance p/(1 − p). Six standard errors, and the rounding of p.
    variance = p / (1 - p)
    assert float(dropped.mean()) == pytest.approx(1, abs=6 * (variance / n) ** 0.5)
    share = float((dropped == 0).double().mean())
    assert share == pytest.approx(p, abs=6 * (p * (1 - p) / n) ** 0.5 + 2**-17)
    assert float(dropped.var()) == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.5])
def test_a_number_is_zeroed_or_scaled_and_nothing_else(p: float) -> None:
    x = torch.randn(5000, dtype=torch.float64)
    dropped = training(p)(x)
    rounded = round(p * 2**16) / 2**16
    kept = dropped != 0
    assert 0 < int(kept.sum()) < 5000
    assert_same(dropped[kept], x[kept] / (1 - rounded), kind="output")


def test_neighbours_are_dropped_independently() -> None:
    # Four numbers come from one draw: their decisions must not be tied.
    kept = (training(0.5)(torch.ones(400_000)) != 0).double().view(-1, 4)
    correlation = torch.corrcoef(kept.T) - torch.eye(4, dtype=torch.float64)
    assert correlation.abs().max() < 6 / 100_000**0.5


def test_the_same_seed_gives_the_same_mask_and_another_another() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    first = training(0.5)(x)
    second = training(0.5)(x)
    torch.manual_seed(3)
    assert_same(training(0.5)(x), first, kind="exact")
    assert not torch.equal(second, first)


def test_it_is_the_identity_in_evaluation_and_at_zero() -> None:
    x = torch.randn(3, 5)
    assert Dropout(0.5).eval()(x) is x
    assert training(0.0)(x) is x


@pytest.mark.parametrize("shape", [(1,), (3,), (7, 5), (2, 3, 5), (0, 4)])
def test_any_size_will_do(shape: tuple[int, ...]) -> None:
    assert training(0.5)(torch.ones(shape)).shape == shape


def test_an_input_that_is_not_contiguous_will_do() -> None:
    x = torch.randn(6, 10).T[::2]
    assert not x.is_contiguous()
    dropped = training(0.5)(x)
    kept = dropped != 0
    assert_same(dropped[kept], 2 * x[kept], kind="exact")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    assert training(0.5)(torch.ones(9, dtype=dtype)).dtype == dtype


def test_the_gradient_passes_where_the_number_did() -> None:
    x = torch.randn(1000, requires_grad=True)
    dropped = training(0.25)(x)
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert_same(gradient * x.detach(), dropped.detach(), kind="exact")


@pytest.mark.parametrize("p", [1e-9, 1 - 1e-9])
def test_a_probability_at_the_edge_stays_finite(p: float) -> None:
    assert training(p)(torch.ones(1000)).isfinite().all()
