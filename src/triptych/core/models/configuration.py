"""Configurations of models: one frozen tree, equal in a recipe and in `config.json`."""

import dataclasses
import math
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from triptych.core.models.architecture import (
    BlockConfig,
    EncoderDecoderArchitecture,
    FeedForwardConfig,
    HeadConfig,
    LanguageModelArchitecture,
    NormConfig,
    SublayerConfig,
)
from triptych.core.models.site_configuration import (
    LONGEST,
    WIDEST,
    AttentionConfig,
    PositionsConfig,
    StoredConfig,
    option_types,
)
from triptych.core.storage.settings import MOST_LAYERS

Width = int | None
StackName = Literal["encoder", "decoder", "cross"]


class VectorsConfig(BaseModel):
    """Initial values and training of the embedding table.

    Attributes:
        vectors: file of word vectors: text with a word and its values in each line (word2vec, GloVe), or
            safetensors with one tensor, a row per token. A token gets the vector of its text without leading
            space, or else of its text in lower case; tokens without a vector keep their drawn values. One
            common factor makes the vectors as large as the drawn values. In a translator with separate
            tables, the vectors are for the source.
        frozen: keep the tables unchanged in training, including a tied output table.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vectors: str = ""
    frozen: bool = False


class TranslatorVectorsConfig(VectorsConfig):
    """Initial values and training of the embedding tables.

    Attributes:
        target_vectors: the same for the target, if source and target have separate tables.
    """

    target_vectors: str = ""


class EncoderConfig(BaseModel):
    """Configuration of the encoder.

    Attributes:
        num_layers: number of blocks.
        attention: self-attention of every layer not named in `attention_in_layer`.
        attention_in_layer: self-attention of single layers, by layer number from 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(6, ge=1, le=MOST_LAYERS)
    attention: AttentionConfig = AttentionConfig()
    attention_in_layer: dict[int, AttentionConfig] = {}


