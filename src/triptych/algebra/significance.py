"""Several tests at once."""

import math
from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected so that the chance of any false finding stays what it is for one test."""
    # Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    tested = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    corrected, highest = list(p_values), 0.0
    for before, (p, place) in enumerate(tested):
        highest = max(highest, min(p * (len(tested) - before), 1.0))
        corrected[place] = highest
    return corrected
