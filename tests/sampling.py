"""Samples of matrices: what the fast suite runs of cases that `make test-all` runs all of."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Return cases as parameters; all but every `count`-th, from `first` on, are marked slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(number - first, count))
        for number, case in enumerate(cases)
    ]


def marks(number: int, count: int) -> Any:
    return pytest.mark.slow if number % count else ()


def mark_unsampled(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all but one in n cases of every test marked `sampled(n)`.

    Of each n cases that follow each other one is kept, the next one each time. So every value of a
    parameter has its turn, whatever the other parameters of the test are.
    """
    numbers: dict[str, int] = {}
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None:
            continue
        (count,) = sampled.args
        test = item.nodeid.partition("[")[0]
        number = numbers[test] = numbers.get(test, -1) + 1
        if number % count != number // count % count:
            item.add_marker(pytest.mark.slow)
