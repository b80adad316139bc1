"""Our models in the formats of others, and theirs in ours."""

from triptych.converting.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
