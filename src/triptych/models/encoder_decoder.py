"""The Transformer of the paper."""

from collections.abc import Iterable
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from triptych.attention import DecoderCache, MultiHeadAttention, PositionIds, padding_mask
from triptych.models.architecture import EncoderDecoderArchitecture
from triptych.models.blocks import Block, NewTokens, make_norm
from triptych.models.configuration import ModelConfig
from triptych.models.embedding import embed, make_positions
from triptych.models.feed_forward import Dropout


@final
class EncoderDecoder(nn.Module):
    """Encoder, decoder, embeddings and output, as sections 3.1 to 3.5 of the paper.

    Attributes:
        architecture: what it is made of.
        recipe: its configuration; None for a model that was read from another library's checkpoint.
        pad_id: the token that attention must not see.

    Source: Vaswani et al. 2017, arXiv 1706.03762.
    """

    def __init__(
        self,
        architecture: EncoderDecoderArchitecture,
        encoder: Iterable[MultiHeadAttention],
        decoder: Iterable[tuple[MultiHeadAttention, MultiHeadAttention]],
        pad_id: int = 0,
        recipe: ModelConfig | None = None,
    ) -> None:
        """Make a model with fresh weights around attention layers.

        Args:
            architecture: what it is made of.
            encoder: a layer for every block of the encoder.
            decoder: self-attention and cross-attention for every block of the decoder.
            pad_id: the token that attention must not see.
            recipe: the configuration that describes the model, if one does.
        """
        super().__init__()
        self.architecture, self.recipe = architecture, recipe
        self.pad_id = pad_id
        source, target, d_model = architecture.source, architecture.target, architecture.d_model
        self.tgt_embedding = _embedding(target.vocab_size, d_model)
        self.src_embedding = (
            self.tgt_embedding if architecture.shared else _embedding(source.vocab_size, d_model)
        )
        self.src_positions = make_positions(source, d_model)
        self.tgt_positions = make_positions(target, d_model)
        self.src_norm = make_norm(source.norm, d_model)
        self.tgt_norm = make_norm(target.norm, d_model)
        self.embedding_dropout = Dropout(target.dropout)
        self.stream_dtype: torch.dtype | None = None  # of the blocks, where it is not the tables' dtype
        self.encoder = nn.ModuleList(
            Block(block, d_model, layer) for block, layer in zip(architecture.encoder, encoder, strict=True)
        )
        self.decoder = nn.ModuleList(
            Block(block, d_model, *layers)
            for block, layers in zip(architecture.decoder, decoder, strict=True)
        )
        self.encoder_norm = make_norm(architecture.encoder_norm, d_model)
        self.decoder_norm = make_norm(architecture.decoder_norm, d_model)
        self.output = nn.Linear(d_model, target.vocab_size, bias=architecture.output_bias)
        if architecture.output_bias:
            nn.init.zeros_(self.output.bias)
        if architecture.tied:
            self.output.weight = self.tgt_embedding.weight
        else:
            nn.init.normal_(self.output.weight, std=d_model**-0.5)

    @classmethod
    def of(
        cls, config: ModelConfig, src_vocab_size: int, tgt_vocab_size: int, pad_id: int = 0
    ) -> "EncoderDecoder":
        """A model of a recipe, with fresh weights.

        Args:
            config: the architecture.
            src_vocab_size: rows of the source embedding.
            tgt_vocab_size: rows of the target embedding and of the output.
            pad_id: the token that attention must not see.

        Raises:
            ValueError: one table for all asked of vocabularies that differ.
        """
        if config.tie_embeddings == "all" and src_vocab_size != tgt_vocab_size:
            raise ValueError(
                f"tie_embeddings = 'all' needs one vocabulary, not {src_vocab_size} source and "
                f"{tgt_vocab_size} target tokens: make the tokenizer joint or tie 'target' only"
            )
        own, d_model, heads = config.positions.in_attention(), config.d_model, config.num_heads
        # Made one by one while the model is, so that a seed gives the same numbers as ever.
        encoder = (site.layer(d_model, heads, own) for site in config.encoder_sites())
        decoder = (
            (site.layer(d_model, heads, own), cross.layer(d_model, heads))
            for site, cross in zip(config.decoder_sites(), config.cross_sites(), strict=True)
        )
        model = cls(config.architecture(src_vocab_size, tgt_vocab_size), encoder, decoder, pad_id, config)
        for table in (model.src_embedding, model.tgt_embedding):
            table.requires_grad_(not config.embeddings.frozen)
        return model

    @property
    def config(self) -> ModelConfig:
        """The recipe's.

        Raises:
            ValueError: the model was not made by a recipe.
        """
        if self.recipe is None:
            raise ValueError(
                "the model is of another library's checkpoint and no recipe describes it: it can be run, and "
                "not trained, converted or rewritten"
            )
        return self.recipe

    @property
    def src_vocab_size(self) -> int:
        """Number of source tokens."""
        return self.src_embedding.num_embeddings

    @property
    def tgt_vocab_size(self) -> int:
        """Number of target tokens."""
        return self.tgt_embedding.num_embeddings

    @property
    def max_source_tokens(self) -> int | None:
        """Longest source that the model is meant for, without the end of the sentence; None for no limit."""
        if self.recipe is not None:
            return self.recipe.max_source_tokens
        source = self.architecture.source
        return None if source.positions == "none" else source.num_positions - 1

    @property
    def max_target_tokens(self) -> int | None:
        """Longest target that the decoder has positions for; None if there is no limit."""
        target = self.architecture.target
        return target.num_positions if target.positions == "learned" else None

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
        x = self._embed("src", src, positions or 0)
        mask = self.memory_mask(src)
        for block in self.encoder:
            x = block(x, mask, positions=positions)
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
        x = self._embed("tgt", tgt_in, start)
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
            )
        return self.decoder_norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows tgt_vocab_size"]:
        """The output layer."""
        scale, cap = self.architecture.logit_scale, self.architecture.soft_cap
        logits: Tensor = self.output(x if scale == 1.0 else x * scale)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embed(self, side: Literal["src", "tgt"], ids: Tensor, start: int | PositionIds) -> Tensor:
        x = embed(
            self.architecture.source if side == "src" else self.architecture.target,
            ids,
            start,
            table=getattr(self, f"{side}_embedding"),
            positions=getattr(self, f"{side}_positions"),
            norm=getattr(self, f"{side}_norm"),
        )
        if self.stream_dtype is not None:
            x = x.to(self.stream_dtype)
        return self.embedding_dropout(x) if self.training else x


def _embedding(vocab_size: int, d_model: int) -> nn.Embedding:
    table = nn.Embedding(vocab_size, d_model)
    nn.init.normal_(table.weight, std=d_model**-0.5)
    return table
