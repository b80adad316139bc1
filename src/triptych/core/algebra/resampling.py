"""Bootstrap intervals of means over a text, by resampling its documents."""

import torch
from jaxtyping import Float
from torch import Tensor

RESAMPLES = 1000
# Share of the resamples inside an interval.
COVERAGE = 0.95


def ratio_intervals(
    sums: Float[Tensor, "units *figures"], counts: Float[Tensor, "units *counts"]
) -> tuple[Float[Tensor, "*figures"], Float[Tensor, "*figures"]]:
    """Compute 95 % bootstrap intervals of `Σ sums / Σ counts` over units, such as documents.

    Return the lower and the upper ends. Resamples have a fixed seed; those without counts are left out.
    """
    # Source: Efron 1979, doi 10.1214/aos/1176344552.
    counts = counts.double().expand_as(sums)
    units = sums.shape[0]
    shape = sums.shape[1:]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(units, (RESAMPLES, units), generator=generator)
    # Count of each unit in each resample.
    drawn = torch.zeros(RESAMPLES, units, dtype=torch.float64)
    drawn.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
    totals = drawn @ counts.reshape(units, -1)
    ratios = (
        drawn @ sums.double().reshape(units, -1) / totals.where(totals > 0, torch.nan)
    )
    tail = (1 - COVERAGE) / 2
    low, high = ratios.nanquantile(
        torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0
    )
    return low.reshape(shape), high.reshape(shape)
