"""How many channels each head keeps, within a budget for all heads."""

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
    """The rank of every form: the lowest that keeps a share of its energy, or what a budget is best spent on.

    A budget first gives every form one channel. Then it buys the channels that are left by descending energy
    per cost, passing over those that it no longer pays for and those that carry nothing.

    Up to the first channel passed over, no ranks of at most the same cost keep more energy. With λ the ratio
    of the last channel bought, the ranks found maximise Σ (energy − λ · cost): in every form energies only
    fall, and what is taken is every channel of a ratio above λ and some at λ. Ranks of more energy for no
    more cost would make the sum larger. With one cost for all it is the best use of the whole budget.
    """
    _require_sound(spectra, costs, energy, share)
    if energy is not None:
        kept = [spectrum.double().cumsum(dim=0) for spectrum in spectra]
        # A share that is kept but for rounding is kept.
        return [1 + int(one[:-1].lt(energy * (1 - 1e-12) * one[-1]).sum()) for one in kept]
    assert share is not None
    left = share * sum(cost * len(spectrum) for spectrum, cost in zip(spectra, costs, strict=True))
    # A budget that is met but for rounding is met.
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
    spectra: Sequence[Tensor], costs: Sequence[float], energy: float | None, share: float | None
) -> None:
    if (energy is None) == (share is None):
        raise ValueError("give either energy or share, the other None")
    for name, value in (("energy", energy), ("share", share)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name} is {value}: it must be above 0 and at most 1")
    if len(costs) != len(spectra):
        raise ValueError(f"there are {len(spectra)} spectra and {len(costs)} costs: give one for each")
    for i, (spectrum, cost) in enumerate(zip(spectra, costs, strict=True)):
        if not cost > 0:
            raise ValueError(f"cost {i} is {cost}: it must be above 0")
        if not len(spectrum) or not bool((spectrum >= 0).all()) or bool((spectrum.diff() > 0).any()):
            raise ValueError(
                f"spectrum {i} is not one: it must have energies, at least 0, in descending order"
            )
        if not bool(torch.isfinite(spectrum).all()):
            raise ValueError(f"spectrum {i} is not finite")
