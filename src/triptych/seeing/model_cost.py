"""Cost of a model's attention per layer."""

from dataclasses import dataclass, replace
from typing import Any, Literal, final

from triptych.core.algebra.cost import writing_cost
from triptych.literals import check_choices
from triptych.printable import table_html
from triptych.running.opened_source import Opened

Figure = Literal[
    "parameters", "flops_per_token", "flops_per_pair", "cache_bytes_per_token"
]


@final
@dataclass(frozen=True)
class LayerCost:
    """The cost of one attention layer.

    Attributes:
        layer: layer name.
        parameters: number of learned parameters, biases included; 0 for weights shared with an earlier layer.
        flops_per_token: FLOPs of its maps for one token, without pairs of tokens.
        flops_per_pair: FLOPs of one query and one key.
        cache_bytes_per_token: bytes cached per token while decoding; 0 outside decoders.
        shares: earlier layer with the same weights; None for separate weights.
    """

    layer: str
    parameters: int
    flops_per_token: int
    flops_per_pair: int
    cache_bytes_per_token: int
    shares: str | None = None


@final
@dataclass(frozen=True)
class ModelCost:
    """The cost of all attention layers.

    Attributes:
        model: model name.
        layers: cost of each layer.
    """

    model: str
    layers: tuple[LayerCost, ...]

    @check_choices
    def total(self, what: Figure = "parameters") -> int:
        """Return the sum of a figure over layers."""
        return sum(getattr(layer, what) for layer in self.layers)

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per layer."""
        return [dict(layer.__dict__) for layer in self.layers]

    def __repr__(self) -> str:
        return (
            f"ModelCost of {self.model}: attention of {len(self.layers)} layers\n"
            f"  {self.total():,} parameters, {self.total('flops_per_token'):,} FLOPs per token and "
            f"{self.total('flops_per_pair'):,} per pair, "
            f"{self.total('cache_bytes_per_token'):,} bytes of cache per token"
        )

    def _repr_html_(self) -> str:
        figures = (
            "parameters",
            "flops_per_token",
            "flops_per_pair",
            "cache_bytes_per_token",
        )
        rows = [
            (row["layer"], *(f"{row[figure]:,}" for figure in figures))
            for row in self.rows()
        ]
        columns = (
            "layer",
            "parameters",
            "FLOPs per token",
            "FLOPs per pair",
            "bytes of cache",
        )
        return table_html(f"Cost of {self.model}", rows, columns)


def cost_of(opened: Opened) -> ModelCost:
    """Count the cost of each layer; shared weights count once, the work of each layer always."""
    source = opened.attention
    found = []
    for layer, place in zip(opened.layers, source.layers, strict=True):
        read = source.outline(place.site)
        cost = writing_cost(layer.outline)
        if read.borrows is not None:  # its keys and values belong to another layer
            own = writing_cost(replace(layer.outline, k=(), v=()))
            cost = replace(own, pair_flops=cost.pair_flops)
        found.append(
            LayerCost(
                layer.name,
                0 if place.is_shared else cost.parameters,
                cost.token_flops,
                cost.pair_flops,
                cost.cached_numbers * read.cache_bytes,
                layer.shares,
            )
        )
    return ModelCost(opened.name, tuple(found))
