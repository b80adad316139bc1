"""Any chains of maps, held as they are written."""

from dataclasses import dataclass, field, replace
from typing import final

from triptych.algebra.weights import SIDES, AttentionWeights, Side
from triptych.attention.projections.abstract import Maps, Parameterisation
from triptych.attention.projections.maps import FromHeads, HeadMap, LinkMap


@final
@dataclass(frozen=True)
class AsWritten(Parameterisation):
    """Chains of any number of maps, shared or not, fixed or learned, with norms between them."""

    name = "as_written"

    own_maps: dict[str, HeadMap] = field(compare=False)  # by name, the output map `o_proj` last
    chains: dict[Side, tuple[str, ...]] = field(compare=False)  # the names of the maps of each side
    width: int  # of queries and keys

    @classmethod
    def of(cls, weights: AttentionWeights) -> "tuple[AttentionWeights, AsWritten]":
        """The parameterisation of a writing, and the writing with a learned output map for each head."""
        last = weights.o[-1] if weights.o else None
        if last is None or last.diagonal or last.norm is not None:
            raise ValueError("the heads' outputs need a map of their own at the end")
        last = replace(last.of_heads(weights.num_heads), learned=True)
        weights = replace(weights, o=(*weights.o[:-1], last))
        links = list(weights.links())
        names = {id(link): f"map_{i}" for i, link in enumerate(links)}
        names[id(weights.o[-1])] = "o_proj"
        maps: dict[str, HeadMap] = {names[id(link)]: LinkMap.of(link) for link in links}
        last = weights.o[-1]
        maps["o_proj"] = FromHeads(last.d_in, last.d_out, weights.num_heads, weights.o_bias is not None)
        chains = {side: tuple(names[id(link)] for link in weights.chain(side)) for side in SIDES}
        return weights, cls(maps, chains, weights.multiplied("q").d_out if weights.q else weights.d_model)

    def chain(self, side: Side) -> tuple[str, ...]:
        return self.chains[side]

    def sizes(self, d_model: int, num_heads: int) -> tuple[int, Maps]:
        return self.width, self.own_maps
