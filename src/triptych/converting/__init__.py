"""Our models in the formats of others, and theirs in ours."""

from triptych.converting.conversion import Conversion, convert_from_hf, convert_to

__all__ = ["Conversion", "convert_from_hf", "convert_to"]
