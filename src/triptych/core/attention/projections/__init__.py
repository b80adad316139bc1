"""Parameterisations: the classes of `table`, classes in a user's file, and `AsWritten` for any other weights.

The contract suite tests every class of `PARAMETERISATIONS`.
"""

import dataclasses
import math
from dataclasses import replace

from triptych import user_code
from triptych.core.algebra.weights import SIDES, AttentionWeights
from triptych.core.attention.projections import table
from triptych.core.attention.projections.abstract import Parameterisation
from triptych.core.attention.projections.composed import (
    AsWritten,
    ScaledOutside,
    is_scaled_outside,
)
from triptych.core.attention.projections.module import structural_difference
from triptych.errors import nearest

# If several parameterisations fit the same weights, the first in this order is chosen: `factored` before
# `grouped`.
PARAMETERISATIONS: dict[str, type[Parameterisation]] = {
    cls.name: cls
    for cls in (
        table.Factored,
        table.Bilinear,
        table.Stacked,
        table.Symmetric,
        table.Shared,
        table.KeyValue,
        table.FourMatrix,
        table.Direct,
        table.Grouped,
        table.Differential,
        table.Latent,
        table.Collaborative,
        table.IdentityQuery,
        table.IdentityValue,
        table.IdentityOutput,
        table.IdentityOV,
    )
}

# Reasons against names that sound like a parameterisation.
REFUSED: dict[str, str] = {
    "four_way": "with the 4th matrix as data the output is as wide as the sequence is long, so no W^O of "
    "fixed size can read it: call four_way_attention(Q, K, V, W), or use 'four_matrix', the 4th matrix as "
    "weights"
}


def parameterisation_class(name: str) -> type[Parameterisation]:
    """Return the class of a name: a key of `PARAMETERISATIONS`, or `FILE.py:CLASS`."""
    if user_code.is_in_file(name):
        return user_code.find_class(name, Parameterisation, "projections")
    if name in REFUSED:
        raise ValueError(f"projections = {name!r} is no layer: {REFUSED[name]}")
    if name not in PARAMETERISATIONS:
        near = nearest(name, PARAMETERISATIONS)
        hint = (
            f"did you mean {near!r}?"
            if near
            else "choose one of them, or name FILE.py:CLASS"
        )
        raise ValueError(
            f"projections = {name!r} is not one of {', '.join(PARAMETERISATIONS)}: {hint}"
        )
    return PARAMETERISATIONS[name]


def parameterisation(name: str, **options: int | bool | None) -> Parameterisation:
    """Build a parameterisation by name, as in a recipe.

    Args:
        name: key of `PARAMETERISATIONS`, or `FILE.py:CLASS`.
        options: fields of the class.

    Raises:
        ValueError: the name or an option is unknown (the message lists known names or options), or the name
            is in `REFUSED`.
    """
    cls = parameterisation_class(name)
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{name} has no {option}: its options are {', '.join(known)}"
            )
    return cls(**options)


def fit_parameterisation(
    weights: AttentionWeights,
    *,
    named: bool = False,
    own: Parameterisation | None = None,
) -> tuple[AttentionWeights, Parameterisation]:
    """Return given weights, with maps repeated if necessary, and a parameterisation of their structure.

    `own` is tried first, and `AsWritten` last, unless `named`. Raise ValueError if every parameterisation
    fails.
    """
    if own is not None and not structural_difference(
        own.skeleton(weights.d_model, weights.num_heads), weights
    ):
        return weights, own
    if is_scaled_outside(weights):
        inner = replace(weights, o=weights.o[1:])
        fitted, found = fit_parameterisation(inner, named=named)
        return replace(fitted, o=(weights.o[0], *fitted.o)), ScaledOutside(found)
    # Try the weights unchanged, then with equally many key and value heads, then with a copy for every head.
    reasons: list[str] = []
    groups = math.lcm(weights.num_key_heads, weights.num_value_heads)
    for writing in (
        weights,
        weights.with_even_copies(groups),
        weights.with_even_copies(weights.num_heads),
    ):
        reasons = []
        for name, cls in PARAMETERISATIONS.items():
            candidate = cls.fitting(writing)
            if candidate is None:
                continue
            try:
                skeleton = candidate.skeleton(writing.d_model, writing.num_heads)
                reason = structural_difference(skeleton, writing)
            except ValueError as error:
                reason = str(error)
            if not reason:
                return writing, candidate
            reasons.append(f"; {name}: {reason}")
    if not named:
        try:
            return AsWritten.from_weights(weights)
        except ValueError as error:
            reasons.append(f"; as_written: {error}")
    lengths = ", ".join(f"{side} {len(weights.chain(side))}" for side in SIDES)
    raise ValueError(
        f"no parameterisation writes these weights; maps in a row: {lengths}"
        + "".join(reasons)
    )
