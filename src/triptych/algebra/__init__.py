"""The forms behind a head's weights, and what can be measured of them without their writing."""

from triptych.algebra.forms import BilinearForm

__all__ = ["BilinearForm"]
