"""What random maps measure, against simulation of the maps themselves and against known limits."""

import math

import pytest
import torch
from torch import Tensor

from triptych.seeing.chance import (
    random_closeness,
    random_copying_spread,
    random_spectra,
    random_symmetric_share,
)

# Heads as narrow as toys have them, as wide as the model, wider than it, and of common sizes.
SIZES = [(1, 1), (6, 1), (2, 2), (16, 4), (8, 8), (4, 6), (9, 8), (32, 32), (96, 16)]


def maps(draws: int, d: int, width: int) -> tuple[Tensor, Tensor]:
    one, other = (torch.randn(draws, d, width, dtype=torch.float64) for _ in range(2))
    return one, other


def draws_of(width: int) -> int:
    return max(800, 20_000 // width)


@pytest.mark.parametrize(("d", "width"), SIZES)
def test_closeness_is_what_random_maps_have_on_average(d: int, width: int) -> None:
    one, other = maps(draws_of(width), d, width)
    norms = torch.linalg.matrix_norm(one) * torch.linalg.matrix_norm(other)
    found = torch.linalg.svdvals(one.mT @ other).sum(dim=-1) / norms
    error = 4 * float(found.std()) / math.sqrt(len(found))
    assert random_closeness(d, width) == pytest.approx(float(found.mean()), rel=0.01, abs=error)


@pytest.mark.parametrize(("d", "width"), SIZES)
def test_scores_of_copying_spread_as_those_of_random_maps_do(d: int, width: int) -> None:
    W_V, W_O = maps(draws_of(width), d, width)
    eigenvalues = torch.linalg.eigvals(W_O.mT @ W_V)
    scores = eigenvalues.real.sum(dim=-1) / eigenvalues.abs().sum(dim=-1)
    squares = scores.square()
    error = 4 * float(squares.std()) / math.sqrt(len(squares))
    assert random_copying_spread(d, width) ** 2 == pytest.approx(float(squares.mean()), rel=0.03, abs=error)
    assert abs(float(scores.mean())) < 4 * float(scores.std()) / math.sqrt(len(scores))


@pytest.mark.parametrize(("d", "width"), SIZES)
def test_random_forms_use_as_many_directions(d: int, width: int) -> None:
    left, right = maps(draws_of(width), d, width)
    values = torch.linalg.svdvals(torch.linalg.qr(left).R @ torch.linalg.qr(right).R.mT)
    shares = values / values.sum(dim=-1, keepdim=True)
    ranks = torch.special.entr(shares).sum(dim=-1).exp()
    error = 4 * float(ranks.std()) / math.sqrt(len(ranks))
    found = random_spectra(d, width)
    assert found.values.shape[-1] == min(d, width)
    assert float(found.effective_rank.mean()) == pytest.approx(float(ranks.mean()), rel=0.02, abs=error)
    kept = values.square().cumsum(dim=-1) / values.square().sum(dim=-1, keepdim=True)
    within = (kept < 0.95).sum(dim=-1) + 1
    assert abs(int(found.rank_within(0.05).median()) - int(within.median())) <= (width > 8)


@pytest.mark.parametrize(("d", "width"), [(1, 1), (4, 1), (6, 6), (6, 9), (16, 4)])
def test_random_forms_are_symmetric_in_a_bit_more_than_half(d: int, width: int) -> None:
    left, right = maps(20_000, d, width)
    forms = left @ right.mT
    shares = ((forms + forms.mT) / 2).square().sum(dim=(-2, -1)) / forms.square().sum(dim=(-2, -1))
    error = 4 * float(shares.std()) / math.sqrt(len(shares)) + 1e-9
    assert random_symmetric_share(d) == pytest.approx(float(shares.mean()), abs=error)


def test_two_thin_random_maps_come_as_near_as_the_quarter_circle_has_it() -> None:
    # Singular values of a square Gaussian follow the quarter circle, of mean 8 / 3π.
    assert random_closeness(4096, 64) == pytest.approx(8 / (3 * math.pi) * math.sqrt(64 / 4096), rel=0.01)


def test_random_heads_of_common_sizes() -> None:
    found = random_spectra(384, 32)
    assert float(found.effective_rank.mean()) == pytest.approx(31.30, abs=0.02)
    assert int(found.rank_within(0.05).median()) == 29
    # Simulated apart: 200,000 pairs of maps.
    assert random_copying_spread(32, 32) == pytest.approx(0.0631, rel=0.03)
    assert random_copying_spread(384, 32) == pytest.approx(0.0481, rel=0.03)
    assert random_closeness(16, 4) == pytest.approx(0.4018, rel=0.01)
