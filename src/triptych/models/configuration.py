"""What a model is made of: one frozen tree, the same in a recipe and in `config.json`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from triptych.attention import Factored, Parameterisation

Width = int | None


class AttentionConfig(BaseModel):
    """One attention site. Sizes left out are those of the whole model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    projections: Literal["factored"] = "factored"
    num_heads: int | None = Field(None, ge=1)
    d_k: Width = Field(None, ge=1)
    d_v: Width = Field(None, ge=1)
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    dropout: float = Field(0.0, ge=0, lt=1)

    def parameterisation(self) -> Parameterisation:
        """The projections to build."""
        return Factored(
            d_k=self.d_k,
            d_v=self.d_v,
            q_bias=self.q_bias,
            k_bias=self.k_bias,
            v_bias=self.v_bias,
            o_bias=self.o_bias,
        )


class EncoderConfig(BaseModel):
    """The encoder's stack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(6, ge=1)
    attention: AttentionConfig = AttentionConfig()


class DecoderConfig(BaseModel):
    """The decoder's stack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(6, ge=1)
    attention: AttentionConfig = AttentionConfig()
    cross_attention: AttentionConfig = AttentionConfig()


class ModelConfig(BaseModel):
    """An encoder-decoder Transformer; the defaults are the paper's base model.

    Attributes:
        d_model: width of the residual stream.
        d_ff: inner width of the feed-forward layers.
        num_heads: heads of every attention site that names no number of its own.
        d_k: width of queries and keys; d_model / num_heads if None. Likewise `d_v` for values.
        dropout: on the output of every sub-layer and on the embeddings.
        activation_dropout: inside the feed-forward layers (not in the paper).
        norm: "post" normalises after the residual sum, as the paper; "pre" before each sub-layer.
        tie_embeddings: which of the three tables (source, target, output) are one: "all" as the
            paper, "target" (target and output), or "none".
        max_source_tokens: longest source sentence the model is meant for; longer ones are
            translated in pieces.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    d_model: int = Field(512, ge=2)
    d_ff: int = Field(2048, ge=1)
    num_heads: int = Field(8, ge=1)
    d_k: Width = Field(None, ge=1)
    d_v: Width = Field(None, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    activation_dropout: float = Field(0.0, ge=0, lt=1)
    norm: Literal["post", "pre"] = "post"
    tie_embeddings: Literal["all", "target", "none"] = "all"
    max_source_tokens: int = Field(256, ge=1)
    encoder: EncoderConfig = EncoderConfig()
    decoder: DecoderConfig = DecoderConfig()

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelConfig":
        for site in (self.encoder.attention, self.decoder.attention, self.decoder.cross_attention):
            resolved = self.site(site)
            if (resolved.d_k is None or resolved.d_v is None) and self.d_model % (resolved.num_heads or 1):
                raise ValueError(
                    f"num_heads {resolved.num_heads} does not divide d_model {self.d_model}: "
                    "choose another number of heads or give both d_k and d_v"
                )
        return self

    def site(self, attention: AttentionConfig) -> AttentionConfig:
        """An attention site with the sizes it left out filled in."""
        own = attention.model_dump(exclude_none=True)
        model = {"num_heads": self.num_heads, "d_k": self.d_k, "d_v": self.d_v}
        return AttentionConfig(**{**model, **own})


PRESETS: dict[str, ModelConfig] = {
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
}
