"""The mathematics of a head: its two forms W_QK and W_OV, their measures, and the rewrites.

`AttentionWeights` (`weights.py`) holds the maps of a layer and gives `BilinearForm`s (`forms.py`).
`Semantics` (`semantics.py`) is everything besides the maps that decides what a layer computes; `function.py`
has the plain formula. `rewrites/` changes weights into others, with a `Record` of what is claimed;
`rewrites/legality.py` says what each rewrite needs. Measures are in `measures.py`, `similarity.py` and
`chance.py`. Tensors in, tensors and records out: no files, no models. Start with `forms.py`.
"""

from triptych.core.algebra.forms import BilinearForm

__all__ = ["BilinearForm"]
