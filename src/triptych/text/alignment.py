"""Where two files that should run in parallel begin not to."""

from collections.abc import Sequence

import numpy as np

# Between the mean gap of lines that are translations of each other and that of unrelated lines: on the way
# from the first to the second, measured as a share of the second.
_UNRELATED_SHARE = 0.6


def locate_slip(source: Sequence[str], target: Sequence[str]) -> int:
    """Guess the first line at which the sides are no longer translations of each other.

    Translations have lengths of about one ratio (Gale & Church), so the gap
    g_i = |log s_i/t_i - median| is small up to the slip and, after it, as large as between unrelated lines.
    The slip is where Σ_{j<i} (g_j - threshold) is least: it falls while the lines agree and rises after.

    Source: Gale & Church 1993, aclanthology.org/J93-1004.
    """
    num_lines = min(len(source), len(target))
    if num_lines == 0:
        return 1
    log_source = np.log([1 + len(line) for line in source[:num_lines]])
    log_target = np.log([1 + len(line) for line in target[:num_lines]])
    ratio = np.median(log_source) - np.median(log_target)
    gaps = np.abs(log_source - log_target - ratio)
    unrelated = np.abs(log_source - np.roll(log_target, num_lines // 2) - ratio).mean()
    drift = np.concatenate([[0.0], np.cumsum(gaps - _UNRELATED_SHARE * unrelated)])
    # Among equals the last: where lengths say nothing, the slip is the first line without a partner.
    least = np.flatnonzero(drift == drift.min())[-1]
    return int(least) + 1