class DecoderConfig(BaseModel):
    """Configuration of the decoder.

    Attributes:
        num_layers: number of blocks.
        attention: self-attention of every layer not named in `attention_in_layer`.
        cross_attention: cross-attention of every layer not named in `cross_attention_in_layer`.
        attention_in_layer: self-attention of single layers, by layer number from 0.
        cross_attention_in_layer: the same for cross-attention.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(6, ge=1, le=MOST_LAYERS)
    attention: AttentionConfig = AttentionConfig()
    cross_attention: AttentionConfig = AttentionConfig()
    attention_in_layer: dict[int, AttentionConfig] = {}
    cross_attention_in_layer: dict[int, AttentionConfig] = {}


class ModelConfig(StoredConfig):
    """An encoder-decoder Transformer; the defaults are the paper's base model.

    Attributes:
        d_model: width of the residual stream.
        d_ff: inner width of the feed-forward layers.
        num_heads: number of heads; default of all attention sites.
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        dropout: dropout on the output of every sub-layer and on the embeddings.
        activation_dropout: dropout inside the feed-forward layers (not in the paper).
        activation: activation of the feed-forward layers: "relu" as in the paper, "gelu" (x Φ(x), Φ the
            normal distribution) or "swish" (x / (1 + e^−x)).
        norm: "post" normalises after the residual sum, as in the paper; "pre" before each sub-layer.
        tie_embeddings: sharing of the three tables (source, target, output): "all" as in the paper, "target"
            (target and output), or "none".
        output_bias: add a bias per token to the logits, as in some imported checkpoints; fresh models
            lack it.
        max_source_tokens: longest source sentence for the model, in tokens; longer sentences are translated
            in pieces.
        positions: position encoding.
        embeddings: pretrained or frozen embeddings.
    """

    newer = ("embeddings",)

    d_model: int = Field(512, ge=2, le=WIDEST)
    d_ff: int = Field(2048, ge=1, le=WIDEST)
    num_heads: int = Field(8, ge=1, le=WIDEST)
    d_k: Width = Field(None, ge=1, le=WIDEST, strict=True)
    d_v: Width = Field(None, ge=1, le=WIDEST, strict=True)
    dropout: float = Field(0.1, ge=0, lt=1)
    activation_dropout: float = Field(0.0, ge=0, lt=1)
    activation: Literal["relu", "gelu", "swish"] = "relu"
    norm: Literal["post", "pre"] = "post"
    tie_embeddings: Literal["all", "target", "none"] = "all"
    output_bias: bool = False
    max_source_tokens: int = Field(256, ge=1, le=LONGEST)
    positions: PositionsConfig = PositionsConfig()
    encoder: EncoderConfig = EncoderConfig()
    decoder: DecoderConfig = DecoderConfig()
    embeddings: TranslatorVectorsConfig = TranslatorVectorsConfig()

    @model_validator(mode="after")
    def _target_has_a_table(self) -> "ModelConfig":
        if self.embeddings.target_vectors and self.tie_embeddings == "all":
            raise ValueError(
                "embeddings.target_vectors is given, but tie_embeddings = 'all' has one table: give vectors"
            )
        return self

    @model_validator(mode="after")
    def _sites_fit(self) -> "ModelConfig":
        of_decoder = (
            self.decoder.attention_in_layer,
            self.decoder.cross_attention_in_layer,
        )
        _check_layers(
            "encoder.attention_in_layer",
            self.encoder.attention_in_layer,
            self.encoder.num_layers,
        )
        _check_layers(
            "decoder.attention_in_layer", of_decoder[0], self.decoder.num_layers
        )
        _check_layers(
            "decoder.cross_attention_in_layer", of_decoder[1], self.decoder.num_layers
        )
        positions = self.positions.in_attention()
        for stack in get_args(StackName):
            for site in dict.fromkeys(self.sites(stack)):  # equal layers once
                site.check(
                    self.d_model,
                    self.num_heads,
                    None if stack == "cross" else positions,
                )
                for name in ("qk_norm", "output_gate"):
                    if getattr(site, name):
                        reason = "and encoder-decoder models have none: leave it out"
                        raise ValueError(f"{name} is true, {reason}")
        longest = self.max_source_tokens + 1
        if self.positions.scheme == "learned" and self.positions.max_tokens < longest:
            raise ValueError(
                f"positions.max_tokens is {self.positions.max_tokens}: max_source_tokens "
                f"{self.max_source_tokens} and the end of sentence need {longest}"
            )
        return self

    def sites(self, stack: StackName) -> list[AttentionConfig]:
        """Return the attention of every layer of a stack, with default sizes; "cross" is cross-attention."""
        own = self.encoder if stack == "encoder" else self.decoder
        kind = "attention"
        kind = "cross_attention" if stack == "cross" else kind
        usual = getattr(own, kind)
        unusual = getattr(own, f"{kind}_in_layer")
        return [_filled_in(unusual.get(i, usual), self) for i in range(own.num_layers)]

    def architecture(
        self, src_vocab_size: int, tgt_vocab_size: int
    ) -> EncoderDecoderArchitecture:
        """Build the architecture of the model, for vocabularies of these sizes."""
        # Pre-norm leaves the stream itself unnormalised, so each stack ends with a final norm.
        norm = NormConfig() if self.norm == "pre" else None
        embeddings = self.positions.embeddings(
            src_vocab_size, math.sqrt(self.d_model), self.dropout
        )
        encoder = LanguageModelArchitecture(
            "encoder",
            self.d_model,
            embeddings,
            (self.block(cross=False),) * self.encoder.num_layers,
            norm,
            None,
        )
        decoder = dataclasses.replace(
            encoder,
            kind="decoder",
            embeddings=dataclasses.replace(embeddings, vocab_size=tgt_vocab_size),
            blocks=(self.block(cross=True),) * self.decoder.num_layers,
            head=HeadConfig(tied=self.tie_embeddings != "none", bias=self.output_bias),
        )
        return EncoderDecoderArchitecture(
            encoder, decoder, self.tie_embeddings == "all"
        )

    def block(self, *, cross: bool) -> BlockConfig:
        """Build the architecture of an encoder block, or of a decoder block with `cross`."""
        frame = SublayerConfig(NormConfig(), self.norm, dropout=self.dropout)
        feed_forward = FeedForwardConfig(
            self.d_ff, self.activation, dropout=self.activation_dropout
        )
        return BlockConfig(frame, feed_forward, frame, frame if cross else None)


class LanguageModelConfig(StoredConfig):
    """A decoder-only model for the next token, or an encoder-only model for masked tokens.

    Attributes:
        num_layers: number of blocks.
        d_model: width of the residual stream.
        d_ff: inner width of the feed-forward layers; if None, 4 · d_model, or 8/3 · d_model for gated layers,
            rounded up to a multiple of 8.
        num_heads: number of heads; default of all attention layers.
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        dropout: dropout on the output of every sub-layer and on the embeddings.
        activation_dropout: dropout inside the feed-forward layers.
        activation: activation of the feed-forward layers.
        gated: use gated feed-forward layers (SwiGLU with "swish").
        norm: "pre" normalises before each sub-layer and after the last block, "post" after the residual sums.
        norm_kind: LayerNorm or RMSNorm.
        norm_eps: constant below the root of norms.
        bias: add biases to feed-forward layers and LayerNorms. Biases of the attention are options of its
            parameterisation.
        tie_embeddings: use the embedding table as the output table.
        context: longest text in training, in tokens. `positions.max_tokens` limits every text with "learned"
            positions.
        positions: position encoding.
        attention: attention of every layer not named in `attention_in_layer`.
        attention_in_layer: attention of single layers, by layer number from 0.
        embeddings: pretrained or frozen embeddings.
    """

    newer = ("embeddings",)

    num_layers: int = Field(6, ge=1, le=MOST_LAYERS)
    d_model: int = Field(384, ge=2, le=WIDEST)
    d_ff: int | None = Field(None, ge=1, le=WIDEST)
    num_heads: int = Field(6, ge=1, le=WIDEST)
    d_k: Width = Field(None, ge=1, le=WIDEST, strict=True)
    d_v: Width = Field(None, ge=1, le=WIDEST, strict=True)
    dropout: float = Field(0.0, ge=0, lt=1)
    activation_dropout: float = Field(0.0, ge=0, lt=1)
    activation: Literal["relu", "gelu", "gelu_tanh", "swish", "relu_squared"] = "gelu"
    gated: bool = False
    norm: Literal["post", "pre"] = "pre"
    norm_kind: Literal["layer", "rms"] = "layer"
    norm_eps: float = Field(1e-5, gt=0)
    bias: bool = True
    tie_embeddings: bool = True
    context: int = Field(256, ge=1, le=LONGEST)
    positions: PositionsConfig = PositionsConfig(scheme="rotary")
    attention: AttentionConfig = AttentionConfig()
    attention_in_layer: dict[int, AttentionConfig] = Field({})
    embeddings: VectorsConfig = VectorsConfig()

    @model_validator(mode="after")
    def _sites_fit(self) -> "LanguageModelConfig":
        _check_layers("attention_in_layer", self.attention_in_layer, self.num_layers)
        for site in {
            id(site): site for site in self.sites()
        }.values():  # equal layers once
            site.check(self.d_model, self.num_heads, self.positions.in_attention())
        if (
            self.positions.scheme == "learned"
            and self.positions.max_tokens < self.context
        ):
            raise ValueError(
                f"positions.max_tokens is {self.positions.max_tokens}: a context of {self.context} "
                "tokens needs as many"
            )
        return self

    def sites(self) -> list[AttentionConfig]:
        """Return the attention of every layer, with default sizes."""
        usual = _filled_in(self.attention, self)
        own = {
            i: _filled_in(attention, self)
            for i, attention in self.attention_in_layer.items()
        }
        return [own.get(i, usual) for i in range(self.num_layers)]

    def architecture(
        self, kind: Literal["decoder", "encoder"], vocab_size: int
    ) -> LanguageModelArchitecture:
        """Build the architecture of the model, for a vocabulary of this size."""
        # A post-norm model has no final norm, but a norm of the embeddings, as in BERT.
        norm = NormConfig(self.norm_kind, self.norm_eps, bias=self.bias)
        frame = SublayerConfig(norm, self.norm, dropout=self.dropout)
        d_ff = self.d_ff or (
            -(-8 * self.d_model // 24) * 8 if self.gated else 4 * self.d_model
        )
        feed_forward = FeedForwardConfig(
            d_ff,
            self.activation,
            self.gated,
            self.bias,
            self.bias,
            self.activation_dropout,
        )
        embeddings = self.positions.embeddings(vocab_size, 1.0, self.dropout)
        if self.norm == "post":
            embeddings = dataclasses.replace(embeddings, norm=norm)
        return LanguageModelArchitecture(
            kind,
            self.d_model,
            embeddings,
            (BlockConfig(frame, feed_forward, frame),) * self.num_layers,
            norm if self.norm == "pre" else None,
            HeadConfig(tied=self.tie_embeddings),
        )


def _filled_in(
    attention: AttentionConfig, model: ModelConfig | LanguageModelConfig
) -> AttentionConfig:
    """Return an attention site with missing sizes taken from the model, where the site has such options."""
    own = ("num_heads", *option_types(attention.projections))
    sizes = {"num_heads": model.num_heads, "d_k": model.d_k, "d_v": model.d_v}
    filled = {
        name: size for name, size in sizes.items() if name in own and size is not None
    }
    return AttentionConfig.model_validate(
        {**filled, **attention.model_dump(exclude_none=True)}
    )


def _check_layers(
    field: str, sites: dict[int, AttentionConfig], num_layers: int
) -> None:
    for layer in sites:
        if not 0 <= layer < num_layers:
            raise ValueError(
                f"{field} names layer {layer}: there are {num_layers}, counted from 0"
            )


def _student(encoder: int, decoder: int) -> ModelConfig:
    """Build a preset with a deep encoder (one run per sentence) and a shallow decoder (one run per token)."""
    return ModelConfig(
        d_model=256,
        d_ff=512,
        num_heads=4,
        norm="pre",
        encoder=EncoderConfig(num_layers=encoder),
        decoder=DecoderConfig(num_layers=decoder),
    )


_PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        d_model=128,
        d_ff=256,
        num_heads=4,
        encoder=EncoderConfig(num_layers=2),
        decoder=DecoderConfig(num_layers=2),
    ),
    "small": ModelConfig(
        d_model=256,
        d_ff=1024,
        num_heads=4,
        encoder=EncoderConfig(num_layers=3),
        decoder=DecoderConfig(num_layers=3),
    ),
    "base": ModelConfig(),
    "big": ModelConfig(d_model=1024, d_ff=4096, num_heads=16, dropout=0.3),
    "student-6-2": _student(6, 2),
    "student-12-1": _student(12, 1),
}

# Every size is explicit, so that a preset does not depend on defaults or on the text.
PRESETS: dict[str, ModelConfig] = {
    name: ModelConfig.model_validate(preset.model_dump(exclude_none=True))
    for name, preset in _PRESETS.items()
}
