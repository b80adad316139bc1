"""P-values of several tests."""

import math

import pytest

from triptych.algebra.significance import holm


def test_holm_multiplies_by_the_tests_left_and_keeps_the_order() -> None:
    a, b, c, d, e = holm([0.01, 0.04, 0.03, math.nan, 0.9])
    assert (a, c) == pytest.approx((0.04, 0.09))
    assert b == pytest.approx(0.09)  # 0.08 alone, but no less than the one before
    assert e == pytest.approx(0.9)
    assert math.isnan(d)


def test_holm_gives_no_p_value_above_1() -> None:
    assert holm([0.6, 0.7]) == [1.0, 1.0]
