"""The layer: projections around the operation."""

from dataclasses import replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from triptych.algebra.positions import ALiBi
from triptych.algebra.semantics import Kind, Semantics
from triptych.algebra.weights import AttentionWeights, Head, standard_scale
from triptych.attention.cache import AttentionCache
from triptych.attention.operation import Explanation, Path, attention, explain_attention
from triptych.attention.positions import AttentionPositions, PositionIds
from triptych.attention.projections import Factored, Parameterisation, Route, parameterisation_of


class LayerOutput(NamedTuple):
    """What the layer gives back.

    Attributes:
        output: `[batch, query_len, d_model]`.
        weights: `[batch, num_heads, query_len, key_len]`; None unless asked for.
    """

    output: Float[Tensor, "batch query_len d_model"]
    weights: Float[Tensor, "batch num_heads query_len key_len"] | None


class _Inputs(NamedTuple):
    """What the operation is called with, and the way the heads' outputs must be read."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    route: Route


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
        positions: AttentionPositions | None = None,
    ) -> None:
        """Make a layer.

        Args:
            d_model: width of input and output.
            num_heads: number of query heads.
            projections: how the heads are written; `Factored()` if None.
            dropout: probability that an attention weight is dropped while training.
            positions: how the layer itself tells positions apart (`RotaryPositions`, `AlibiPositions`);
                None if its input does, or nothing. For self-attention only.

        Raises:
            ValueError: sizes that do not fit, with the numbers, or positions that the
                parameterisation cannot have, with the reason.
        """
        super().__init__()
        self.d_model = d_model
        self.dropout = dropout
        self.parameterisation = projections or Factored()
        if positions is not None:
            check_sizes(d_model, num_heads, self.parameterisation, positions)
        self.projections = self.parameterisation.build(d_model, num_heads)
        self.semantics = Semantics(scale=standard_scale(self.projections.d_k))
        if positions is not None:
            self.semantics = positions.added_to(self.semantics, self._key_width, num_heads)

    @classmethod
    def from_weights(cls, weights: AttentionWeights, dropout: float | None = None) -> "MultiHeadAttention":
        """A layer that holds these weights, in the parameterisation that their structure calls for.

        Args:
            weights: the maps, and what the layer does besides; scores may come to have another scale, which
                the query map takes up.
            dropout: while training; that of the weights if None.

        Raises:
            ValueError: no parameterisation has that structure, the positions do not go with it, or the
                weights carry something that the layer has no place for, such as the norm before it.
        """
        _check_can_be_held(weights)
        dropout = weights.semantics.dropout if dropout is None else dropout
        weights, parameterisation = parameterisation_of(weights)
        with torch.random.fork_rng(devices=[]):  # numbers are drawn only to be overwritten
            layer = cls(weights.d_model, weights.num_heads, parameterisation, dropout)
        layer = layer.to(dtype=weights.dtype, device=weights.device)
        layer.projections.load(weights)
        layer.semantics = replace(weights.semantics, scale=layer.semantics.scale, dropout=0.0)
        rotary = weights.semantics.rotary
        if rotary is not None and parameterisation.no_rotary:
            raise ValueError(
                f"{parameterisation.name} cannot have rotary positions: {parameterisation.no_rotary}"
            )
        if rotary is not None and max(rotary.pairs[1]) >= layer._key_width:
            raise ValueError(
                f"{max(rotary.pairs[1]) + 1} channels are rotated, but queries and keys are "
                f"{layer._key_width} wide: they must fit"
            )
        return layer

    @property
    def _key_width(self) -> int:
        k = self.projections.weights().k
        return k[-1].d_out if k else self.d_model

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.projections.num_heads

    def weights(self, kind: Kind | None = None) -> AttentionWeights:
        """The layer's maps, detached but not copied, and what it does besides.

        Args:
            kind: where queries and keys come from, which only the caller knows; None for "self", or what the
                weights said that the layer was made of.
        """
        found = self.projections.weights().mapped(torch.Tensor.detach)
        dropout = self.dropout if self.training else 0.0
        return replace(
            found, semantics=replace(self.semantics, kind=kind or self.semantics.kind, dropout=dropout)
        )

    @property
    def heads(self) -> tuple[Head, ...]:
        """The two forms of every head: `layer.heads[3].qk.dense()` is W_QK of the fourth."""
        return self.weights().heads

    def forward(
        self,
        x: Float[Tensor, "batch query_len d_model"],
        *,
        memory: Float[Tensor, "batch key_len d_model"] | None = None,
        value_memory: Float[Tensor, "batch key_len d_model"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        causal: bool | None = None,
        cache: AttentionCache | None = None,
        need_weights: bool = False,
        positions: PositionIds | None = None,
        path: Path = "auto",
    ) -> LayerOutput:
        """Attend.

        Args:
            x: where the queries come from.
            memory: where keys (and values) come from; `x` if None.
            value_memory: where values come from, if not where keys do.
            mask: boolean, True = may attend, broadcasts to `[batch, num_heads, query_len, key_len]`.
            causal: a query sees only its own position and earlier ones; if None, where the layer was made of
                weights that say so.
            cache: in self-attention, the tokens before `x`: those of `x` are added to it, and the
                queries see them all. With a `memory`, it is filled at the first call and read, in
                place of the memory, from then on.
            need_weights: also return the weights. Changes nothing else but the speed.
            positions: of the tokens of `x`; after those of the cache if None. Only for layers that have no
                positions of their own, and no use for these.
            path: see `attention`; "reference" also takes the expanded route of a parameterisation
                that has another.

        Raises:
            ValueError: an input of another width than d_model, two memories for a parameterisation that
                makes keys and values at once, or a memory for a layer that tells positions apart.
        """
        self._check_inputs(x, memory, value_memory)
        if positions is not None and (self.semantics.positions != "none" or self.semantics.is_local):
            raise ValueError(
                "given positions are for a model made ready for decoding (triptych.decoding.fused)"
            )
        causal = self.semantics.kind == "causal" if causal is None else causal
        dropout = self.dropout if self.training else 0.0
        q, start, remembered = self._remembered(x, memory, value_memory, cache)
        inputs = self._inputs(q, start, remembered, mask, causal, dropout, path)
        attended = attention(
            inputs.q,
            inputs.k,
            inputs.v,
            mask=inputs.mask,
            bias=inputs.bias,
            causal=causal,
            scale=self.semantics.scale,
            dropout=dropout,
            need_weights=need_weights,
            path=path,
        )
        return LayerOutput(self.projections.output(attended.output, inputs.route), attended.weights)

    def explain(
        self,
        query_len: int,
        key_len: int,
        *,
        batch: int = 1,
        mask: Bool[Tensor, "..."] | None = None,
        causal: bool | None = None,
        need_weights: bool = False,
        path: Path = "auto",
    ) -> tuple[Route, Explanation]:
        """The way this layer would attend, found by the code that attends.

        Args:
            query_len: number of queries; in self-attention, the last of the keys' positions.
            key_len: number of keys, cached ones included.
            batch: number of sequences.
            mask: as in `forward`; likewise all others.
            causal: likewise.
            need_weights: whether the weights are wanted.
            path: "auto", "reference" or "fast".

        Returns:
            The parameterisation's route, and what the operation does.
        """
        causal = self.semantics.kind == "causal" if causal is None else causal
        dropout = self.dropout if self.training else 0.0
        y = self._zeros(batch, key_len)
        q, remembered = (
            self.projections.queries(self._zeros(batch, query_len)),
            self.projections.remember(y, y),
        )
        inputs = self._inputs(q, max(0, key_len - query_len), remembered, mask, causal, dropout, path)
        found = explain_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            mask=inputs.mask,
            bias=inputs.bias,
            causal=causal,
            scale=self.semantics.scale,
            dropout=dropout,
            need_weights=need_weights,
            path=path,
        )
        return inputs.route, found

    def _zeros(self, batch: int, length: int) -> Tensor:
        """An input, which has a gradient if the layer's own numbers do."""
        own = self.projections.o_proj.weight
        shape = batch, length, self.d_model
        return torch.zeros(shape, dtype=own.dtype, device=own.device, requires_grad=own.requires_grad)

    def _check_inputs(self, x: Tensor, memory: Tensor | None, value_memory: Tensor | None) -> None:
        for given in (x, memory, value_memory):
            if given is not None and given.shape[-1] != self.d_model:
                raise ValueError(
                    f"an input is {given.shape[-1]} wide, and the layer's d_model {self.d_model}"
                )
        if memory is None and self.semantics.kind == "cross":
            raise ValueError("the layer is made of the weights of a cross-attention: give it a memory")
        if value_memory is not None and self.projections.no_two_memories:
            raise ValueError(f"value_memory was given, but {self.projections.no_two_memories}: leave it out")
        if memory is not None and (self.semantics.positions != "none" or self.semantics.is_local):
            what = (
                "a window compares"
                if self.semantics.is_local
                else f"{self.semantics.positions} positions compare"
            )
            raise ValueError(
                f"{what} places in one sequence, and memory is another: build cross-attention without them"
            )

    def _remembered(
        self,
        x: Tensor,
        memory: Tensor | None,
        value_memory: Tensor | None,
        cache: AttentionCache | None,
    ) -> tuple[Tensor, int, tuple[Tensor, ...]]:
        """Queries, the position of the first of them, and what is kept of all tokens attended to."""
        if memory is not None and cache is not None and cache.length:
            return self.projections.queries(x), 0, cache.entries
        start = cache.length if cache is not None and memory is None else 0
        if memory is None and value_memory is None:
            q, added = self.projections.of_one_sequence(x)
        else:
            keys_from = x if memory is None else memory
            added = self.projections.remember(keys_from, keys_from if value_memory is None else value_memory)
            q = self.projections.queries(x)
        if self.semantics.rotary is not None and self.projections.caches_keys:
            added = (self.semantics.rotary(added[0], start), *added[1:])
        return q, start, added if cache is None else cache.append(added)

    def _inputs(
        self,
        q: Tensor,
        start: int,
        remembered: tuple[Tensor, ...],
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        path: Path,
    ) -> _Inputs:
        key_len = remembered[0].shape[2]
        route = self.projections.route(q.shape[2], key_len)
        # Under a causal mask the first of more queries than keys see nothing.
        sums_to_one = mask is None and dropout == 0.0 and not (causal and q.shape[2] > key_len)
        if path == "reference" or not (sums_to_one or self.projections.absorbs_biases):
            route = "expanded"
        rotary, bias = self.semantics.rotary, None
        if self.semantics.bias is not None or self.semantics.is_local:
            places = torch.arange(key_len, device=q.device)
            queries = torch.arange(key_len - q.shape[2], key_len, device=q.device)
            if self.semantics.bias is not None:
                bias = self.semantics.bias(q, q, queries, places)
            near = self.semantics.visible(queries, places)
            mask = near if mask is None else mask if near is None else mask & near
        if rotary is not None:
            q = rotary(q, start)
        if route == "absorbed":
            return _Inputs(*self.projections.absorbed(q, remembered), mask, bias, route)
        k, v = self.projections.keys_values(remembered)
        if rotary is not None and not self.projections.caches_keys:
            k = rotary(k)
        return _Inputs(q, k, v, mask, bias, route)


