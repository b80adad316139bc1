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
