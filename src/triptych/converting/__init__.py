"""Conversion of models between triptych's format and the formats of other libraries, and their engines.

`convert` (`conversion.py`) writes a model in a target format and returns a `Conversion`: a record of the
written model and of its difference from the original. `hugging_face.py`, `ctranslate2.py`, `onnx.py` and
`web.py` write the formats. `plain.py` rewrites heads as plain matrices, `target_formats.py` maps trained
models to families of `transformers`, and `output_checks.py` compares results with the original.
`engine_verbs.py` translates, generates and evaluates by the engine of a model's options (`engines.py`),
`kept_translators.py` translates again without torch, `teachers.py` distils, and `capabilities.py` lists the
verbs of a model. Start with `conversion.py`.

Interface: `capabilities`, `conversion`, `engine_verbs`, `kept_translators`, `teachers`, `web`.
"""

from typing import TYPE_CHECKING

from triptych.listed_names import finder

if TYPE_CHECKING:
    from triptych.converting.conversion import Conversion as Conversion
    from triptych.converting.conversion import convert as convert

__getattr__ = finder(__name__, __file__)

__all__ = ["Conversion", "convert"]
