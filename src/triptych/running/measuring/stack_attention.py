"""Attention weights of a text layer by layer, from a reader's recording."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.core.attention import QueriesAndKeys, WeightBlock
from triptych.errors import UsageError
from triptych.running.measuring.weight_maps import HeadWeights, RowKeeper
from triptych.running.opening.layer_calls import (
    AttentionKind,
    LayerCall,
    TextIds,
)
from triptych.running.opening.reader import Reader


@final
@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The attention of one layer on one text. Weights are computed on access."""

    number: int  # layer number within its stack; a layer used several times has a number for every use
    call: LayerCall  # the layer and its inputs, batch size 1

    def __repr__(self) -> str:
        return f"LayerAttention {self.call.kind} {self.number}: {self.num_heads} heads; weights(), maps(k)"

    @property
    def num_heads(self) -> int:
        return self.call.layer.num_heads

    @torch.no_grad()
    def queries_and_keys(self) -> QueriesAndKeys:
        """Compute queries and keys as compared by the layer, batch size 1."""
        return self.call.queries_and_keys()

    @torch.no_grad()
    def weights(
        self, rows: slice = slice(None), heads: Sequence[int] | None = None
    ) -> Float[Tensor, "heads rows keys"]:
        """Compute attention weights of some or all queries and heads."""
        self.require_heads(heads)
        return self.queries_and_keys().weights(rows, heads)[0]

    @torch.no_grad()
    def blocks(self, heads: Sequence[int] | None = None) -> Iterator[WeightBlock]:
        """Yield the weights in blocks of queries, `[heads, rows, keys]`; see `QueriesAndKeys.blocks`."""
        self.require_heads(heads)
        for block in self.queries_and_keys().blocks(heads):
            yield WeightBlock(block.rows, block.weights[0])

    def maps(
        self, k: int | None = None, heads: Sequence[int] | None = None
    ) -> tuple[HeadWeights, ...]:
        """Return the weights of every head for pages and files: all weights, or the `k` largest per query."""
        if k is None:
            return tuple(
                HeadWeights.whole(weights.float().cpu().numpy())
                for weights in self.weights(heads=heads)
            )
        compared = self.queries_and_keys()
        num_heads = self.num_heads if heads is None else len(heads)
        keeper = RowKeeper(num_heads, compared.query_len, compared.key_len, k)
        for block in self.blocks(heads):
            keeper.add(block.weights)
        return keeper.maps()

    def require_heads(self, heads: Sequence[int] | None) -> None:
        """Check that the layer has these heads."""
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
        kind: "encoder", "decoder" (self-attention) or "cross" (target tokens attend to source tokens).
        queries: query tokens in readable form.
        keys: key tokens in readable form.
        layers: attention of the layers, in execution order.
        second_query: number of the first query token in the second text of a pair; None for a single text.
        second_key: the same for key tokens.
    """

    kind: AttentionKind
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    layers: tuple[LayerAttention, ...]
    second_query: int | None = None
    second_key: int | None = None

    def __repr__(self) -> str:
        shape = f"{len(self.queries)} queries, {len(self.keys)} keys"
        return f"StackAttention {self.kind}: {len(self)} layers, {shape}; stack[0] is [heads, queries, keys]"

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Float[Tensor, "heads queries keys"]]:
        return (layer.weights() for layer in self.layers)

    def __getitem__(self, number: int) -> Float[Tensor, "heads queries keys"]:
        """Compute the weights of a layer."""
        return self.layer(number).weights()

    def layer(self, number: int) -> LayerAttention:
        """Return the attention of a layer, to compute its weights in parts."""
        if not -len(self.layers) <= number < len(self.layers):
            raise UsageError(
                f"there is no {self.kind} layer {number}: they are 0 to {len(self.layers) - 1}"
            )
        return self.layers[number]


class Part(NamedTuple):
    """Some heads of a layer."""

    stack: StackAttention  # stack of the layer
    layer: LayerAttention  # attention of the layer
    heads: tuple[int, ...]  # head numbers; not empty

    @property
    def num_weights(self) -> int:
        """The number of weights of these heads."""
        return len(self.heads) * len(self.stack.queries) * len(self.stack.keys)


def read_stacks(
    reader: Reader, texts: Sequence[TextIds], max_tokens: int | None = None
) -> list[tuple[StackAttention, ...]]:
    """Read the attention on texts, batched by similar length; return the stacks of every text."""
    # Batches arrive in order of length, with the index of every text.
    found: dict[int, tuple[StackAttention, ...]] = {}
    for places, recording in reader.record(texts, max_tokens):
        for row, place in enumerate(places):
            stacks = []
            for kind, (queries, keys) in reader.tokens(texts[place]).items():
                calls = [call for call in recording.calls if call.kind == kind]
                own = (call.of_row(row, len(queries), len(keys)) for call in calls)
                layers = tuple(
                    LayerAttention(number, call) for number, call in enumerate(own)
                )
                second = _second_tokens(texts[place], kind)
                stacks.append(StackAttention(kind, queries, keys, layers, *second))
            found[place] = tuple(stacks)
    return [found[place] for place in range(len(texts))]


def _second_tokens(text: TextIds, kind: AttentionKind) -> tuple[int | None, int | None]:
    """Return the first query and the first key of a stack in a pair's second text; None for a single text."""
    second = text.second
    # The input of an encoder-decoder's decoder begins with a start token.
    is_shifted = text.source is not None and kind == "decoder"
    return second, second + 1 if second is not None and is_shifted else second


def stack_ids(
    text: TextIds, kind: AttentionKind
) -> tuple[Int[Tensor, " queries"], Int[Tensor, " keys"]]:
    """Return the token ids of the queries and the keys of a stack.

    The input of an encoder-decoder's decoder is its output shifted by one position; its start token is -1.
    """
    ids = torch.tensor(text.ids)
    if text.source is None:
        return ids, ids
    source = torch.tensor(text.source)
    if kind == "cross":
        return ids, source
    read = source if kind == "encoder" else torch.tensor([-1, *text.ids[:-1]])
    return read, read
