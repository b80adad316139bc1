"""Conversion of models between our format and those of other libraries."""

from triptych.converting.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
