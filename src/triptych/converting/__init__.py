"""Conversion of models between our format and the formats of other libraries.

`convert` (`conversion.py`) takes a source and a target format, and gives a `Conversion`: what was
written, and how far the result is from the model. `target_formats.py` says which model each format can hold;
`hugging_face.py`, `ctranslate2.py`, `onnx.py` and `plain.py` write one each; `output_checks.py` compares the
result with the model. Start with `conversion.py`.
"""

from triptych.converting.conversion import Conversion, convert

__all__ = ["Conversion", "convert"]
