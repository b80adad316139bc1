"""The layer: projections around the operation."""

import math
from typing import NamedTuple, final

from jaxtyping import Bool, Float
from torch import Tensor, nn

from triptych.attention.cache import LayerCache
from triptych.attention.operation import Path, attention
from triptych.attention.projections import Factored, Parameterisation


class LayerOutput(NamedTuple):
    """What the layer gives back.

    Attributes:
        output: `[batch, query_len, d_model]`.
        weights: `[batch, num_heads, query_len, key_len]`; None unless asked for.
    """

    output: Float[Tensor, "batch query_len d_model"]
    weights: Float[Tensor, "batch num_heads query_len key_len"] | None


@final
class MultiHeadAttention(nn.Module):
    """Multi-head attention over any parameterisation of its heads.

    Queries always come from `x`. Keys and values come from `x` too (self-attention), from `memory`
    (cross-attention), or from two different sequences of one length (`memory` and `value_memory`).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        projections: Parameterisation | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Make a layer.

        Args:
            d_model: width of input and output.
            num_heads: number of query heads.
            projections: how the heads are written; `Factored()` if None.
            dropout: probability that an attention weight is dropped while training.

        Raises:
            ValueError: sizes that do not fit, with the numbers.
        """
        super().__init__()
        self.d_model = d_model
        self.dropout = dropout
        self.projections = (projections or Factored()).build(d_model, num_heads)

    def forward(
        self,
        x: Float[Tensor, "batch query_len d_model"],
        *,
        memory: Float[Tensor, "batch key_len d_model"] | None = None,
        value_memory: Float[Tensor, "batch key_len d_model"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        causal: bool = False,
        cache: LayerCache | None = None,
        need_weights: bool = False,
        path: Path = "auto",
    ) -> LayerOutput:
        """Attend.

        Args:
            x: where the queries come from.
            memory: where keys (and values) come from; `x` if None.
            value_memory: where values come from, if not where keys do.
            mask: boolean, True = may attend, broadcasts to `[batch, num_heads, query_len, key_len]`.
            causal: a query sees only its own position and earlier ones.
            cache: in self-attention, the tokens before `x`: those of `x` are added to it, and the
                queries see them all. With a `memory`, it is filled at the first call and read, in
                place of the memory, from then on.
            need_weights: also return the weights. Changes nothing else but the speed.
            path: see `attention`.
        """
        keys_from = x if memory is None else memory
        values_from = keys_from if value_memory is None else value_memory
        if cache is None:
            remembered = self.projections.remember(keys_from, values_from)
        elif memory is not None and cache.length:
            remembered = cache.entries
        else:
            remembered = cache.append(self.projections.remember(keys_from, values_from))
        k, v = self.projections.keys_values(remembered)
        attended = attention(
            self.projections.queries(x),
            k,
            v,
            mask=mask,
            causal=causal,
            scale=1 / math.sqrt(self.projections.d_k),
            dropout=self.dropout if self.training else 0.0,
            need_weights=need_weights,
            path=path,
        )
        return LayerOutput(self.projections.output(attended.output), attended.weights)
