"""A stack: a language model, an encoder, or one half of an encoder-decoder."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from triptych.core.attention import DecoderCache, Kept, MultiHeadAttention, PositionIds
from triptych.core.models.architecture import HeadConfig, LanguageModelArchitecture
from triptych.core.models.blocks import Block, BlockInputs, each_once, make_norm, sharing_copy
from triptych.core.models.configuration import LanguageModelConfig
from triptych.core.models.embedding import Embeddings
from triptych.core.models.feed_forward import ACTIVATIONS
from triptych.core.models.streams import Streams


class LanguageModelOutput(NamedTuple):
    """The result of a forward pass."""

    # or as many as the head has; for a model without head, `hidden`
    logits: Float[Tensor, "batch length vocab"]
    hidden: Float[Tensor, "batch length d_model"]  # after the last norm


@final
class LanguageModelHead(nn.Module):
    """From the stream to logits: a map with activation and norm if there is one, and the output table."""

    def __init__(self, config: HeadConfig, d_model: int, table: nn.Embedding, std: float) -> None:
        """Take the output table from the embeddings where they are tied, or draw one."""
        super().__init__()
        width = config.width or d_model
        self.config = config
        self.map = nn.Linear(d_model, width, bias=config.map_bias) if config.transform else None
        self.activation = None if config.activation is None else ACTIVATIONS[config.activation]
        self.norm = make_norm(config.norm, width)
        self.output = nn.Linear(width, config.outputs or table.num_embeddings, bias=config.bias)
        if config.bias:
            nn.init.zeros_(self.output.bias)
        if config.tied:
            self.output.weight = table.weight
        else:
            nn.init.normal_(self.output.weight, std=std)

    def features(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows width"]:
        """What the output table reads."""
        if self.map is not None:
            x = self.map(x)
        if self.activation is not None:
            x = self.activation(x)
        x = self.norm(x)
        return x if self.config.input_scale == 1.0 else x * self.config.input_scale

    def forward(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        """The logits."""
        logits: Tensor = self.output(self.features(x))
        if self.config.scale != 1.0:
            logits = logits * self.config.scale
        cap = self.config.soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


@final
class LanguageModel(nn.Module):
    """Blocks between embeddings and a head: a model, or one half of an `EncoderDecoder`.

    Attributes:
        architecture: what it is made of.
        config: the recipe's; None for a half, and for a model of another library's checkpoint.
        blocks: a module for every use of a block, in order. Uses of one block have the same parameters, and
            taps, hooks and directions of their own.
    """

    def __init__(
        self,
        architecture: LanguageModelArchitecture,
        attention: Iterable[MultiHeadAttention],
        config: LanguageModelConfig | None = None,
        *,
        cross: Iterable[MultiHeadAttention] | None = None,
        embeddings: Embeddings | None = None,
    ) -> None:
        """Make a model with fresh weights around attention layers.

        `attention`, and `cross` of a decoder that attends to a memory, have a layer for each block of the
        architecture. A half has `embeddings` that are drawn already.
        """
        super().__init__()
        self.architecture = architecture
        self.config = config
        d_model = architecture.d_model
        std = 0.02 if embeddings is None else d_model**-0.5
        self.embeddings = embeddings or Embeddings(architecture.embeddings, d_model)
        inputs = architecture.inputs
        blocks = list[Block]()
        self.inputs = None if inputs is None else BlockInputs(inputs, d_model, len(architecture.blocks))
        self.streams = None if architecture.streams is None else Streams(architecture.streams, d_model)
        seen = dict[int, MultiHeadAttention]()
        given = (each_once(part, seen) for part in (attention, cross) if part is not None)
        layers = zip(*given, strict=True)
        for block, (own, *other) in zip(architecture.blocks, layers, strict=True):
            if block.keys is not None and block.keys < len(blocks):
                own.borrow(blocks[block.keys].self_attention)
            blocks.append(Block(block, d_model, own, *other))
        used = set[int]()
        uses = list[Block]()
        for number in architecture.uses:
            uses.append(sharing_copy(blocks[number]) if number in used else blocks[number])
            used.add(number)
        self.blocks = nn.ModuleList(uses)
        self.final_norm = make_norm(architecture.final_norm, d_model)
        head = architecture.head
        self.head = None if head is None else LanguageModelHead(head, d_model, self.embeddings.table, std)
        self.causal = architecture.kind == "decoder"

    @classmethod
    def of(
        cls, config: LanguageModelConfig, kind: Literal["decoder", "encoder"], vocab_size: int
    ) -> "LanguageModel":
        """A model of a recipe, with fresh weights."""
        positions = config.positions.in_attention()
        layers = [site.layer(config.d_model, config.num_heads, positions) for site in config.sites()]
        model = cls(config.architecture(kind, vocab_size), layers, config)
        model.embeddings.table.requires_grad_(not config.embeddings.frozen)
        return model

    @property
    def stacks(self) -> dict[Literal["encoder", "decoder"], "LanguageModel"]:
        """The model itself, by its kind."""
        return {self.architecture.kind: self}

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.embeddings.table.num_embeddings

    @property
    def max_tokens(self) -> int | None:
        """Longest text that there are positions for; None if there is no limit."""
        config = self.architecture.embeddings
        return config.num_positions if config.positions == "learned" else None

    @property
    def context(self) -> int | None:
        """Tokens that are read at once: as many as in training, or `max_tokens` where no recipe says it."""
        return self.max_tokens if self.config is None else self.config.context

    @property
    def rotary_limit(self) -> int | None:
        """Length up to which texts are rotated alike, whatever their length; None if all texts are."""
        rotary = [cast(Block, block).self_attention.semantics.rotary for block in self.blocks]
        return min((of.limit for of in rotary if of is not None and of.limit is not None), default=None)

    def new_cache(self) -> DecoderCache:
        """An empty cache for `forward`."""
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
        """Logits of the next token at every position; of an encoder, of the token itself."""
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
        """The stream after the last norm; arguments as `forward`'s.

        `causal` is by the model's kind unless it is given. Cross-attention reads `memory`, of which `rows`
        may be a multiple (hypotheses of a sentence, side by side); without, the cache holds what it reads.
        A model made ready for decoding (`decoding.fused`) also takes masks of numbers added to the scores.
        """
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
        """Compute `hidden` from the stream that block `number` reads; `given` has the blocks' inputs."""
        causal = self.causal if causal is None else causal
        lent = dict[int, Kept]()
        uses = self.architecture.uses
        for place in range(first, len(uses)):
            x = self.blocks[place](
                x,
                mask,
                causal=causal,
                memory=memory,
                memory_mask=memory_mask,
                cache=None if cache is None else cache.own[place],
                memory_cache=None if cache is None else cache.memory[place],
                positions=positions,
                lent=lent,
                given=None if given is None else given[:, :, uses[place]],
            )
        return self.final_norm(x if self.streams is None else self.streams.leave(x))  # type: ignore[no-any-return]
