"""`EncoderDecoder`: the Transformer of the paper."""

from collections.abc import Iterable
from typing import Literal, final

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.attention.layer_cache import DecoderCache
from triptych.core.attention.position_modules import PositionIds
from triptych.core.attention.steps import padding_mask
from triptych.core.models.architecture import EncoderDecoderArchitecture
from triptych.core.models.blocks import NewTokens, each_once
from triptych.core.models.configuration import ModelConfig
from triptych.core.models.embedding import Embeddings, fresh_table
from triptych.core.models.language_model import LanguageModel, LanguageModelHead


@final
class EncoderDecoder(nn.Module):
    """An encoder, and a decoder with attention to the encoder's output: sections 3.1 to 3.5 of the paper.

    Attributes:
        encoder: stack of the source, without a head.
        decoder: stack of the target; without a head in models for a task, such as classification.
        architecture: architecture of both stacks.
        recipe_limit: longest source in tokens by the recipe, without the end of sentence; None for a model
            without a recipe.
        pad_id: id of the padding token, masked in attention.

    Source: Vaswani et al. 2017, arXiv 1706.03762.
    """

    def __init__(
        self,
        architecture: EncoderDecoderArchitecture,
        encoder: Iterable[MultiHeadAttention],
        decoder: Iterable[MultiHeadAttention],
        cross: Iterable[MultiHeadAttention],
        pad_id: int = 0,
        recipe_limit: int | None = None,
    ) -> None:
        """Make a model with fresh weights around attention layers.

        Args:
            architecture: architecture of both stacks.
            encoder: self-attention of every block of the encoder.
            decoder: self-attention of every block of the decoder.
            cross: cross-attention of every block of the decoder.
            pad_id: id of the padding token, masked in attention.
            recipe_limit: longest source in tokens by the recipe; None without a recipe.
        """
        super().__init__()
        self.architecture = architecture
        self.recipe_limit = recipe_limit
        self.pad_id = pad_id
        source = architecture.encoder
        target = architecture.decoder
        d_model = architecture.decoder.d_model
        table = fresh_table(target.embeddings.vocab_size, d_model, d_model**-0.5)
        other = table
        if not architecture.shared:
            other = fresh_table(source.embeddings.vocab_size, d_model, d_model**-0.5)
        # Embeddings are drawn before the blocks: a seed gives the same initial values in all versions.
        read = Embeddings(source.embeddings, d_model, other)
        written = Embeddings(target.embeddings, d_model, table)
        seen = dict[int, MultiHeadAttention]()
        encoder, decoder, cross = (
            each_once(layers, seen) for layers in (encoder, decoder, cross)
        )
        reader = LanguageModel(source, encoder, embeddings=read)
        # A tied table is stored under its first name: the decoder is registered first.
        self.decoder = LanguageModel(target, decoder, cross=cross, embeddings=written)
        self.encoder = reader

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        src_vocab_size: int,
        tgt_vocab_size: int,
        pad_id: int = 0,
    ) -> "EncoderDecoder":
        """Build a model from the configuration of a recipe, with fresh weights.

        Args:
            config: configuration of the model.
            src_vocab_size: rows of the source embedding.
            tgt_vocab_size: rows of the target embedding and of the output.
            pad_id: id of the padding token, masked in attention.

        Raises:
            ValueError: vocabularies of different sizes cannot share one table.
        """
        if config.tie_embeddings == "all" and src_vocab_size != tgt_vocab_size:
            raise ValueError(
                f"tie_embeddings = 'all' needs one vocabulary, not {src_vocab_size} source and "
                f"{tgt_vocab_size} target tokens: make the tokenizer joint or tie 'target' only"
            )
        own = config.positions.in_attention()
        d_model = config.d_model
        heads = config.num_heads
        # Generators: a layer is drawn when its block is built. A seed then gives the same initial values in
        # all versions.
        model = cls(
            config.architecture(src_vocab_size, tgt_vocab_size),
            (site.layer(d_model, heads, own) for site in config.sites("encoder")),
            (site.layer(d_model, heads, own) for site in config.sites("decoder")),
            (site.layer(d_model, heads) for site in config.sites("cross")),
            pad_id,
            config.max_source_tokens,
        )
        for stack in model.stacks.values():
            stack.embeddings.table.requires_grad_(not config.embeddings.frozen)
        return model

    @property
    def stacks(self) -> dict[Literal["encoder", "decoder"], LanguageModel]:
        """Encoder and decoder by name, in this order."""
        return {"encoder": self.encoder, "decoder": self.decoder}

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of the encoder, followed by the blocks of the decoder."""
        return [*self.encoder.blocks, *self.decoder.blocks]

    @property
    def head(self) -> LanguageModelHead:
        """The head of the decoder."""
        assert self.decoder.head is not None, "a decoder predicts tokens"
        return self.decoder.head

    @property
    def src_vocab_size(self) -> int:
        """Number of source tokens."""
        return self.encoder.vocab_size

    @property
    def tgt_vocab_size(self) -> int:
        """Number of target tokens."""
        return self.decoder.vocab_size

    @property
    def max_source_tokens(self) -> int | None:
        """Longest source in tokens for this model, without the end of sentence; None for no limit."""
        if self.recipe_limit is not None:
            return self.recipe_limit
        source = self.encoder.architecture.embeddings
        return None if source.positions == "none" else source.num_positions - 1

    @property
    def max_target_tokens(self) -> int | None:
        """Longest target in tokens, by the decoder's positions; None for no limit."""
        return self.decoder.max_tokens

    def forward(
        self, src: Int[Tensor, "batch src_len"], tgt_in: Int[Tensor, "batch tgt_len"]
    ) -> Float[Tensor, "batch tgt_len tgt_vocab_size"]:
        """Compute logits of the next token at every target position, given the tokens up to the position."""
        return self.head(self.decode(tgt_in, self.encode(src), self.memory_mask(src)))  # type: ignore[no-any-return]

    def memory_mask(
        self, src: Int[Tensor, "batch src_len"]
    ) -> Bool[Tensor, "batch 1 1 src_len"]:
        """Return the mask of the memory of these sentences, True at tokens."""
        return padding_mask(src, self.pad_id)

    def encode(
        self, src: Int[Tensor, "batch src_len"], positions: PositionIds | None = None
    ) -> Float[Tensor, "batch src_len d_model"]:
        """Compute the memory, the encoder's output; tokens are consecutive unless `positions` are given."""
        return self.encoder.hidden(src, mask=self.memory_mask(src), positions=positions)

    def decode(
        self,
        tgt_in: Int[Tensor, "rows tgt_len"],
        memory: Float[Tensor, "batch src_len d_model"] | None,
        memory_mask: Tensor | None,
        cache: DecoderCache | None = None,
        new: NewTokens | None = None,
    ) -> Float[Tensor, "rows tgt_len d_model"]:
        """Compute the decoder's output, before the head; see `LanguageModel.hidden`.

        Args:
            tgt_in: target tokens, shifted right, without cached tokens.
            memory: the encoder's output; None if the cache contains its keys and values.
            memory_mask: mask of the memory, True at tokens.
            cache: cache of the tokens before `tgt_in`, to which `tgt_in` is appended.
            new: positions and mask of the tokens of `tgt_in`, if they are not consecutive.
        """
        return self.decoder.hidden(
            tgt_in,
            mask=None if new is None else new.mask,
            positions=None if new is None else new.positions,
            cache=cache,
            causal=new is None,
            memory=memory,
            memory_mask=memory_mask,
        )


# A model of either kind.
AnyModel = EncoderDecoder | LanguageModel
