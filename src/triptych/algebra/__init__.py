"""The bilinear forms of attention heads, measures of them, and rewrites of their weights."""

from triptych.algebra.forms import BilinearForm

__all__ = ["BilinearForm"]
