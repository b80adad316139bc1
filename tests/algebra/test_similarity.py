"""How alike two maps are: invariances, extremes, chance."""

import math

import pytest
import torch
from torch import Tensor

from triptych.seeing import similarity
from triptych.seeing.similarity import (
    MapSimilarity,
    chance_of_as_much,
    compare_maps,
    cosine_of_forms,
    similar,
    sketches,
    span,
)


def maps(heads: int = 3, d: int = 20, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(heads, d, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def map_similarity(one: Tensor, other: Tensor) -> MapSimilarity:
    (Q, R), (other_Q, other_R) = torch.linalg.qr(one), torch.linalg.qr(other)
    d = one.shape[1]
    return compare_maps(span(R, d), span(other_R, d), Q.mT @ other_Q, d)


def gauge(width: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_map_is_like_itself() -> None:
    A = maps()
    found = map_similarity(A, A)
    for value in (found.cosine, found.procrustes, found.cka, found.overlap):
        torch.testing.assert_close(value, torch.ones(3, dtype=torch.float64))
    assert float(found.angles.max()) < 1e-6
    assert found.times_chance.tolist() == pytest.approx([5.0] * 3)
    assert float(found.p_value.max()) < 1e-6


def test_orthogonal_maps_are_not_alike() -> None:
    A = maps(width=8)
    Q = torch.linalg.qr(A).Q
    found = map_similarity(Q[..., :4], Q[..., 4:])
    for value in (found.cosine, found.procrustes, found.cka, found.overlap):
        torch.testing.assert_close(value, torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.angles, torch.full((3, 4), math.pi / 2, dtype=torch.float64))
    assert float(found.p_value.min()) > 0.9


def test_what_depends_on_the_basis_and_what_does_not() -> None:
    A, B = maps(seed=1), maps(seed=2)
    plain = map_similarity(A, B)
    rotated = map_similarity(A @ torch.linalg.qr(gauge(4)).Q, B)
    changed = map_similarity(A @ gauge(4), B)
    for found in (rotated, changed):
        torch.testing.assert_close(found.overlap, plain.overlap)
        torch.testing.assert_close(found.angles, plain.angles)
        assert (found.cosine - plain.cosine).abs().max() > 0.01
    torch.testing.assert_close(rotated.procrustes, plain.procrustes)
    torch.testing.assert_close(rotated.cka, plain.cka)
    assert (changed.cka - plain.cka).abs().max() > 0.01


def test_angles_are_the_angles() -> None:
    angle = 0.3
    A = torch.zeros(1, 5, 2, dtype=torch.float64)
    A[0, 0, 0] = A[0, 1, 1] = 2
    B = torch.zeros(1, 5, 2, dtype=torch.float64)
    B[0, 0, 0], B[0, 2, 1], B[0, 1, 1] = 3, math.sin(angle), math.cos(angle)
    found = map_similarity(A, B)
    torch.testing.assert_close(
        found.angles, torch.tensor([[0.0, angle]], dtype=torch.float64), atol=1e-7, rtol=0
    )
    assert float(found.overlap[0]) == pytest.approx((1 + math.cos(angle) ** 2) / 2)


def test_widths_may_differ_and_ranks_be_short() -> None:
    A, B = maps(width=3), maps(width=5, seed=3)
    found = map_similarity(A, B)
    assert bool(found.cosine.isnan().all())
    assert found.chance.tolist() == pytest.approx([5 / 20] * 3)
    short = A.clone()
    short[:, :, 2] = short[:, :, 1]
    thin = map_similarity(short, B)
    torch.testing.assert_close(thin.overlap, map_similarity(A[..., :2], B).overlap)
    assert bool(thin.angles[:, 2].isnan().all())


@pytest.mark.parametrize(("p", "q", "d"), [(4, 4, 20), (8, 3, 64)])
def test_chance_is_what_random_subspaces_give(p: int, q: int, d: int) -> None:
    draws = 4000
    found = map_similarity(maps(draws, d, p, seed=4), maps(draws, d, q, seed=5))
    mean, spread = float(found.overlap.mean()), float(found.overlap.std())
    assert mean == pytest.approx(float(found.chance[0]), abs=4 * spread / math.sqrt(draws))
    # Were the p-values exact, as many would be below 0.05 and above 0.95 as there should be.
    for level in (0.05, 0.5, 0.95):
        assert float((found.p_value < level).double().mean()) == pytest.approx(level, abs=0.03)


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
        *[(16, 4, 4), (16, 8, 8), (16, 12, 12), (64, 4, 60), (20, 18, 15), (64, 32, 32)],
    ],
)
def test_random_subspaces_are_as_rare_as_their_p_values_say(d: int, p: int, q: int) -> None:
    draws = 60_000 if d * p <= 64 else 10_000
    found = p_values(shared(draws, p, q, d), p, q, d)
    of_a_line = min(p, q, d - p, d - q) == 1
    for level in (0.9, 0.5, 0.05, 0.01, 0.001):
        error = 4 * math.sqrt(level * (1 - level) / draws)
        expected = pytest.approx(level, rel=0.0 if of_a_line else 0.3, abs=error)
        assert float((found <= level).double().mean()) == expected, level


@pytest.mark.parametrize(
    ("d", "p", "q"), [(12, 3, 4), (384, 32, 32), (64, 60, 50), (9, 8, 8), (9, 1, 1), (4096, 128, 128)]
)
def test_tails_fall_from_one_to_nothing(d: int, p: int, q: int) -> None:
    least, most = max(p + q - d, 0), min(p, q)
    found = p_values(torch.linspace(least, most, 3001, dtype=torch.float64), p, q, d)
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


def test_forms_that_are_alike_are_found_in_any_gauge() -> None:
    left, right = maps(12, 30, 5, seed=8), maps(12, 30, 5, seed=9)
    G = gauge(5)
    left[7], right[7] = left[2] @ G, right[2] @ torch.linalg.inv(G).mT
    left[11], right[11] = -left[4], right[4] + 0.2 * right[5]
    found = similar(sketches(left, right), at_least=0.9, most=10)
    assert set(found) == {(2, 7), (4, 11)}
    assert found[0] == (2, 7)
    assert cosine_of_forms(left[2], right[2], left[7], right[7]) == pytest.approx(1.0)
    forms = left @ right.mT
    expected = float((forms[4] * forms[11]).sum() / forms[4].norm() / forms[11].norm())
    assert cosine_of_forms(left[4], right[4], left[11], right[11]) == pytest.approx(expected)
    assert expected < -0.9
    assert similar(sketches(left[:1], right[:1]), at_least=0.9, most=10) == []
    assert similar(sketches(left, right), at_least=0.9, most=1) == [(2, 7)]


@pytest.mark.parametrize("rows", [1, 3, 7, 40])
def test_few_rows_at_a_time_find_the_same_pairs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sketched = torch.nn.functional.normalize(torch.randn(30, 3, dtype=torch.float64), dim=1)
    products = (sketched @ sketched.mT).abs()
    pairs = [(i, j) for i in range(30) for j in range(i + 1, 30) if products[i, j] > 0.9 - 0.38]
    pairs.sort(key=lambda pair: -float(products[pair]))
    assert len(pairs) > 20
    monkeypatch.setattr(similarity, "_ROWS_AT_A_TIME", rows)
    assert similar(sketched, at_least=0.9, most=1000) == pairs
    assert similar(sketched, at_least=0.9, most=20) == pairs[:20]


def test_a_form_that_is_zero_is_like_none() -> None:
    left, right = maps(2, 30, 5), maps(2, 30, 5, seed=1)
    left[0] = 0
    assert similar(sketches(left, right), at_least=0.9, most=10) == []
    assert cosine_of_forms(left[0], right[0], left[1], right[1]) == 0.0
