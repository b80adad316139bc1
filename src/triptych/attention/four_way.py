"""The 4th matrix as data: a function of four sequences, which cannot be a layer."""

import math

from jaxtyping import Float
from torch import Tensor

FOUR_WAY_IS_NO_LAYER = (
    "with the 4th matrix as data the output is as wide as the sequence is long, so no W^O of fixed size can "
    "read it: call four_way_attention(Q, K, V, W), or use 'four_matrix', the 4th matrix as weights"
)


def four_way_attention(
    Q: Float[Tensor, "*batch query_len d_k"],
    K: Float[Tensor, "*batch key_len d_k"],
    V: Float[Tensor, "*batch key_len d_v"],
    W: Float[Tensor, "*batch w_len d_v"],
) -> Float[Tensor, "*batch query_len w_len"]:
    """`softmax(Q Kᵀ / √d_k) V Wᵀ / √d_k`: what attention reads, scored against a fourth sequence.

    It is symmetric in form (two products of two sequences each) but its result is a matrix of
    scores, one for every pair of a query and a row of W, not a vector of fixed width a token. It
    serves where such scores are wanted (pointing at, or aligning with, another sequence).

    Args:
        Q: queries.
        K: keys.
        V: values.
        W: what the attended values are compared with, W = Y W^W for some sequence Y.

    Raises:
        ValueError: widths or lengths that do not fit, with the numbers.
    """
    if Q.shape[-1] != K.shape[-1]:
        raise ValueError(f"Q has width {Q.shape[-1]} and K {K.shape[-1]}: they must be equal")
    if V.shape[-1] != W.shape[-1]:
        raise ValueError(f"V has width {V.shape[-1]} and W {W.shape[-1]}: they must be equal")
    if K.shape[-2] != V.shape[-2]:
        raise ValueError(f"K has {K.shape[-2]} rows and V {V.shape[-2]}: one of each a token")
    scale = 1 / math.sqrt(Q.shape[-1])
    weights = (Q @ K.mT * scale).softmax(dim=-1)
    return weights @ V @ W.mT * scale
