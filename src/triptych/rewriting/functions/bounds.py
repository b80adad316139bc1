"""How far a layer's scores, attention rows and head outputs can move, whatever the input: no data needed.

All hold for inputs no longer than √d, which is what a norm without gain and shift makes. Where a norm with
gain γ and shift β makes them (with post-norm that of the layer before), fold both into the maps first. Of
inputs that no norm makes nothing is said. They are of one layer: composed over a network they say nothing.
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


def score_bound(before: AttentionWeights, after: AttentionWeights) -> Float[Tensor, " num_heads"]:
    """The most that a score of each head can move: `d σ₁(ΔW_QK) · scale`.

    What adds the same number to a row of scores is not counted where the softmax is blind to it: that of
    the key bias. Biases that count make inputs one wider, and the bound is `2d σ₁` of the form with the row
    `b / √d`. Under rotary positions it is the sum of the bounds of the rotary pairs, which hold
    at every distance.
    """
    semantics = before.semantics
    if semantics.rotary is not None and semantics.clip is None and not semantics.qk_norm:
        return _rotary_score_bound(before, after, semantics.rotary)
    CHANNELS_FREE["qk"].require("score_bound", before, about="no bound of the scores is known: ")
    q = _extended(before, after, "q")
    k = _extended(before, after, "k", biased=bool(KEY_BIAS_BLIND.why_not(before)))
    one, other = (BilinearForm(*maps) for maps in zip(q.maps, k.maps, strict=True))
    return q.reach * k.reach * (one - other).spectral_norm()


def output_bound(before: AttentionWeights, after: AttentionWeights) -> Float[Tensor, " num_heads"]:
    """The most that the output of each head can move, if it attends as before: `√d σ₁(ΔW_OV)`.

    A value bias counts as one more row of the form, `b_V / √d` for inputs of length √(2d). The bias of the
    output belongs to no head and is passed over: a value bias that went into it counts as moved.
    """
    CHANNELS_FREE["ov"].require("output_bound", before, about="no bound of the outputs is known: ")
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
    one, other = (rotary_pair_forms(*maps, rotation) for maps in zip(q.maps, k.maps, strict=True))
    moved = (one.pairs - other.pairs).spectral_norm().sum(dim=-1)
    if one.fixed is not None and other.fixed is not None:
        moved = moved + (one.fixed - other.fixed).spectral_norm()
    return q.reach * k.reach * moved


class _Extended(NamedTuple):
    """The maps of one side, before and after."""

    maps: tuple[Tensor, Tensor]  # each, in float64; queries times the scale of the scores
    reach: float  # the longest input that the rows may meet


def _extended(
    before: AttentionWeights, after: AttentionWeights, side: Side, *, biased: bool = True
) -> _Extended:
    """The maps of a side, with the row `b / √d` for one more input of √d if either has a bias that counts."""
    links = [weights.multiplied(side).repeat(weights.num_heads) for weights in (before, after)]
    biased = biased and any(link.bias is not None for link in links)
    d = links[0].d_in
    found = []
    for link, weights in zip(links, (before, after), strict=True):
        maps = link.weight.double()
        if biased:
            row = maps.new_zeros(len(maps), maps.shape[-1]) if link.bias is None else link.bias.double()
            maps = torch.cat([maps, row[:, None, :] / math.sqrt(d)], dim=1)
        found.append(maps * weights.scale if side == "q" else maps)
    return _Extended((found[0], found[1]), math.sqrt(2 * d if biased else d))
