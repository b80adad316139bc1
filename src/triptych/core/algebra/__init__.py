"""The mathematics of a head: its two forms W_QK and W_OV, and the requirements of rewrites.

`AttentionWeights` (`weights.py`) stores the maps of a layer and returns `BilinearForm`s (`forms.py`).
`Semantics` (`semantics.py`) is the computation of a layer besides its maps; `function.py` has the plain
formula. `legality.py` lists the requirements of rewrites as data; `rewritten.py` has the result of a rewrite.
`pictures.py` draws sizes of entries. The rewrites are in `rewriting/functions/`, measures in
`seeing/layer_measures.py`, `seeing/similarity.py` and `seeing/chance.py`. Functions take tensors and return
tensors and records: no files, no models. Start with `forms.py`.
"""

from triptych.core.algebra.forms import BilinearForm

__all__ = ["BilinearForm"]
