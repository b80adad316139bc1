"""The rewrites that fold norms into the maps that read them."""

from typing import final

from triptych.core.algebra.legality import INPUT_READ_BY_MAPS
from triptych.core.algebra.norm_folding import NAME, NAME_OF_OTHERS, fold_norm
from triptych.core.algebra.rewritten import Rewritten
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite, Rewrite


@final
class FoldNorm(LayerRewrite):
    """Fold the norm's weight and bias into the maps that read it, also of a parallel MLP.

    The weights of norms of latents go into the maps from the latents to the heads.
    """

    name = NAME
    tier = "rounding-exact"
    requires = (INPUT_READ_BY_MAPS,)
    besides = "post-norm, sandwich norms; another reader of the norm cannot take it up; no slot for the bias"
    place = 2
    why_here = "a norm's shift becomes biases of the maps, which would be there again"

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return fold_norm(layer.weights, layer.others)


@final
class FoldOtherNorms(Rewrite):
    """Fold norms that no attention reads: that of the MLP (experts and router), and the last one.

    `rewriting/other_norms.py` does it, tensor by tensor.
    """

    name = NAME_OF_OTHERS
    tier = "rounding-exact"
    besides = (
        "as `fold_norm`; the output map is the embedding, or not in the file; a tensor of which it is not "
        "known whether it reads the norm"
    )
    place = 2
    why_here = (
        "norms are folded together, while all maps that read them are as they were"
    )
