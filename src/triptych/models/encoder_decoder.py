"""The Transformer of the paper."""

import math
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from triptych.attention import (
    DecoderCache,
    LearnedPositions,
    NoPositions,
    PositionIds,
    SinusoidalPositions,
    padding_mask,
)
from triptych.models.blocks import Block, NewTokens
from triptych.models.configuration import ModelConfig
from triptych.models.dropout import Dropout


class AttentionMaps(NamedTuple):
    """The weights of every layer; one tensor `[batch, num_heads, query_len, key_len]` a layer."""

    encoder: tuple[Tensor, ...]
    decoder: tuple[Tensor, ...]
    cross: tuple[Tensor, ...]


@final
class EncoderDecoder(nn.Module):
    """Encoder, decoder, embeddings and output, as sections 3.1 to 3.5 of the paper.

    Source: Vaswani et al. 2017, arXiv 1706.03762.
    """

    def __init__(
        self, config: ModelConfig, src_vocab_size: int, tgt_vocab_size: int, pad_id: int = 0
    ) -> None:
        """Make a model with fresh weights.

        Args:
            config: the architecture.
            src_vocab_size: rows of the source embedding.
            tgt_vocab_size: rows of the target embedding and of the output.
            pad_id: the token that attention must not see.

        Raises:
            ValueError: one table for all asked of vocabularies that differ.
        """
        super().__init__()
        if config.tie_embeddings == "all" and src_vocab_size != tgt_vocab_size:
            raise ValueError(
                f"tie_embeddings = 'all' needs one vocabulary, not {src_vocab_size} source and "
                f"{tgt_vocab_size} target tokens: make the tokenizer joint or tie 'target' only"
            )
        self.config = config
        self.pad_id = pad_id
        self.tgt_embedding = _embedding(tgt_vocab_size, config.d_model)
        self.src_embedding = (
            self.tgt_embedding
            if config.tie_embeddings == "all"
            else _embedding(src_vocab_size, config.d_model)
        )
        self.src_positions = _positions(config)
        self.tgt_positions = _positions(config)
        self.embedding_dropout = Dropout(config.dropout)
        self.embedding_scale = math.sqrt(config.d_model)
        self.stream_dtype: torch.dtype | None = None  # of the blocks, where it is not the tables' dtype
        own, d_model = config.positions.in_attention(), config.d_model
        self.encoder = nn.ModuleList(
            Block(config.block(cross=False), d_model, site.layer(d_model, config.num_heads, own))
            for site in config.encoder_sites()
        )
        self.decoder = nn.ModuleList(
            Block(
                config.block(cross=True),
                d_model,
                site.layer(d_model, config.num_heads, own),
                cross.layer(d_model, config.num_heads),
            )
            for site, cross in zip(config.decoder_sites(), config.cross_sites(), strict=True)
        )
        # Pre-norm leaves the stream itself unnormalised, so each stack ends with a norm of its own.
        final_norm = config.norm == "pre"
        self.encoder_norm = nn.LayerNorm(config.d_model) if final_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(config.d_model) if final_norm else nn.Identity()
        self.output = nn.Linear(config.d_model, tgt_vocab_size, bias=config.output_bias)
        if config.output_bias:
            nn.init.zeros_(self.output.bias)
        if config.tie_embeddings == "none":
            nn.init.normal_(self.output.weight, std=config.d_model**-0.5)
        else:
            self.output.weight = self.tgt_embedding.weight

    @property
    def src_vocab_size(self) -> int:
        """Number of source tokens."""
        return self.src_embedding.num_embeddings

    @property
    def tgt_vocab_size(self) -> int:
        """Number of target tokens."""
        return self.tgt_embedding.num_embeddings

    @property
    def max_target_tokens(self) -> int | None:
        """Longest target that the decoder has positions for; None if there is no limit."""
        return self.config.positions.max_tokens if self.config.positions.scheme == "learned" else None

    def forward(
        self, src: Int[Tensor, "batch src_len"], tgt_in: Int[Tensor, "batch tgt_len"]
    ) -> Float[Tensor, "batch tgt_len tgt_vocab_size"]:
        """Logits of the next token at every target position, given the tokens up to it."""
        return self.logits(self.decode(tgt_in, self.encode(src), self.memory_mask(src)))

    def memory_mask(self, src: Int[Tensor, "batch src_len"]) -> Bool[Tensor, "batch 1 1 src_len"]:
        """True where the memory of these sentences holds a token."""
        return padding_mask(src, self.pad_id)

    def encode(
        self, src: Int[Tensor, "batch src_len"], positions: PositionIds | None = None
    ) -> Float[Tensor, "batch src_len d_model"]:
        """The memory: the encoder's output. Tokens stand one after the other unless `positions` says more."""
        x = self._embed(self.src_embedding, self.src_positions, src, positions or 0)
        mask = self.memory_mask(src)
        for block in self.encoder:
            x = block(x, mask, positions=positions).x
        return self.encoder_norm(x)  # type: ignore[no-any-return]

    def decode(
        self,
        tgt_in: Int[Tensor, "rows tgt_len"],
        memory: Float[Tensor, "batch src_len d_model"] | None,
        memory_mask: Tensor | None,
        cache: DecoderCache | None = None,
        new: NewTokens | None = None,
    ) -> Float[Tensor, "rows tgt_len d_model"]:
        """The decoder's output, before the output layer.

        Args:
            tgt_in: target tokens, shifted right; with a cache, only those not yet in it. Rows may
                be a multiple of the batch (several hypotheses of a sentence, side by side).
            memory: the encoder's output; None where the cache holds what the layers read of it.
            memory_mask: True where the memory holds a token, broadcasts to
                `[batch, 1, 1, src_len]`.
            cache: holds the tokens before `tgt_in`, and gets those of `tgt_in`.
            new: where the tokens of `tgt_in` stand and what they see, if they do not follow each other.
        """
        start = new.positions if new is not None else cache.length if cache is not None else 0
        x = self._embed(self.tgt_embedding, self.tgt_positions, tgt_in, start)
        for i, block in enumerate(self.decoder):
            own, of_memory = (None, None) if cache is None else (cache.own[i], cache.memory[i])
            x = block(
                x,
                None if new is None else new.mask,
                causal=new is None,
                memory=memory,
                memory_mask=memory_mask,
                cache=own,
                memory_cache=of_memory,
                positions=None if new is None else new.positions,
            ).x
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows tgt_vocab_size"]:
        """The output layer."""
        return self.output(x)  # type: ignore[no-any-return]

    def attention_maps(
        self, src: Int[Tensor, "batch src_len"], tgt_in: Int[Tensor, "batch tgt_len"]
    ) -> AttentionMaps:
        """The attention weights of every layer and head for a pair of sentences."""
        mask = self.memory_mask(src)
        x = self._embed(self.src_embedding, self.src_positions, src, 0)
        of_encoder, of_decoder, of_cross = [], [], []
        for block in self.encoder:
            x, weights, _ = block(x, mask, need_weights=True)
            of_encoder.append(weights)
        memory = self.encoder_norm(x)
        y = self._embed(self.tgt_embedding, self.tgt_positions, tgt_in, 0)
        for block in self.decoder:
            y, own, cross = block(y, causal=True, memory=memory, memory_mask=mask, need_weights=True)
            of_decoder.append(own)
            of_cross.append(cross)
        return AttentionMaps(tuple(of_encoder), tuple(of_decoder), tuple(of_cross))

    def _embed(
        self,
        table: Callable[[Tensor], Tensor],
        positions: Callable[[Tensor, int | PositionIds], Tensor],
        ids: Tensor,
        start: int | PositionIds,
    ) -> Tensor:
        x = table(ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        x = positions(x, start)
        if self.stream_dtype is not None:
            x = x.to(self.stream_dtype)
        return self.embedding_dropout(x) if self.training else x


def _positions(config: ModelConfig) -> nn.Module:
    match config.positions.scheme:
        case "sinusoidal":
            return SinusoidalPositions(config.d_model, config.positions.sinusoidal_layout)
        case "learned":
            return LearnedPositions(config.positions.max_tokens, config.d_model)
        case _:
            return NoPositions()


def _embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    table = nn.Embedding(vocab_size, d_model)
    nn.init.normal_(table.weight, std=d_model**-0.5)
    return table
