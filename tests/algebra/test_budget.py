"""Ranks from shares of energy, and from one budget for all."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from triptych.rewriting.functions.budget import allocate

SPECTRA = st.lists(
    st.lists(st.integers(0, 20), min_size=1, max_size=4).map(
        lambda energies: torch.tensor(sorted(energies, reverse=True), dtype=torch.float64)
    ),
    min_size=1,
    max_size=4,
)


def spent(ranks: tuple[int, ...] | list[int], costs: list[float]) -> float:
    return sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))


def kept(ranks: tuple[int, ...] | list[int], spectra: list[Tensor]) -> float:
    return sum(float(spectrum[:rank].sum()) for rank, spectrum in zip(ranks, spectra, strict=True))


def all_ranks(spectra: list[Tensor]) -> Any:
    return itertools.product(*(range(1, len(spectrum) + 1) for spectrum in spectra))


@given(SPECTRA, st.floats(0.05, 1.0))
def test_with_one_cost_no_ranks_within_the_budget_keep_more(spectra: list[Tensor], share: float) -> None:
    costs = [3.0] * len(spectra)
    budget = share * spent([len(spectrum) for spectrum in spectra], costs) * (1 + 1e-12)
    ranks = allocate(spectra, costs, share=share)
    allowed = [other for other in all_ranks(spectra) if spent(other, costs) <= budget]
    if not allowed:
        assert ranks == [1] * len(spectra)
        return
    assert spent(ranks, costs) <= budget
    assert kept(ranks, spectra) == max(kept(other, spectra) for other in allowed)


@given(SPECTRA, st.floats(0.05, 1.0), st.data())
def test_with_several_costs_only_what_one_channel_costs_is_lost(
    spectra: list[Tensor], share: float, data: st.DataObject
) -> None:
    costs = [float(data.draw(st.integers(1, 5))) for _ in spectra]
    budget = share * spent([len(spectrum) for spectrum in spectra], costs) * (1 + 1e-12)
    ranks = allocate(spectra, costs, share=share)
    within = [other for other in all_ranks(spectra) if spent(other, costs) <= budget - max(costs)]
    assert spent(ranks, costs) <= max(budget, sum(costs))
    assert all(kept(ranks, spectra) >= kept(other, spectra) - 1e-9 for other in within)


@given(SPECTRA, st.floats(0.05, 1.0))
def test_the_lowest_rank_that_keeps_a_share(spectra: list[Tensor], energy: float) -> None:
    for spectrum, rank in zip(spectra, allocate(spectra, [1.0] * len(spectra), energy=energy), strict=True):
        shares = np.cumsum(spectrum.numpy()) / max(float(spectrum.sum()), 1e-300)
        enough = [i + 1 for i, share in enumerate(shares) if share >= energy - 1e-12]
        assert rank == (enough[0] if enough else 1)


def test_channels_that_carry_nothing_are_not_bought() -> None:
    spectra = [torch.tensor([4.0, 0.0, 0.0]), torch.tensor([2.0, 1.0, 0.0])]
    assert allocate(spectra, [1.0, 1.0], share=1.0) == [1, 2]
    assert allocate(spectra, [1.0, 1.0], energy=1.0) == [1, 2]


def test_a_dear_channel_waits_for_cheap_ones() -> None:
    spectra = [torch.tensor([9.0, 6.0, 5.0]), torch.tensor([9.0, 4.0, 3.0])]
    assert allocate(spectra, [4.0, 1.0], share=7 / 15) == [1, 3]
    assert allocate(spectra, [1.0, 1.0], share=4 / 6) == [3, 1]


def test_every_form_keeps_a_channel_whatever_the_budget() -> None:
    assert allocate([torch.ones(3), torch.zeros(2)], [1.0, 1.0], share=0.01) == [1, 1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "give either energy or share"),
        ({"energy": 0.5, "share": 0.5}, "give either energy or share"),
        ({"energy": 0.0}, "energy is 0.0: it must be above 0 and at most 1"),
        ({"share": 1.5}, "share is 1.5: it must be above 0 and at most 1"),
        ({"energy": 0.5, "costs": [1.0, 2.0]}, "there are 1 spectra and 2 costs"),
        ({"energy": 0.5, "costs": [0.0]}, "cost 0 is 0.0: it must be above 0"),
        ({"energy": 0.5, "spectra": [torch.tensor([1.0, 2.0])]}, "spectrum 0 is not one: .* descending"),
        ({"energy": 0.5, "spectra": [torch.tensor([1.0, -1.0])]}, "spectrum 0 is not one"),
        ({"energy": 0.5, "spectra": [torch.tensor([torch.inf, 1.0])]}, "spectrum 0 is not finite"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        allocate(**{"spectra": [torch.ones(2)], "costs": [1.0], **options})
