"""Samples of matrices: what the fast suite runs of cases that `make test-all` runs all of."""

from collections.abc import Iterable
from zlib import crc32

import pytest


def mark_unsampled(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all but one in n cases of every test marked `sampled(n)`.

    Of each n cases that follow each other one is kept, the next one each time. So every value of a
    parameter has its turn, whatever the other parameters of the test are. Where a test begins depends on its
    name, so that tests of one matrix have different cases.
    """
    numbers: dict[str, int] = {}
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None:
            continue
        (count,) = sampled.args
        test = item.nodeid.partition("[")[0]
        number = numbers[test] = numbers.get(test, -1) + 1
        if (number + crc32(test.encode())) % count != number // count % count:
            item.add_marker(pytest.mark.slow)
