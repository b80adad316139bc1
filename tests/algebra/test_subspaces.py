"""How probable an overlap is: against simulation of the subspaces, from lines to all but a line."""

import math

import pytest
import torch
from torch import Tensor

from triptych.algebra.similarity import map_similarity
from triptych.algebra.subspaces import chance_of_as_much

LEVELS = (0.9, 0.5, 0.05, 0.01, 0.001)


def shared(draws: int, p: int, q: int, d: int) -> Tensor:
    """Squared cosines of random subspaces of p dimensions with one of q, summed; from the definition."""
    maps = torch.randn(draws, d, p, dtype=torch.float64)
    within = maps[:, :q].mT @ maps[:, :q]
    return torch.linalg.solve(maps.mT @ maps, within).diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def p_values(at: Tensor, p: int, q: int, d: int) -> Tensor:
    return chance_of_as_much(at, torch.full(at.shape, p), torch.full(at.shape, q), d)


@pytest.mark.parametrize(
    ("d", "p", "q"),
    [
        *[(2, 1, 1), (3, 1, 1), (8, 1, 1), (8, 7, 7), (8, 1, 7), (64, 1, 20), (24, 23, 9)],
        *[(4, 2, 2), (5, 2, 3), (6, 3, 3), (8, 2, 2), (8, 5, 5), (8, 6, 6), (8, 4, 6), (64, 2, 2)],
        *[(1024, 2, 2), (16, 4, 4), (16, 8, 8), (16, 12, 12), (64, 4, 60), (20, 18, 15)],
    ],
)
def test_random_subspaces_are_as_rare_as_their_p_values_say(d: int, p: int, q: int) -> None:
    draws = 60_000 if d * p <= 64 else 10_000
    found = p_values(shared(draws, p, q, d), p, q, d)
    for level in LEVELS:
        error = 4 * math.sqrt(level * (1 - level) / draws)
        expected = pytest.approx(level, rel=0.0 if min(p, q, d - p, d - q) == 1 else 0.125, abs=error)
        assert float((found <= level).double().mean()) == expected, level


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "p", "q"),
    [
        (6, 3, 3),
        (8, 6, 6),
        (64, 4, 60),
        (64, 32, 32),
        (64, 62, 62),
        (256, 64, 64),
        (384, 32, 32),
        (512, 64, 64),
        (768, 64, 64),
    ],
)
def test_the_same_of_common_sizes(d: int, p: int, q: int) -> None:
    draws = 40_000
    at = torch.cat([shared(draws // 40, p, q, d) for _ in range(40)])
    found = p_values(at, p, q, d)
    for level in LEVELS:
        expected = pytest.approx(level, rel=0.125, abs=4 * math.sqrt(level * (1 - level) / draws))
        assert float((found <= level).double().mean()) == expected, level


@pytest.mark.parametrize(
    ("d", "p", "q"), [(12, 3, 4), (384, 32, 32), (64, 60, 50), (9, 8, 8), (9, 1, 1), (4096, 128, 128)]
)
def test_tails_fall_from_one_to_nothing(d: int, p: int, q: int) -> None:
    least, most = max(p + q - d, 0), min(p, q)
    at = torch.linspace(least, most, 3001, dtype=torch.float64)
    found = p_values(at, p, q, d)
    assert bool((found.diff() <= 0).all())
    assert float(found[0]) == pytest.approx(1.0, abs=1e-3)
    assert float(found[-1]) == 0.0
    middle = p_values(torch.tensor([p * q / d], dtype=torch.float64), p, q, d)
    assert 0.25 < float(middle) < 0.6


def test_far_tails_follow_the_gamma_law_where_there_is_room() -> None:
    # In very many dimensions d · tr(P Q) is chi-squared with p q = 4 degrees of freedom.
    d, x = 1_000_000, torch.tensor([9.4877, 18.4668, 33.3768, 50.0], dtype=torch.float64)
    exact = (1 + x / 2) * (-x / 2).exp()
    torch.testing.assert_close(p_values(x / d, 2, 2, d), exact, rtol=0.1, atol=0)


def test_spaces_that_are_all_or_nothing_surprise_nobody() -> None:
    at = torch.tensor([3.0, 0.0, 5.0])
    found = chance_of_as_much(at, torch.tensor([5, 0, 5]), torch.tensor([3, 4, 5]), 5)
    assert found.tolist() == [1.0, 1.0, 1.0]
    assert found.dtype == torch.float32


def test_heads_of_different_ranks_have_their_own_chances() -> None:
    ranks = torch.tensor([2, 3, 2, 7]), torch.tensor([3, 2, 4, 7])
    at = torch.tensor([1.0, 1.0, 1.0, 6.5], dtype=torch.float64)
    found = chance_of_as_much(at, *ranks, 8)
    alone = [p_values(at[i : i + 1], int(ranks[0][i]), int(ranks[1][i]), 8)[0] for i in range(4)]
    assert found.tolist() == [float(value) for value in alone]
    assert found[0] == found[1]
    assert found[2] > found[0]


def test_heads_nearly_as_wide_as_the_model_are_not_called_alike_by_chance() -> None:
    one, other = torch.randn(20_000, 8, 7), torch.randn(20_000, 8, 7)
    found = map_similarity(one, other).p_value
    assert float((found < 0.001).double().mean()) < 0.002
