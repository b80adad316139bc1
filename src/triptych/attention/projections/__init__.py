"""The ways to write a head, one file each.

To add one: write its file, and name its class here. The contract suite tests whatever is named here.
"""

import dataclasses
import difflib
import math

from triptych.algebra.cost import Route
from triptych.algebra.weights import SIDES, AttentionWeights
from triptych.attention.four_way import FOUR_WAY_IS_NO_LAYER
from triptych.attention.projections.abstract import (
    Parameterisation,
    Projections,
    structural_difference,
)
from triptych.attention.projections.as_written import AsWritten
from triptych.attention.projections.bilinear import Bilinear
from triptych.attention.projections.collaborative import Collaborative
from triptych.attention.projections.direct import Direct
from triptych.attention.projections.factored import Factored
from triptych.attention.projections.four_matrix import FourMatrix
from triptych.attention.projections.grouped import Grouped
from triptych.attention.projections.identity import (
    IdentityOutput,
    IdentityOV,
    IdentityQuery,
    IdentityValue,
)
from triptych.attention.projections.key_value import KeyValue
from triptych.attention.projections.latent import Latent
from triptych.attention.projections.shared import Shared
from triptych.attention.projections.stacked import Stacked
from triptych.attention.projections.symmetric import Symmetric

# Where several could hold the same weights, the first named does: `factored` before `grouped`.
PARAMETERISATIONS: dict[str, type[Parameterisation]] = {
    cls.name: cls
    for cls in (
        Factored,
        Bilinear,
        Stacked,
        Symmetric,
        Shared,
        KeyValue,
        FourMatrix,
        Direct,
        Grouped,
        Latent,
        Collaborative,
        IdentityQuery,
        IdentityValue,
        IdentityOutput,
        IdentityOV,
    )
}

# What could be asked for by name but is no way to write a layer, and why.
REFUSED: dict[str, str] = {"four_way": FOUR_WAY_IS_NO_LAYER}

__all__ = [
    "PARAMETERISATIONS",
    "AsWritten",
    "Bilinear",
    "Collaborative",
    "Direct",
    "Factored",
    "FourMatrix",
    "Grouped",
    "IdentityOV",
    "IdentityOutput",
    "IdentityQuery",
    "IdentityValue",
    "KeyValue",
    "Latent",
    "Parameterisation",
    "Projections",
    "Route",
    "Shared",
    "Stacked",
    "Symmetric",
    "parameterisation",
    "parameterisation_of",
]


def parameterisation(name: str, **options: int | bool | None) -> Parameterisation:
    """A parameterisation by name, as in a recipe.

    Args:
        name: one of `PARAMETERISATIONS`.
        options: fields of its class.

    Raises:
        ValueError: a name or an option there is not, with those there are; or a name that is no layer,
            with the reason.
    """
    if name in REFUSED:
        raise ValueError(f"projections = {name!r} is no layer: {REFUSED[name]}")
    if name not in PARAMETERISATIONS:
        near = difflib.get_close_matches(name, PARAMETERISATIONS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ValueError(f"projections = {name!r} is not one of {', '.join(PARAMETERISATIONS)}: {hint}")
    cls = PARAMETERISATIONS[name]
    known = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in known:
            raise ValueError(f"{name} has no {option}: its options are {', '.join(known)}")
    return cls(**options)


def parameterisation_of(
    weights: AttentionWeights, *, named: bool = False
) -> tuple[AttentionWeights, Parameterisation]:
    """The parameterisation whose structure a writing has, and the writing in just that structure.

    Maps that several heads share are repeated where that is what it takes. What no other can hold is held as
    it is written, by `AsWritten`.
    """
    reasons: list[str] = []
    groups = math.lcm(weights.num_key_heads, weights.num_value_heads)
    for writing in (weights, weights.evened(groups), weights.evened(weights.num_heads)):
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
            return AsWritten.of(weights)
        except ValueError as error:
            reasons.append(f"; as_written: {error}")
    lengths = ", ".join(f"{side} {len(weights.chain(side))}" for side in SIDES)
    raise ValueError(
        f"no parameterisation writes these weights, with so many maps in a row: {lengths}" + "".join(reasons)
    )
