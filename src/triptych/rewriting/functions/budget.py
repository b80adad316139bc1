"""Allocation of channels to heads, by share of energy or under a common budget."""

import heapq
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def allocate(
    spectra: Sequence[Float[Tensor, " _"]],
    costs: Sequence[float],
    *,
    energy: float | None = None,
    share: float | None = None,
) -> list[int]:
    """Return the rank of every form: the lowest for a share of its energy, or the best use of a budget.

    A budget first gives every form one channel. It then buys further channels by descending energy per cost,
    skipping channels above the remaining budget and channels of zero energy.

    Up to the first skipped channel, ranks of at most the same cost keep at most the same energy. With λ the
    ratio of the last bought channel, the ranks maximise Σ (energy − λ · cost): energies descend within a
    form, so the bought channels are all channels of a ratio above λ and some at λ. Ranks of more energy for
    at most the same cost would increase the sum. With equal costs, the ranks are the best use of the whole
    budget.
    """
    _require_sound(spectra, costs, energy, share)
    if energy is not None:
        kept = [spectrum.double().cumsum(dim=0) for spectrum in spectra]
        # Tolerate rounding of the kept share.
        return [
            1 + int(one[:-1].lt(energy * (1 - 1e-12) * one[-1]).sum()) for one in kept
        ]
    assert share is not None
    left = share * sum(
        cost * len(spectrum) for spectrum, cost in zip(spectra, costs, strict=True)
    )
    # Tolerate rounding of the budget.
    left = left * (1 + 1e-12) - sum(costs)
    ranks = [1] * len(spectra)
    energies = [spectrum.tolist() for spectrum in spectra]
    offers = [(-of[1] / costs[i], i) for i, of in enumerate(energies) if len(of) > 1]
    heapq.heapify(offers)
    while offers:
        worth, i = heapq.heappop(offers)
        if costs[i] > left or worth == 0:
            continue
        left -= costs[i]
        ranks[i] += 1
        if ranks[i] < len(energies[i]):
            heapq.heappush(offers, (-energies[i][ranks[i]] / costs[i], i))
    return ranks


def _require_sound(
    spectra: Sequence[Tensor],
    costs: Sequence[float],
    energy: float | None,
    share: float | None,
) -> None:
    if (energy is None) == (share is None):
        raise ValueError("give either energy or share, the other None")
    for name, value in (("energy", energy), ("share", share)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name} is {value}: it must be above 0 and at most 1")
    if len(costs) != len(spectra):
        raise ValueError(
            f"there are {len(spectra)} spectra and {len(costs)} costs: give one for each"
        )
    # The greedy allocation requires positive costs and descending energies.
    for i, (spectrum, cost) in enumerate(zip(spectra, costs, strict=True)):
        if not cost > 0:
            raise ValueError(f"cost {i} is {cost}: it must be above 0")
        if (
            not len(spectrum)
            or not bool((spectrum >= 0).all())
            or bool((spectrum.diff() > 0).any())
        ):
            raise ValueError(
                f"spectrum {i} is not one: it must have energies, at least 0, in descending order"
            )
        if not bool(torch.isfinite(spectrum).all()):
            raise ValueError(f"spectrum {i} is not finite")
