"""What attention layers are given while a model runs.

The model runs as it is, with its own kernels. What is kept is the input of each layer; queries, keys and
weights are computed from it afterwards, for the layers, heads and queries that are asked for.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, final

from jaxtyping import Bool, Float
from torch import Tensor

from triptych.attention import MultiHeadAttention, PositionIds, QueriesAndKeys
from triptych.models.sites import AnyModel, AttentionSite, attention_sites

AttentionKind = Literal["encoder", "decoder", "cross"]


@final
@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of an attention layer.

    Attributes:
        site: the layer and its place in the model.
        x: what queries are made of, after the norm before the layer.
        memory: what keys and values are made of; None in self-attention, where that is `x`.
        mask: True = may attend; see `MultiHeadAttention.forward`, as for the others.
        causal: a query sees only its own position and earlier ones.
        positions: of the tokens; None if they follow each other.
    """

    site: AttentionSite
    x: Float[Tensor, "batch query_len d_model"]
    memory: Float[Tensor, "batch key_len d_memory"] | None
    mask: Bool[Tensor, "..."] | None
    causal: bool
    positions: PositionIds | None

    @property
    def layer(self) -> MultiHeadAttention:
        """The layer."""
        return self.site.layer

    @property
    def kind(self) -> AttentionKind:
        """Which tokens look at which."""
        return self.site.stack

    def queries_and_keys(self) -> QueriesAndKeys:
        """Queries and keys as the layer compares them."""
        return self.layer.queries_and_keys(
            self.x, memory=self.memory, mask=self.mask, causal=self.causal, positions=self.positions
        )

    def of_row(self, row: int, query_len: int, key_len: int) -> "LayerCall":
        """The call for one row of the batch alone, without padding on the right.

        Args:
            row: of the batch.
            query_len: its number of queries.
            key_len: its number of keys.
        """
        one, mask, positions = slice(row, row + 1), self.mask, self.positions
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
            mask = mask[one] if mask.shape[0] > 1 else mask
            mask = mask[..., :query_len, :key_len] if mask.shape[-2] > 1 else mask[..., :key_len]
            mask = None if bool(mask.all()) else mask
        if positions is not None:
            ids = positions.ids[one] if positions.ids.ndim == 2 else positions.ids
            positions = positions._replace(ids=ids[..., :query_len])
        memory = None if self.memory is None else self.memory[one, :key_len]
        return replace(self, x=self.x[one, :query_len], memory=memory, mask=mask, positions=positions)


@contextmanager
def record_calls(model: AnyModel) -> Iterator[list[LayerCall]]:
    """Record the calls of all attention layers of a model, in the order in which they run.

    The outputs of the model stay the same, bit for bit. Calls with a cache are refused: what they compare
    with is not in their input.

    Args:
        model: runs inside the context; its layers are as they were afterwards.

    Raises:
        ValueError: in the run, a layer was called with a cache.
    """
    calls: list[LayerCall] = []

    def keep(
        module: MultiHeadAttention,
        given: tuple[Tensor, ...],
        named: Mapping[str, Any],
        *,
        site: AttentionSite,
    ) -> None:
        if named.get("cache") is not None:
            raise ValueError(f"{site.name} was called with a cache: run the whole text at once")
        causal = named.get("causal")
        calls.append(
            LayerCall(
                site,
                given[0].detach(),
                None if named.get("memory") is None else named["memory"].detach(),
                named.get("mask"),
                module.semantics.kind == "causal" if causal is None else causal,
                named.get("positions"),
            )
        )

    with ExitStack() as stack:
        for site in attention_sites(model):
            hook = site.layer.register_forward_pre_hook(partial(keep, site=site), with_kwargs=True)
            stack.callback(hook.remove)
        yield calls
