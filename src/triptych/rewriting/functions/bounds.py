"""Data-free bounds on the change of a layer's scores and head outputs.

The bounds apply to inputs of norm at most √d, the output of a norm without gain and shift. Gain γ and shift β
of the norm before the layer (with post-norm, the norm of the previous layer) must first be folded into the
maps. The bounds do not apply to unnormalised inputs, and bounds of layers do not compose over a network.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.legality import CHANNELS_FREE, KEY_BIAS_BLIND
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.weights import AttentionWeights, Side
from triptych.rewriting.functions.moves import rotary_pair_forms


def score_bound(
    before: AttentionWeights, after: AttentionWeights
) -> Float[Tensor, " num_heads"]:
    """Return the largest possible change of a score for each head: `d σ₁(ΔW_QK) · scale`.

    A constant added to a row of scores, such as that of the key bias, does not count where the softmax
    cancels it. Biases that count add an entry to inputs, and the bound is `2d σ₁` of the form with the row
    `b / √d`. For rotary embeddings, the bound is the sum over rotary pairs, valid at every distance.
    """
    semantics = before.semantics
    if (
        semantics.rotary is not None
        and semantics.clip is None
        and not semantics.qk_norm
    ):
        return _rotary_score_bound(before, after, semantics.rotary)
    CHANNELS_FREE["qk"].require(
        "score_bound", before, about="no bound of the scores is known: "
    )
    q = _extended(before, after, "q")
    # A cancelled key bias does not count.
    k = _extended(before, after, "k", biased=bool(KEY_BIAS_BLIND.why_not(before)))
    one, other = (BilinearForm(*maps) for maps in zip(q.maps, k.maps, strict=True))
    return q.reach * k.reach * (one - other).spectral_norm()


def output_bound(
    before: AttentionWeights, after: AttentionWeights
) -> Float[Tensor, " num_heads"]:
    """Return the largest change of each head's output at unchanged attention weights: `√d σ₁(ΔW_OV)`.

    A value bias counts as one more row of the form, `b_V / √d` for inputs of norm √(2d). The output bias does
    not belong to a head and is ignored: a value bias moved into it counts as changed.
    """
    CHANNELS_FREE["ov"].require(
        "output_bound", before, about="no bound of the outputs is known: "
    )
    v = _extended(before, after, "v")
    one, other = (
        BilinearForm(maps, weights.W_O.mT.double())
        for maps, weights in zip(v.maps, (before, after), strict=True)
    )
    return v.reach * (one - other).spectral_norm()


def _rotary_score_bound(
    before: AttentionWeights, after: AttentionWeights, rotation: RotaryEmbedding
) -> Float[Tensor, " num_heads"]:
    q = _extended(before, after, "q")
    k = _extended(before, after, "k")
    one, other = (
        rotary_pair_forms(*maps, rotation) for maps in zip(q.maps, k.maps, strict=True)
    )
    moved = (one.pairs - other.pairs).spectral_norm().sum(dim=-1)
    if one.fixed is not None and other.fixed is not None:
        moved = moved + (one.fixed - other.fixed).spectral_norm()
    return q.reach * k.reach * moved


class _Extended(NamedTuple):
    """Maps of one chain before and after the rewrite."""

    maps: tuple[
        Tensor, Tensor
    ]  # two maps in float64; query maps multiplied by the scale of the scores
    reach: float  # largest norm of an input of the maps


def _extended(
    before: AttentionWeights,
    after: AttentionWeights,
    side: Side,
    *,
    biased: bool = True,
) -> _Extended:
    """Return both maps of a chain, with the row `b / √d` for an input √d if a bias counts."""
    links = [
        weights.multiplied(side).repeat(weights.num_heads)
        for weights in (before, after)
    ]
    biased = biased and any(link.bias is not None for link in links)
    d = links[0].d_in
    found = []
    for link, weights in zip(links, (before, after), strict=True):
        maps = link.weight.double()
        # The constant input √d times the row b / √d gives b; inputs then have norm √(2d).
        if biased:
            row = (
                maps.new_zeros(len(maps), maps.shape[-1])
                if link.bias is None
                else link.bias.double()
            )
            maps = torch.cat([maps, row[:, None, :] / math.sqrt(d)], dim=1)
        found.append(maps * weights.scale if side == "q" else maps)
    return _Extended((found[0], found[1]), math.sqrt(2 * d if biased else d))
