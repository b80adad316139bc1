"""`LanguageModel`: a language model, an encoder, or one half of an encoder-decoder."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from triptych.core.attention.layer import (
    Kept,
    MultiHeadAttention,
)
from triptych.core.attention.layer_cache import DecoderCache
from triptych.core.attention.position_modules import PositionIds
from triptych.core.models.architecture import (
    HeadConfig,
    LanguageModelArchitecture,
    TaskHeadConfig,
)
from triptych.core.models.blocks import (
    Block,
    BlockInputs,
    each_once,
    make_norm,
    sharing_copy,
)
from triptych.core.models.configuration import LanguageModelConfig
from triptych.core.models.embedding import Embeddings
from triptych.core.models.feed_forward import ACTIVATIONS
from triptych.core.models.streams import Streams
from triptych.errors import UsageError


class NoEndTokenError(UsageError):
    """The error for a text without the token that a head reads."""


class LanguageModelOutput(NamedTuple):
    """Logits and hidden states of a forward pass."""

    # one logit per token, or `HeadConfig.outputs` logits; for a model without a head, `hidden`
    logits: Float[Tensor, "batch length vocab"]
    hidden: Float[Tensor, "batch length d_model"]  # stream after the final norm


@final
class LanguageModelHead(nn.Module):
    """The head from the stream to logits: optional map, activation and norm, and the output table."""

    def __init__(
        self, config: HeadConfig, d_model: int, table: nn.Embedding, std: float
    ) -> None:
        """Create the head; a tied output table is the table of the embeddings, an untied table is drawn."""
        super().__init__()
        width = config.width or d_model
        self.config = config
        self.map = (
            nn.Linear(d_model, width, bias=config.map_bias)
            if config.transform
            else None
        )
        self.activation = (
            None if config.activation is None else ACTIVATIONS[config.activation]
        )
        self.norm = make_norm(config.norm, width)
        self.output = nn.Linear(
            width, config.outputs or table.num_embeddings, bias=config.bias
        )
        if config.bias:
            nn.init.zeros_(self.output.bias)
        if config.tied:
            self.output.weight = table.weight
        else:
            nn.init.normal_(self.output.weight, std=std)

    def features(
        self, x: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows width"]:
        """Compute the input of the output table."""
        if self.map is not None:
            x = self.map(x)
        if self.activation is not None:
            x = self.activation(x)
        x = self.norm(x)
        return x if self.config.input_scale == 1.0 else x * self.config.input_scale

    def forward(
        self, x: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows vocab"]:
        """Compute the logits."""
        logits: Tensor = self.output(self.features(x))
        if self.config.scale != 1.0:
            logits = logits * self.config.scale
        cap = self.config.soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


@final
class TaskHead(nn.Module):
    """The head of a task: the maps from pooled rows of the stream to one logit per label."""

    def __init__(self, config: TaskHeadConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        widths = [d_model, *(own.outputs for own in config.maps)]
        self.maps = nn.ModuleList(
            nn.Linear(width, own.outputs, bias=own.bias)
            for width, own in zip(widths, config.maps, strict=False)
        )
        self.norms = nn.ModuleList(
            make_norm(own.norm, own.outputs) for own in config.maps
        )

    def forward(
        self, hidden: Float[Tensor, "length d_model"], ids: Int[Tensor, " length"]
    ) -> Float[Tensor, "*rows labels"]:
        """Compute the logits of a text: `[labels]`, or `[length, labels]` for a head on each token."""
        x = self._pooled(hidden, ids)
        for own, linear, norm in zip(
            self.config.maps, self.maps, self.norms, strict=True
        ):
            x = linear(x)
            x = norm(x if own.activation is None else ACTIVATIONS[own.activation](x))
        return x.mean(dim=0) if self.config.pooling == "late" else x

    def _pooled(self, hidden: Tensor, ids: Tensor) -> Tensor:
        pooling = self.config.pooling
        if pooling in ("each", "late"):
            return hidden
        if pooling == "first":
            return hidden[0]
        if pooling == "mean":
            return hidden.mean(dim=0)
        # As in `transformers`, padding is told by its id, and the first token of padding alone is read.
        token = self.config.token
        if token is None:
            return hidden[-1]
        if pooling in ("last", "next"):
            (read,) = ids.ne(token).nonzero(as_tuple=True)
            row = (int(read[-1]) if len(read) else 0) + (pooling == "next")
            return hidden[min(row, len(hidden) - 1)]
        (read,) = ids.eq(token).nonzero(as_tuple=True)
        if not len(read):
            raise NoEndTokenError(
                f"the head reads the last end token ({token}), and the text has none"
            )
        return hidden[int(read[-1])]


@final
class LanguageModel(nn.Module):
    """Embeddings, blocks and an optional head: a model, or one half of an `EncoderDecoder`.

    Attributes:
        architecture: architecture of the stack.
        recipe_limit: context in tokens by the recipe; None for a half of an `EncoderDecoder`, and for a model
            without a recipe.
        task: head of a task; None without.
        second: head of a task in addition to the head to logits of tokens; None without.
        blocks: modules for all uses of blocks, in order. Uses of a block share parameters, but have separate
            taps, hooks and steering directions.
    """

    def __init__(
        self,
        architecture: LanguageModelArchitecture,
        attention: Iterable[MultiHeadAttention],
        recipe_limit: int | None = None,
        *,
        cross: Iterable[MultiHeadAttention] | None = None,
        embeddings: Embeddings | None = None,
    ) -> None:
        """Build a model with fresh weights around attention layers.

        `attention`, and `cross` for a decoder with cross-attention, contain a layer for each block of the
        architecture. An `EncoderDecoder` passes already drawn `embeddings`.
        """
        super().__init__()
        self.architecture = architecture
        self.recipe_limit = recipe_limit
        d_model = architecture.d_model
        std = 0.02 if embeddings is None else d_model**-0.5
        self.embeddings = embeddings or Embeddings(architecture.embeddings, d_model)
        inputs = architecture.inputs
        blocks = list[Block]()
        self.inputs = (
            None
            if inputs is None
            else BlockInputs(inputs, d_model, len(architecture.blocks))
        )
        self.streams = (
            None
            if architecture.streams is None
            else Streams(architecture.streams, d_model)
        )
        seen = dict[int, MultiHeadAttention]()
        given = (
            each_once(part, seen) for part in (attention, cross) if part is not None
        )
        layers = zip(*given, strict=True)
        # `attention` and `cross` may be generators: a layer is drawn directly before its block.
        for block, (own, *other) in zip(architecture.blocks, layers, strict=True):
            if block.keys is not None and block.keys < len(blocks):
                own.borrow(blocks[block.keys].self_attention)
            blocks.append(Block(block, d_model, own, *other))
        used = set[int]()
        uses = list[Block]()
        for number in architecture.uses:
            uses.append(
                sharing_copy(blocks[number]) if number in used else blocks[number]
            )
            used.add(number)
        self.blocks = nn.ModuleList(uses)
        self.final_norm = make_norm(architecture.final_norm, d_model)
        head = architecture.head
        self.head = (
            None
            if head is None
            else LanguageModelHead(head, d_model, self.embeddings.table, std)
        )
        self.task, self.second = (
            None if config is None else TaskHead(config, d_model)
            for config in (architecture.task, architecture.second)
        )
        self.causal = architecture.kind == "decoder"

    @classmethod
    def of(
        cls,
        config: LanguageModelConfig,
        kind: Literal["decoder", "encoder"],
        vocab_size: int,
    ) -> "LanguageModel":
        """Build a model from the configuration of a recipe, with fresh weights."""
        positions = config.positions.in_attention()
        layers = [
            site.layer(config.d_model, config.num_heads, positions)
            for site in config.sites()
        ]
        model = cls(config.architecture(kind, vocab_size), layers, config.context)
        model.embeddings.table.requires_grad_(not config.embeddings.frozen)
        return model

    @property
    def stacks(self) -> dict[Literal["encoder", "decoder"], "LanguageModel"]:
        """The model itself by its kind, as `EncoderDecoder.stacks`."""
        return {self.architecture.kind: self}

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.embeddings.table.num_embeddings

    @property
    def max_tokens(self) -> int | None:
        """Longest text in tokens, by learned positions; None for no limit."""
        config = self.architecture.embeddings
        return config.num_positions if config.positions == "learned" else None

    @property
    def context(self) -> int | None:
        """Length of the context in tokens, as in training; `max_tokens` without a recipe."""
        return self.max_tokens if self.recipe_limit is None else self.recipe_limit

    @property
    def rotary_limit(self) -> int | None:
        """Longest text in tokens with the rotation of shorter texts (`RotaryEmbedding.limit`), or None."""
        rotary = [
            cast(Block, block).self_attention.semantics.rotary for block in self.blocks
        ]
        return min(
            (of.limit for of in rotary if of is not None and of.limit is not None),
            default=None,
        )

    def new_cache(self) -> DecoderCache:
        """Create an empty cache for `forward`."""
        return DecoderCache(len(self.blocks))

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        positions: PositionIds | None = None,
        types: Int[Tensor, "batch length"] | None = None,
        cache: DecoderCache | None = None,
    ) -> LanguageModelOutput:
        """Compute logits of the next token at every position (decoder), or of the token itself (encoder)."""
        x = self.hidden(ids, mask=mask, positions=positions, types=types, cache=cache)
        return LanguageModelOutput(x if self.head is None else self.head(x), x)

    def hidden(
        self,
        ids: Int[Tensor, "rows length"],
        *,
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        positions: PositionIds | None = None,
        types: Int[Tensor, "rows length"] | None = None,
        cache: DecoderCache | None = None,
        causal: bool | None = None,
        memory: Float[Tensor, "batch src_len d_model"] | None = None,
        memory_mask: Tensor | None = None,
    ) -> Float[Tensor, "rows length d_model"]:
        """Compute the stream after the final norm; arguments as in `forward`.

        `causal` is True for a decoder by default. Cross-attention reads `memory`; `rows` may be a multiple of
        its batch (hypotheses of a sentence, next to each other). If `memory` is None, the cache contains its
        keys and values. A model prepared for decoding (`decoding.fused`) also accepts masks of floats, added
        to the scores.
        """
        # Without given positions, tokens follow the cached tokens.
        start: int | PositionIds = positions or (0 if cache is None else cache.length)
        x = self.embeddings(ids, start, types)
        return self.from_stream(
            x if self.streams is None else self.streams.enter(x),
            mask=mask,
            positions=positions,
            cache=cache,
            causal=causal,
            memory=memory,
            memory_mask=memory_mask,
            given=None if self.inputs is None else self.inputs(ids, x),
        )

    def from_stream(
        self,
        x: Float[Tensor, "rows length *streams d_model"],
        first: int = 0,
        *,
        mask: Tensor | None = None,
        positions: PositionIds | None = None,
        cache: DecoderCache | None = None,
        causal: bool | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        given: Float[Tensor, "rows length blocks width"] | None = None,
    ) -> Float[Tensor, "rows length d_model"]:
        """Compute `hidden` from the stream before block `first`, in order of use.

        `given` are the additional inputs of the architecture's blocks (`BlockInputs`).
        """
        causal = self.causal if causal is None else causal
        # Keys and values of KV sharing, by block, for this call alone.
        lent = dict[int, Kept]()
        uses = self.architecture.uses
        for use in range(first, len(uses)):
            x = self.blocks[use](
                x,
                mask,
                causal=causal,
                memory=memory,
                memory_mask=memory_mask,
                cache=None if cache is None else cache.own[use],
                memory_cache=None if cache is None else cache.memory[use],
                positions=positions,
                lent=lent,
                given=None if given is None else given[:, :, uses[use]],
            )
        return self.final_norm(x if self.streams is None else self.streams.leave(x))  # type: ignore[no-any-return]
