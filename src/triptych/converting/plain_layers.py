"""Attention layers of a language model as formats have them: a map for every side, heads of one size."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from triptych.algebra import rewrites
from triptych.algebra.positions import RotaryEmbedding
from triptych.algebra.rewrites import RewriteRefusedError
from triptych.algebra.weights import AttentionWeights, standard_scale
from triptych.errors import UsageError
from triptych.models.blocks import Block
from triptych.rewriting.models import rewrite

# Makes the error of a format from the part that does not fit.
Refused = Callable[[str], UsageError]


@final
@dataclass(frozen=True)
class HeadSizes:
    """Of every layer's heads in the format.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        width: channels of every head.
    """

    num_heads: int
    num_kv_heads: int
    width: int


def plain_layer(block: Block, number: int, refused: Refused) -> AttentionWeights:
    """The maps of a block with one link a side and a map for each."""
    weights = block.self_attention.weights("causal")
    unfit = weights.semantics.beyond(("scale", "kind", "rotary", "dropout"))
    if weights.norms_within:
        unfit.append("norms between its maps")
    if unfit:
        raise refused(f"the attention of block {number} has {unfit[0]}")
    try:
        weights = rewrite(weights, rewrites.expand).result
        if not weights.k:
            weights = rewrite(weights, rewrites.factor).result
    except RewriteRefusedError as error:
        raise refused(str(error.at(f"block {number}"))) from None
    return weights


def head_sizes(layers: Sequence[AttentionWeights], refused: Refused) -> HeadSizes:
    """Sizes that the heads of all layers fit into."""
    heads = {weights.num_heads for weights in layers}
    if len(heads) > 1:
        raise refused(f"its layers have {' and '.join(map(str, sorted(heads)))} heads")
    groups = (max(weights.num_key_heads, weights.num_value_heads) for weights in layers)
    width = max(weights.multiplied(side).d_out for weights in layers for side in ("q", "v"))
    return HeadSizes(heads.pop(), math.lcm(*groups), width)


def rotary_base(rotary: RotaryEmbedding, refused: Refused) -> float:
    """The base b where channel pair i of n turns by `b^(−i / n)` a position."""
    frequencies = rotary.frequencies.double()
    count = len(frequencies)
    if rotary.start or rotary.factor != 1.0 or rotary.places is not None:
        raise refused("rotary positions of other channels than the first, or with a factor")
    if rotary.long is not None:
        raise refused(f"rotary positions that change in texts of more than {rotary.limit:,} tokens")
    base = float(frequencies[1]) ** -count if count > 1 else 10_000.0
    powers = base ** (-torch.arange(count, dtype=torch.float64) / count)
    if not torch.allclose(frequencies.cpu(), powers, rtol=1e-6, atol=0.0):
        raise refused("rotary positions whose frequencies are scaled")
    return base


@final
@dataclass(frozen=True)
class PaddedMaps:
    """The maps of a layer, heads one below the other, with scores divided by √width.

    Attributes:
        weights: by side, `[out, in]`.
        biases: of queries, keys and values; zeros where there are none.
    """

    weights: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]


def padded_maps(weights: AttentionWeights, sizes: HeadSizes) -> PaddedMaps:
    """The maps of a plain layer in heads of these sizes: narrower ones get channels of zeros."""
    scaled = weights.with_scale(standard_scale(sizes.width))
    maps, biases = dict[str, Tensor](), dict[str, Tensor]()
    for side, heads in (("q", sizes.num_heads), ("k", sizes.num_kv_heads), ("v", sizes.num_kv_heads)):
        link = scaled.multiplied(side).of_heads(heads)  # type: ignore[arg-type]
        missing = sizes.width - link.d_out
        bias = link.weight.new_zeros(heads, link.d_out) if link.bias is None else link.bias
        maps[side] = nn.functional.pad(link.weight, (0, missing)).mT.flatten(0, 1)
        biases[side] = nn.functional.pad(bias, (0, missing)).flatten()
    padded = nn.functional.pad(scaled.W_O, (0, 0, 0, sizes.width - scaled.W_O.shape[1]))
    maps["o"] = padded.flatten(0, 1).T
    return PaddedMaps(maps, biases)
