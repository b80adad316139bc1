"""Parameterisations outside the table: `ScaledOutside`, with the scale after the softmax, and `AsWritten`."""

from dataclasses import dataclass, field, replace
from typing import Literal, final

import torch

from triptych.core.algebra.semantics import HeadGate
from triptych.core.algebra.weights import SIDES, AttentionWeights, Side, standard_scale
from triptych.core.attention.projections.abstract import Maps, Parameterisation
from triptych.core.attention.projections.maps import (
    ConstantFactor,
    FromHeads,
    HeadMap,
    LinkMap,
)
from triptych.core.attention.projections.module import same_but_rounded

ScalePlace = Literal["inside", "outside"]


@final
@dataclass(frozen=True)
class ScaledOutside(Parameterisation):
    """`softmax(Q Kᵀ) V / √d_k`: a parameterisation `inner`, scaled after the softmax, on the values."""

    o = ("o_scale", "o_proj")

    inner: Parameterisation

    def __post_init__(self) -> None:
        for name in ("name", "no_rotary", "no_qk_norm"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def chain(self, side: Side) -> tuple[str, ...]:
        return (
            self.inner.chain(side)
            if side != "o"
            else ("o_scale", *self.inner.chain("o"))
        )

    def sizes(self, d_model: int, num_heads: int) -> tuple[int, Maps]:
        d_k, maps = self.inner.sizes(d_model, num_heads)
        v = self.inner.skeleton(d_model, num_heads).v
        factor = ConstantFactor(standard_scale(d_k), v[-1].d_out if v else d_model)
        return 1, {"o_scale": factor, **maps}

    def gate(self, d_model: int, num_heads: int) -> HeadGate | None:
        return self.inner.gate(d_model, num_heads)


def is_scaled_outside(weights: AttentionWeights) -> bool:
    """Return True if the first output map divides by √d_k, as in `ScaledOutside`."""
    if len(weights.o) < 2 or weights.o[0].learned or not weights.o[0].diagonal:
        return False
    factor = weights.o[0].weight
    d_k = weights.multiplied("k").d_out if weights.k else weights.d_model
    return factor.shape[0] == 1 and same_but_rounded(
        torch.full_like(factor, standard_scale(d_k)), factor
    )


@final
@dataclass(frozen=True)
class AsWritten(Parameterisation):
    """Chains of any number of maps, shared or not, fixed or learned, with norms between the maps."""

    name = "as_written"

    own_maps: dict[str, HeadMap] = field(
        compare=False
    )  # maps by name; the last is the output map `o_proj`
    chains: dict[Side, tuple[str, ...]] = field(
        compare=False
    )  # names of the maps of each chain
    width: int  # width of queries and keys

    @classmethod
    def from_weights(
        cls, weights: AttentionWeights
    ) -> "tuple[AttentionWeights, AsWritten]":
        """Return weights with a learned output map for each head, and their parameterisation."""
        # A layer has one `nn.Linear` for the outputs of all heads, so the last map must be a matrix per head.
        last = weights.o[-1] if weights.o else None
        if last is None or last.diagonal or last.norm is not None:
            raise ValueError("the heads' outputs need a map of their own at the end")
        last = replace(last.repeat(weights.num_heads), learned=True)
        weights = replace(weights, o=(*weights.o[:-1], last))
        links = list(weights.links())
        names = {id(link): f"map_{i}" for i, link in enumerate(links)}
        names[id(weights.o[-1])] = "o_proj"
        maps: dict[str, HeadMap] = {
            names[id(link)]: LinkMap.from_link(link) for link in links
        }
        last = weights.o[-1]
        maps["o_proj"] = FromHeads(
            last.d_in, last.d_out, weights.num_heads, weights.o_bias is not None
        )
        chains = {
            side: tuple(names[id(link)] for link in weights.chain(side))
            for side in SIDES
        }
        return weights, cls(
            maps,
            chains,
            weights.multiplied("q").d_out if weights.q else weights.d_model,
        )

    def chain(self, side: Side) -> tuple[str, ...]:
        return self.chains[side]

    def sizes(self, d_model: int, num_heads: int) -> tuple[int, Maps]:
        return self.width, self.own_maps
