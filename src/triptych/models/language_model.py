"""Models of one stack: decoder-only language models and encoder-only ones, over the blocks of `blocks`."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from triptych.attention import DecoderCache, Kept, LearnedPositions, MultiHeadAttention, PositionIds
from triptych.models.architecture import EmbeddingsConfig, HeadConfig, LanguageModelArchitecture
from triptych.models.blocks import Block, BlockInputs, make_norm
from triptych.models.configuration import LanguageModelConfig
from triptych.models.embedding import embed, make_positions
from triptych.models.feed_forward import ACTIVATIONS, Dropout


class LanguageModelOutput(NamedTuple):
    """The result of a forward pass."""

    # or as many as the head has; for a model without head, `hidden`
    logits: Float[Tensor, "batch length vocab"]
    hidden: Float[Tensor, "batch length d_model"]  # after the last norm


@final
class Embeddings(nn.Module):
    """From token ids to the stream: the table, positions, segments, a norm."""

    def __init__(self, config: EmbeddingsConfig, d_model: int) -> None:
        super().__init__()
        width = config.width or d_model
        self.config = config
        self.table = nn.Embedding(config.vocab_size, width)
        nn.init.normal_(self.table.weight, std=0.02)
        self.positions = make_positions(config, d_model if config.map_first else width)
        if isinstance(self.positions, LearnedPositions):
            nn.init.normal_(self.positions.weight, std=0.02)
        self.types = nn.Embedding(config.num_types, width) if config.num_types else None
        self.norm = make_norm(config.norm, width)
        self.map = None if config.width is None else nn.Linear(width, d_model, bias=config.map_bias)
        self.dropout = Dropout(config.dropout)
        self.stream_dtype: torch.dtype | None = None  # of the blocks, where it is not the tables' dtype

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        start: int | PositionIds = 0,
        types: Int[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Embed tokens whose positions begin at `start`, or are given."""
        segments = None
        if self.types is not None:
            segments = self.types(torch.zeros_like(ids) if types is None else types)
        x = embed(
            self.config,
            ids,
            start,
            table=self._mapped if self.config.map_first else self.table,
            positions=self.positions,
            norm=self.norm,
            segments=segments,
        )
        if self.stream_dtype is not None:
            x = x.to(self.stream_dtype)
        x = self.dropout(x) if self.training else x
        return x if self.map is None or self.config.map_first else self.map(x)

    def _mapped(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length d_model"]:
        """Rows of the table behind the map."""
        rows: Tensor = self.table(ids)
        if self.stream_dtype is not None:
            rows = rows.to(self.stream_dtype)
        assert self.map is not None
        mapped: Tensor = self.map(rows)
        return mapped


@final
class LanguageModelHead(nn.Module):
    """From the stream to logits: a map with activation and norm if there is one, and the output table."""

    def __init__(self, config: HeadConfig, d_model: int, table: nn.Embedding) -> None:
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
            nn.init.normal_(self.output.weight, std=0.02)

    def features(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows width"]:
        """What the output table reads."""
        if self.map is not None:
            x = self.map(x)
        if self.activation is not None:
            x = self.activation(x)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        """The logits."""
        logits: Tensor = self.output(self.features(x))
        if self.config.scale != 1.0:
            logits = logits * self.config.scale
        cap = self.config.soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


@final
class LanguageModel(nn.Module):
    """A stack of blocks between embeddings and a head."""

    def __init__(
        self,
        architecture: LanguageModelArchitecture,
        attention: Iterable[MultiHeadAttention],
        config: LanguageModelConfig | None = None,
    ) -> None:
        """Make a model with fresh weights around attention layers."""
        super().__init__()
        self.architecture, self.config = architecture, config
        d_model = architecture.d_model
        self.embeddings = Embeddings(architecture.embeddings, d_model)
        layers, inputs = [*attention], architecture.inputs
        for block, layer in zip(architecture.blocks, layers, strict=True):
            if block.keys is not None and layer is not layers[block.keys]:
                layer.borrow(layers[block.keys])
        self.inputs = None if inputs is None else BlockInputs(inputs, d_model, len(layers))
        self.blocks = nn.ModuleList(map(Block, architecture.blocks, [d_model] * len(layers), layers))
        self.final_norm = make_norm(architecture.final_norm, d_model)
        head = architecture.head
        self.head = None if head is None else LanguageModelHead(head, d_model, self.embeddings.table)
        self.causal = architecture.kind == "decoder"
        self._order = architecture.order or tuple(range(len(architecture.blocks)))

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
        return DecoderCache(len(self._order))

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        positions: PositionIds | None = None,
        types: Int[Tensor, "batch length"] | None = None,
        cache: DecoderCache | None = None,
    ) -> LanguageModelOutput:
        """Logits of the next token at every position, or of an encoder those of the token itself."""
        x = self.hidden(ids, mask=mask, positions=positions, types=types, cache=cache)
        return LanguageModelOutput(x if self.head is None else self.head(x), x)

    def hidden(
        self,
        ids: Int[Tensor, "batch length"],
        *,
        mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        positions: PositionIds | None = None,
        types: Int[Tensor, "batch length"] | None = None,
        cache: DecoderCache | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """The stream after the last norm; arguments as those of `forward`.

        A model made ready for decoding (`decoding.fused`) also takes a mask of numbers added to the scores.
        """
        start: int | PositionIds = positions or (0 if cache is None else cache.length)
        x = self.embeddings(ids, start, types)
        given = None if self.inputs is None else self.inputs(ids, x)
        lent: dict[int, Kept] = {}
        for place, number in enumerate(self._order):
            x = self.blocks[number](
                x,
                mask,
                causal=self.causal,
                cache=None if cache is None else cache.own[place],
                positions=positions,
                lent=lent,
                given=None if given is None else given[:, :, number],
            )
        return self.final_norm(x)  # type: ignore[no-any-return]
