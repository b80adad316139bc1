"""The one table of tolerances, and the comparison that reads it."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["exact", "output", "gradient"]


class Tolerance(NamedTuple):
    """How far two numbers may be apart.

    Attributes:
        relative: to the number itself and to the largest of its tensor.
        absolute: for gradients that are zero but for rounding, as that of the key bias.
    """

    relative: float
    absolute: float


# Products of a few hundred terms, two ways to sum them. A gradient passes a product more than once.
TOLERANCES: dict[tuple[Kind, torch.dtype], Tolerance] = {
    ("output", torch.float64): Tolerance(1e-12, 1e-15),
    ("output", torch.float32): Tolerance(5e-6, 1e-7),
    ("output", torch.float16): Tolerance(4e-3, 1e-4),
    ("output", torch.bfloat16): Tolerance(3e-2, 1e-3),
    ("gradient", torch.float64): Tolerance(1e-12, 1e-13),
    ("gradient", torch.float32): Tolerance(1e-5, 1e-6),
    ("gradient", torch.float16): Tolerance(1e-2, 1e-3),
    ("gradient", torch.bfloat16): Tolerance(6e-2, 1e-2),
}


def assert_same(actual: Tensor, expected: Tensor, *, kind: Kind) -> None:
    """Same shape, dtype and numbers: bit for bit, or within the table's tolerance for the dtype."""
    if kind == "exact":
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        return
    tolerance = TOLERANCES[kind, expected.dtype]
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance.relative,
        atol=max(tolerance.absolute, tolerance.relative * largest),
    )
