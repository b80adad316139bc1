"""Plugin for pytest: the fixture `same_function`.

pytest imports this module whenever it starts, so the package is imported by the fixture.
"""

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def same_function() -> Callable[..., None]:
    """`triptych.testing.assert_same_function`: fails unless two models compute the same function."""
    from triptych.testing import assert_same_function

    return assert_same_function
