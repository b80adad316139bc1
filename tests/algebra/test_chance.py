"""What random maps measure: known limits."""

import math

import pytest
import torch

from triptych.algebra.chance import random_closeness, random_copying_spread, random_spectrum


def test_two_thin_random_maps_come_as_near_as_the_quarter_circle_has_it() -> None:
    # Singular values of a square Gaussian follow the quarter circle, of mean 8 / 3π.
    assert random_closeness(4096, 64) == pytest.approx(8 / (3 * math.pi) * math.sqrt(64 / 4096), rel=0.03)


def test_random_forms_use_nearly_all_they_have() -> None:
    spectrum = random_spectrum(384, 32)
    assert float(spectrum.effective_rank) == pytest.approx(31.3, abs=0.1)
    assert int(spectrum.rank_within(0.05)) == 29


def test_scores_of_copying_spread_as_many_draws_do() -> None:
    W_V, W_O = torch.randn(200, 96, 8).double(), torch.randn(200, 8, 96).double()
    eigenvalues = torch.linalg.eigvals(W_O @ W_V)
    scores = eigenvalues.real.sum(dim=-1) / eigenvalues.abs().sum(dim=-1)
    assert random_copying_spread(8) == pytest.approx(float(scores.std()), rel=0.3)
    assert random_copying_spread(64) < random_copying_spread(8)