_HELD = frozenset({"scale", "kind", "dropout", "rotary", "bias", "window", "chunk"})


def _check_can_be_held(weights: AttentionWeights) -> None:
    """Refuse what no layer of ours has: without it the function would be another.

    Raises:
        ValueError: there is something of the kind, named.
    """
    semantics = weights.semantics
    found = semantics.beyond(_HELD)
    if semantics.rotary is not None and semantics.rotary.places is not None:
        found.append("rotary positions of a picture")
    if semantics.bias is not None and not isinstance(semantics.bias, ALiBi):
        found.append(f"{semantics.positions} positions")
    if weights.norms_within:
        found.append("a norm between two maps")
    if found:
        raise ValueError(
            f"the weights are of a layer with {', '.join(found)}, which MultiHeadAttention does not support"
        )
    if weights.norm is not None or weights.memory_norm is not None:
        raise ValueError(
            "the weights carry the norm before the layer, which MultiHeadAttention does not support: "
            "keep that norm beside the layer and pass weights.without_norms()"
        )


def check_sizes(
    d_model: int, num_heads: int, projections: Parameterisation, positions: AttentionPositions | None
) -> None:
    """Check that a layer could be built, without building it.

    Raises:
        ValueError: sizes that do not fit, with the numbers, or positions that the parameterisation
            cannot have, with the reason.
    """
    skeleton = projections.skeleton(d_model, num_heads)
    if positions is None:
        return
    if positions.scheme == "rotary" and projections.no_rotary:
        raise ValueError(
            f"{projections.name} cannot have {positions.scheme} positions: {projections.no_rotary}"
        )
    positions.check(skeleton.k[-1].d_out if skeleton.k else d_model)
