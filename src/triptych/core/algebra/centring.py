"""Directions removed by a LayerNorm, and their removal from the maps around it.

A LayerNorm subtracts the mean of its input, so its output γ ∘ n + β has Σ n = 0: it is constant along 1/γ.
A component of a reading map in this direction adds only a constant to its output (0 if β is 0), and training
does not stop its growth. The same is true of the mean of W_O's output if only LayerNorms read the residual
stream. Measures of the maps would depend on these components. An RMSNorm does not remove a direction.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.weights import AttentionWeights, Chain, Link, Norm


def removed_directions(norm: Norm) -> Float[Tensor, "d_model count"] | None:
    """Return orthonormal directions along which the output of a norm is constant, or None.

    This is the direction 1/γ. If the gain γ has zeros, these are the channels of the zeros instead.
    """
    if not norm.centred:
        return None
    gain = norm.offset + norm.weight.double()
    zeros = gain == 0
    if bool(zeros.any()):
        return torch.eye(len(gain), dtype=torch.float64, device=gain.device)[:, zeros]
    direction = gain.abs().min() / gain
    unit: Tensor = direction / torch.linalg.vector_norm(direction)
    return unit[:, None]


def centred(
    weights: AttentionWeights,
    norm: Norm | None,
    memory_norm: Norm | None,
    *,
    keys: bool = True,
) -> AttentionWeights:
    """Project the null directions of adjacent LayerNorms out of the maps, in at least float32.

    Queries, keys and values read the output of `norm`; in cross-attention, keys and values read the
    output of `memory_norm`. If `keys` is False, keys and values are computed from another layer's input, and
    their maps stay unchanged. The mean of W_O's output is removed if `norm` is a LayerNorm, not a sandwich.
    """
    of_memory = memory_norm if weights.semantics.kind == "cross" else norm
    read = {
        "q": norm,
        "k": of_memory if keys else None,
        "v": of_memory if keys else None,
    }
    # Keyed by map and norm, so that shared maps stay shared.
    found: dict[tuple[Link, Norm], Link] = {}
    chains: dict[tuple[Chain, Norm], Chain] = {}
    changed: dict[str, Chain] = {}
    for side, own in read.items():
        chain = weights.chain(side)  # type: ignore[arg-type]
        if own is None or not chain or (directions := removed_directions(own)) is None:
            continue
        first = chain[0]
        if (first, own) not in found:
            found[first, own] = replace(
                first, weight=_project_out(first.weight, directions)
            )
        changed[side] = chains.setdefault((chain, own), (found[first, own], *chain[1:]))
    if (
        norm is not None
        and norm.centred
        and weights.norm_place != "sandwich"
        and weights.o
    ):
        *before, last = weights.o
        mean = last.weight.new_full(
            (last.d_out, 1), last.d_out**-0.5, dtype=torch.float64
        )
        changed["o"] = (
            *before,
            replace(last, weight=_project_out(last.weight.mT, mean).mT),
        )
    return replace(weights, **changed) if changed else weights  # type: ignore[arg-type]


def _project_out(
    weight: Float[Tensor, "copies d_in d_out"], directions: Float[Tensor, "d_in count"]
) -> Float[Tensor, "copies d_in d_out"]:
    wide = weight.double()
    left: Tensor = wide - directions @ (directions.mT @ wide)
    return left.to(torch.promote_types(weight.dtype, torch.float32))
