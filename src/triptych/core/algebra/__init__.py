"""The mathematics of a head: its two forms W_QK and W_OV, and what rewrites need of a layer.

`AttentionWeights` (`weights.py`) holds the maps of a layer and gives `BilinearForm`s (`forms.py`).
`Semantics` (`semantics.py`) is everything besides the maps that decides what a layer computes; `function.py`
has the plain formula. `legality.py` says as data what a rewrite needs of a layer; `rewritten.py` is what a
rewrite gives back. The rewrites are in `rewriting/functions/`, measures in `seeing/layer_measures.py`,
`seeing/similarity.py` and `seeing/chance.py`. Tensors in, tensors and records out: no files, no models. Start
with `forms.py`.
"""

from triptych.core.algebra.forms import BilinearForm

__all__ = ["BilinearForm"]
