"""Attention weights of a text: by kind, layer, head and token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.attending.capture import AttentionKind, LayerCall
from triptych.attending.maps import DenseMap, HeadMap, RowKeeper
from triptych.attention import QueriesAndKeys, WeightBlock
from triptych.errors import UsageError


@final
@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The attention of one layer on one text. Weights are computed when they are asked for.

    Attributes:
        number: of the layer in its stack; a layer that runs several times has a number for each.
        call: the layer and its inputs, batch size 1.
    """

    number: int
    call: LayerCall

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.call.layer.num_heads

    @torch.no_grad()
    def queries_and_keys(self) -> QueriesAndKeys:
        """Queries and keys as the layer compares them, batch size 1."""
        return self.call.queries_and_keys()

    @torch.no_grad()
    def weights(
        self, rows: slice = slice(None), heads: Sequence[int] | None = None
    ) -> Float[Tensor, "heads rows keys"]:
        """Attention weights.

        Args:
            rows: the queries, in steps of 1.
            heads: numbers of heads; all if None.

        Raises:
            UsageError: there is no such head.
        """
        return self.queries_and_keys().weights(rows, self._checked(heads))[0]

    @torch.no_grad()
    def blocks(self, heads: Sequence[int] | None = None) -> Iterator[WeightBlock]:
        """All weights, some queries at a time, `[heads, rows, keys]`; see `QueriesAndKeys.blocks`.

        Args:
            heads: numbers of heads; all if None.

        Raises:
            UsageError: there is no such head.
        """
        for block in self.queries_and_keys().blocks(self._checked(heads)):
            yield WeightBlock(block.rows, block.weights[0])

    def maps(self, k: int | None = None, heads: Sequence[int] | None = None) -> tuple[HeadMap, ...]:
        """The weights of every head as a page or a file shows them.

        Args:
            k: keep the k largest weights of every query, and the sum of the others, in memory that does not
                grow with the square of the length; None keeps all.
            heads: numbers of heads; all if None.

        Raises:
            UsageError: there is no such head.
        """
        if k is None:
            return tuple(DenseMap(weights.float().cpu().numpy()) for weights in self.weights(heads=heads))
        compared = self.queries_and_keys()
        num_heads = self.num_heads if heads is None else len(heads)
        keeper = RowKeeper(num_heads, compared.query_len, compared.key_len, k)
        for block in self.blocks(heads):
            keeper.add(block.weights)
        return keeper.maps()

    def _checked(self, heads: Sequence[int] | None) -> Sequence[int] | None:
        for head in heads or ():
            if not 0 <= head < self.num_heads:
                raise UsageError(
                    f"there is no head {head} in layer {self.number}: its heads are 0 to {self.num_heads - 1}"
                )
        return heads


@final
@dataclass(frozen=True, eq=False)
class Stack:
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

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __iter__(self) -> Iterator[Float[Tensor, "heads queries keys"]]:
        return (layer.weights() for layer in self.layers)

    def __getitem__(self, number: int) -> Float[Tensor, "heads queries keys"]:
        """The weights of a layer.

        Raises:
            UsageError: there is no such layer.
        """
        return self.layer(number).weights()

    def layer(self, number: int) -> LayerAttention:
        """A layer, whose weights can be asked for in parts.

        Raises:
            UsageError: there is no such layer.
        """
        if not -len(self.layers) <= number < len(self.layers):
            raise UsageError(f"there is no {self.kind} layer {number}: they are 0 to {len(self.layers) - 1}")
        return self.layers[number]


@final
@dataclass(frozen=True, eq=False)
class Attention:
    """Attention of a model on one text.

    Attributes:
        model: its name: the path, or the id on the Hub.
        ids: the tokens read by the encoder or the decoder; of an encoder-decoder those that its decoder
            produces, the end of sentence last.
        tokens: the same, readable.
        num_generated: how many of them, the last ones, the model produced itself.
        stacks: of an encoder-decoder "encoder", "decoder" and "cross".
        source_ids: the tokens that the encoder of an encoder-decoder read; None for other models.
        source_tokens: the same, readable.
    """

    model: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    num_generated: int
    stacks: tuple[Stack, ...]
    source_ids: tuple[int, ...] | None = None
    source_tokens: tuple[str, ...] | None = None

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention that the model has."""
        return tuple(stack.kind for stack in self.stacks)

    @property
    def weights(self) -> Stack:
        """The weights of every layer; of an encoder-decoder the cross-attention."""
        return self.stacks[-1]

    @property
    def is_generated(self) -> tuple[bool, ...]:
        """Of each token, whether the model produced it."""
        given = len(self.tokens) - self.num_generated
        return tuple(place >= given for place in range(len(self.tokens)))

    def of(self, kind: str) -> Stack:
        """The layers of one kind of attention.

        Raises:
            UsageError: the model has no such attention.
        """
        for stack in self.stacks:
            if stack.kind == kind:
                return stack
        raise UsageError(f"{self.model} has no {kind} attention: its kinds are {', '.join(self.kinds)}")


@final
class BatchWeights:
    """The weights of a batch by layer: `weights[3]` is `[batch, heads, queries, keys]`, 0 at padding."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        """Of the same kind of attention on several texts."""
        self._stacks = tuple(stacks)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._stacks[0])

    def __iter__(self) -> Iterator[Float[Tensor, "batch heads queries keys"]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Float[Tensor, "batch heads queries keys"]:
        """The weights of a layer.

        Raises:
            UsageError: there is no such layer.
        """
        found = [stack[number] for stack in self._stacks]
        rows, columns = (max(weights.shape[side] for weights in found) for side in (1, 2))
        whole = found[0].new_zeros(len(found), found[0].shape[0], rows, columns)
        for place, weights in enumerate(found):
            whole[place, :, : weights.shape[1], : weights.shape[2]] = weights
        return whole


@final
class AttentionBatch:
    """Attention of a model on several texts: `batch[2]` is that of the third."""

    def __init__(self, texts: Sequence[Attention]) -> None:
        """Of one model, at least one text."""
        self.texts = tuple(texts)

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def __iter__(self) -> Iterator[Attention]:
        return iter(self.texts)

    def __getitem__(self, number: int) -> Attention:
        """The attention of one text."""
        return self.texts[number]

    @property
    def tokens(self) -> tuple[tuple[str, ...], ...]:
        """The tokens of every text, without padding."""
        return tuple(text.tokens for text in self.texts)

    @property
    def weights(self) -> BatchWeights:
        """The weights of every layer; of encoder-decoders the cross-attention."""
        return BatchWeights([text.weights for text in self.texts])

    def of(self, kind: str) -> BatchWeights:
        """The layers of one kind of attention.

        Raises:
            UsageError: the model has no such attention.
        """
        return BatchWeights([text.of(kind) for text in self.texts])
