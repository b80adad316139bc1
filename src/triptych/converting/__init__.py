"""Conversion of models between triptych's format and the formats of other libraries.

`convert` (`conversion.py`) writes a model in a target format and returns a `Conversion`: a record of the
written model and of its difference from the original. `hugging_face.py`, `ctranslate2.py` and `onnx.py` write
the formats. `plain.py` rewrites heads as plain matrices, `target_formats.py` maps trained models to families
of `transformers`, and `output_checks.py` compares results with the original. Start with `conversion.py`.
"""

from triptych.converting.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
