"""A claim of a certificate, and whether it holds."""

import math
import re
from typing import NamedTuple

_MOST_NAMED = 3
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Claim(NamedTuple):
    """A claim: whether it holds (None if it was not checked), and what was found."""

    claim: str
    held: bool | None
    found: str


def listed(claim: str, wrong: list[str], right: str) -> Claim:
    """A claim that holds if a list of errors is empty."""
    said = "; ".join(wrong[:_MOST_NAMED]) + (f"; {len(wrong)} in all" if len(wrong) > _MOST_NAMED else "")
    return Claim(claim, not wrong, said or right)


def stated(claim: str, what: str) -> Claim:
    """A claim that is stated in the certificate and was not checked."""
    return Claim(claim, None, f"stated, not checked: {what}")


def near(one: float | None, other: float | None, relative: float, absolute: float = 0.0) -> bool:
    """Whether two numbers are close, or both are None."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=relative, abs_tol=absolute)


def same_words(one: str, other: str) -> bool:
    """Whether two texts are equal, up to one unit in the last digit of their numbers."""
    if _NUMBER.split(one) != _NUMBER.split(other):
        return False
    return all(
        a == b or abs(float(a) - float(b)) <= 1.01 * max(_last_digit(a), _last_digit(b))
        for a, b in zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    )


def _last_digit(number: str) -> float:
    """What one unit in its last printed digit is worth; 0 for whole numbers, which are counted."""
    mantissa, _, exponent = number.partition("e")
    if "." not in mantissa and not exponent:
        return 0.0
    return float(10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])))
