"""Checks of the parts of a layer, before the layer is built: each raises ValueError with the reason."""

from itertools import chain

from triptych import user_code
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.semantics import AdditiveScores, Scores, Semantics
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention.position_modules import AttentionPositions, RotaryPositions
from triptych.core.attention.projections.abstract import Parameterisation
from triptych.core.attention.steps import STEPS


def scores_class(name: str) -> type[Scores]:
    """Return the class of scores other than products: "additive", or `FILE.py:CLASS`."""
    if user_code.is_in_file(name):
        return user_code.find_class(name, Scores, "scores")
    if name != AdditiveScores.name:
        raise ValueError(
            f"scores = {name!r} is not one of dot, cosine, additive: or name FILE.py:CLASS"
        )
    return AdditiveScores


def scores_name(semantics: Semantics) -> str:
    """Return the name of a layer's scores in recipes: "dot", "cosine" (one gain per head), or a class."""
    if semantics.scores is not None:
        return semantics.scores.name
    weight = None if semantics.q_norm is None else semantics.q_norm.weight
    return (
        "cosine"
        if weight is not None and weight.ndim == 2 and weight.shape[1] == 1
        else "dot"
    )


# Fields of `Semantics` that `MultiHeadAttention` supports.
HELD = frozenset(chain.from_iterable(step.fields for step in STEPS))


def check_can_be_held(weights: AttentionWeights) -> None:
    """Check that `MultiHeadAttention` supports the weights: fields, sizes of the gate, no norm before it."""
    found = weights.semantics.beyond(HELD)
    if found:
        raise ValueError(
            f"the weights are of a layer with {', '.join(found)}, which MultiHeadAttention does not support"
        )
    # `[heads, d_model]`, or `[heads, d_v, d_model]` for a gate per channel
    gate = weights.semantics.gate
    expected = [weights.num_heads, weights.d_model]
    if gate is not None and gate.per_channel:
        expected.insert(1, weights.multiplied("v").d_out)
    if gate is not None and [gate.num_heads, *gate.weight.shape[1:]] != expected:
        raise ValueError(
            f"the gate is {list(gate.weight.shape)}, and the layer's heads and width are {expected}"
        )
    if weights.norm is not None or weights.memory_norm is not None:
        raise ValueError(
            "the weights carry the norm before the layer, which MultiHeadAttention does not support: "
            "keep that norm outside the layer and pass weights.without_norms()"
        )


def check_qk_norm(projections: Parameterisation) -> None:
    """Check that the parameterisation supports QK-norm."""
    if projections.no_qk_norm:
        raise ValueError(
            f"{projections.name} cannot have qk_norm: {projections.no_qk_norm}"
        )


def check_sizes(
    d_model: int,
    num_heads: int,
    projections: Parameterisation,
    positions: AttentionPositions | None,
    scores: str = "dot",
) -> None:
    """Check that a layer of these sizes could be built, and that rotary positions fit its scores."""
    # `skeleton` raises if sizes do not fit; rotary positions have requirements besides.
    skeleton = projections.skeleton(d_model, num_heads)
    if not isinstance(positions, RotaryPositions):
        return
    if projections.no_rotary:
        raise ValueError(
            f"{projections.name} cannot have rotary positions: {projections.no_rotary}"
        )
    own = None if scores in ("dot", "cosine") else scores_class(scores)
    if own is not None and own.no_rotary:
        raise ValueError(
            f"scores = {scores!r} cannot have rotary positions: {own.no_rotary}"
        )
    positions.check(skeleton.k[-1].d_out if skeleton.k else d_model)


def check_rotation(
    projections: Parameterisation, rotary: RotaryEmbedding | None, key_width: int
) -> None:
    """Check that the parameterisation supports rotary positions, and that the rotated channels fit."""
    if rotary is None:
        return
    if projections.no_rotary:
        raise ValueError(
            f"{projections.name} cannot have rotary positions: {projections.no_rotary}"
        )
    if max(rotary.pairs[1]) >= key_width:
        raise ValueError(
            f"{max(rotary.pairs[1]) + 1} channels are rotated, but queries and keys are {key_width} wide: "
            "they must fit"
        )
