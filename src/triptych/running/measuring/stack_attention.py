"""Attention weights of a text layer by layer, as a reader recorded them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.core.attention import QueriesAndKeys, WeightBlock
from triptych.errors import UsageError
from triptych.running.measuring.weight_maps import HeadWeights, RowKeeper
from triptych.running.opening import AttentionKind, LayerCall, Reader, TextIds


@final
@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The attention of one layer on one text. Weights are computed when they are read."""

    number: int  # of the layer in its stack; a layer that runs several times has a number for each
    call: LayerCall  # the layer and its inputs, batch size 1

    def __repr__(self) -> str:
        return f"LayerAttention {self.call.kind} {self.number}: {self.num_heads} heads; weights(), maps(k)"

    @property
    def num_heads(self) -> int:
        return self.call.layer.num_heads

    @torch.no_grad()
    def queries_and_keys(self) -> QueriesAndKeys:
        """Queries and keys as the layer compares them, batch size 1."""
        return self.call.queries_and_keys()

    @torch.no_grad()
    def weights(
        self, rows: slice = slice(None), heads: Sequence[int] | None = None
    ) -> Float[Tensor, "heads rows keys"]:
        """Attention weights."""
        self.require_heads(heads)
        if self.call.layer.tap is not None:
            return self._changed(heads)[:, rows]
        return self.queries_and_keys().weights(rows, heads)[0]

    def _changed(self, heads: Sequence[int] | None) -> Float[Tensor, "heads queries keys"]:
        """The weights of a layer whose values are changed on the way, which queries and keys do not tell."""
        weights = self.call.steps().weights[0]
        return weights if heads is None else weights[list(heads)]

    @torch.no_grad()
    def blocks(self, heads: Sequence[int] | None = None) -> Iterator[WeightBlock]:
        """All weights, some queries at a time, `[heads, rows, keys]`; see `QueriesAndKeys.blocks`."""
        self.require_heads(heads)
        if self.call.layer.tap is not None:
            yield WeightBlock(slice(0, self.call.x.shape[1]), self._changed(heads))
            return
        for block in self.queries_and_keys().blocks(heads):
            yield WeightBlock(block.rows, block.weights[0])

    def maps(self, k: int | None = None, heads: Sequence[int] | None = None) -> tuple[HeadWeights, ...]:
        """The weights of every head as a page or a file shows them."""
        if k is None:
            return tuple(
                HeadWeights.whole(weights.float().cpu().numpy()) for weights in self.weights(heads=heads)
            )
        compared = self.queries_and_keys()
        num_heads = self.num_heads if heads is None else len(heads)
        keeper = RowKeeper(num_heads, compared.query_len, compared.key_len, k)
        for block in self.blocks(heads):
            keeper.add(block.weights)
        return keeper.maps()

    def require_heads(self, heads: Sequence[int] | None) -> None:
        """The layer has these heads."""
        for head in heads or ():
            if not 0 <= head < self.num_heads:
                raise UsageError(
                    f"there is no head {head} in layer {self.number}: its heads are 0 to {self.num_heads - 1}"
                )


@final
@dataclass(frozen=True, eq=False)
class StackAttention:
    """The layers of one kind of attention, on one text: `stack[3]` is `[heads, queries, keys]` of layer 3.

    Attributes:
        kind: "encoder", "decoder" (self-attention) or "cross" (of target tokens to source tokens).
        queries: the tokens that look, readable.
        keys: the tokens looked at.
        layers: in the order in which they run.
    """

    kind: AttentionKind
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    layers: tuple[LayerAttention, ...]

    def __repr__(self) -> str:
        shape = f"{len(self.queries)} queries, {len(self.keys)} keys"
        return f"StackAttention {self.kind}: {len(self)} layers, {shape}; stack[0] is [heads, queries, keys]"

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Float[Tensor, "heads queries keys"]]:
        return (layer.weights() for layer in self.layers)

    def __getitem__(self, number: int) -> Float[Tensor, "heads queries keys"]:
        """The weights of a layer."""
        return self.layer(number).weights()

    def layer(self, number: int) -> LayerAttention:
        """A layer, whose weights can be read in parts."""
        if not -len(self.layers) <= number < len(self.layers):
            raise UsageError(f"there is no {self.kind} layer {number}: they are 0 to {len(self.layers) - 1}")
        return self.layers[number]


class Part(NamedTuple):
    """Some heads of a layer."""

    stack: StackAttention  # that the layer is of
    layer: LayerAttention  # the layer
    heads: tuple[int, ...]  # their numbers, at least one

    @property
    def num_weights(self) -> int:
        """How many weights these heads have."""
        return len(self.heads) * len(self.stack.queries) * len(self.stack.keys)


def read_stacks(
    reader: Reader, texts: Sequence[TextIds], max_tokens: int | None = None
) -> list[tuple[StackAttention, ...]]:
    """The attention on texts that are token ids already, texts of equal length in one batch."""
    found: dict[int, tuple[StackAttention, ...]] = {}
    for places, recording in reader.record(texts, max_tokens):
        for row, place in enumerate(places):
            stacks = []
            for kind, (queries, keys) in reader.tokens(texts[place]).items():
                calls = [call for call in recording.calls if call.kind == kind]
                own = (call.of_row(row, len(queries), len(keys)) for call in calls)
                layers = tuple(LayerAttention(number, call) for number, call in enumerate(own))
                stacks.append(StackAttention(kind, queries, keys, layers))
            found[place] = tuple(stacks)
    return [found[place] for place in range(len(texts))]


def stack_ids(text: TextIds, kind: AttentionKind) -> tuple[Int[Tensor, " queries"], Int[Tensor, " keys"]]:
    """The tokens at the queries and at the keys of a stack, as ids.

    The decoder of an encoder-decoder reads what it produces one place later; its start token is -1.
    """
    ids = torch.tensor(text.ids)
    if text.source is None:
        return ids, ids
    source = torch.tensor(text.source)
    if kind == "cross":
        return ids, source
    read = source if kind == "encoder" else torch.tensor([-1, *text.ids[:-1]])
    return read, read
