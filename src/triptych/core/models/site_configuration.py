"""Configurations of an attention site and of positions, in a recipe and in `config.json`."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from triptych import user_code
from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.attention.position_modules import (
    AlibiPositions,
    AttentionPositions,
    RotaryPositions,
)
from triptych.core.attention.projections import (
    parameterisation,
    parameterisation_class,
)
from triptych.core.attention.projections.abstract import Parameterisation
from triptych.core.attention.projections.composed import (
    ScaledOutside,
    ScalePlace,
)
from triptych.core.attention.requirements import (
    check_qk_norm,
    check_sizes,
    scores_class,
    scores_name,
)
from triptych.core.models.architecture import EmbeddingsConfig
from triptych.errors import nearest

# Limits far above any real model: a check of a configuration counts the bytes of a map in 64 bits.
WIDEST = 1 << 24
LONGEST = 10**9
Option = int | bool | None


class StoredConfig(BaseModel):
    """A table of a recipe or of `config.json`, written without options of `newer` with their default.

    The stored configuration of older runs then stays unchanged, and such runs can be resumed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    newer: ClassVar[tuple[str, ...]] = ()  # options that older runs do not have

    @model_serializer(mode="wrap")
    def _without_newer(
        self, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        usual = {name: type(self).model_fields[name].default for name in self.newer}
        unused = {name for name, value in usual.items() if getattr(self, name) == value}
        return {
            name: value for name, value in handler(self).items() if name not in unused
        }


class AttentionConfig(StoredConfig):
    """Configuration of one attention site. Missing sizes are taken from the model.

    Attributes:
        projections: parameterisation of the heads, a name of `PARAMETERISATIONS`, or `FILE.py:CLASS` for a
            class in your file (docs/how-to/own-attention.md); options of the parameterisation (`d_k`,
            `num_kv_heads`, `q_bias` …: fields of its class) are keys of this table too.
        scores: comparison of queries and keys: "dot", their product over √d_k; "cosine", their cosine times
            √d_k and a learned gain per head; "additive", `v · tanh(q + k)` with a learned vector per head; or
            `FILE.py:CLASS` for scores in your file (docs/how-to/own-attention.md).
        scale: position of the factor 1/√d_k for "dot": "inside" the softmax, or "outside",
            `softmax(QKᵀ)·V/√d_k`.
        num_heads: number of query heads.
        dropout: probability that an attention weight is dropped in training.
        qk_norm: normalise queries and keys before their product; language models only.
        output_gate: multiply the output of each head by a learned gate of its token, between 0 and 1;
            language models only.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    newer = ("scores", "scale")
    projections: str = "factored"
    scores: str = "dot"
    scale: ScalePlace = "inside"
    num_heads: int | None = Field(None, ge=1, le=WIDEST, strict=True)
    dropout: float = Field(0.0, ge=0, lt=1)
    qk_norm: bool = False
    output_gate: bool = False

    @model_validator(mode="after")
    def _options_are_its_own(self) -> "AttentionConfig":
        # Options of the parameterisation are extra keys: pydantic checks neither their names nor their types.
        own = option_types(self.projections)
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name not in own:
                known = [*type(self).model_fields, *own]
                close = nearest(name, known)
                hint = (
                    f"did you mean {close}?"
                    if close
                    else f"known are {', '.join(known)}"
                )
                raise PydanticCustomError(
                    "unknown_option",
                    "{projections} has no {key}: {hint}",
                    {"projections": repr(self.projections), "key": name, "hint": hint},
                )
            try:
                TypeAdapter(own[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(
                    f"{name}: {error.errors()[0]['msg']}, not {value!r}"
                ) from None
        return self

    @model_validator(mode="after")
    def _scores_fit(self) -> "AttentionConfig":
        if self.scores not in ("dot", "cosine"):
            scores_class(self.scores)
        if self.scale == "outside" and self.scores != "dot":
            raise ValueError(
                f"scale is 'outside', but scores = {self.scores!r} are no products: leave it out"
            )
        if self.scores == "cosine" and self.qk_norm:
            raise ValueError(
                "qk_norm is true, but cosine scores normalise queries and keys: leave it out"
            )
        return self

    @classmethod
    def of(cls, layer: MultiHeadAttention) -> "AttentionConfig":
        """Return the configuration of a layer."""
        # `ScaledOutside` is the option `scale`, not a name of `projections`.
        chosen = layer.parameterisation
        semantics = layer.semantics
        scores = scores_name(semantics)
        others: dict[str, Any] = {
            "scores": scores,
            "qk_norm": semantics.qk_norm and scores != "cosine",
            "output_gate": semantics.gate is not None and not semantics.gate.whole,
        }
        if isinstance(chosen, ScaledOutside):
            chosen = chosen.inner
            others["scale"] = "outside"
        if user_code.is_in_file(chosen.name) and parameterisation_class(
            chosen.name
        ) is not type(chosen):
            raise ValueError(
                f"{chosen.name} has changed since the layer was made: open the model again"
            )
        options = {
            field.name: getattr(chosen, field.name)
            for field in dataclasses.fields(chosen)
            if getattr(chosen, field.name) != field.default
        }
        return cls.model_validate(
            {
                "projections": chosen.name,
                "num_heads": layer.num_heads,
                "dropout": layer.dropout,
                **others,
                **options,
            }
        )

    @property
    def options(self) -> dict[str, Option]:
        """Given options of the parameterisation."""
        return dict(self.__pydantic_extra__ or {})

    def parameterisation(self) -> Parameterisation:
        """Build the parameterisation."""
        return parameterisation(self.projections, **self.options)

    def layer(
        self, d_model: int, num_heads: int, positions: AttentionPositions | None = None
    ) -> MultiHeadAttention:
        """Build a layer with fresh weights."""
        return MultiHeadAttention(
            d_model,
            self.num_heads or num_heads,
            self.parameterisation(),
            dropout=self.dropout,
            positions=positions,
            qk_norm=self.qk_norm,
            output_gate=self.output_gate,
            scores=self.scores,
            scale=self.scale,
        )

    def check(
        self, d_model: int, num_heads: int, positions: AttentionPositions | None
    ) -> None:
        """Check that a layer of this configuration could be built."""
        chosen = self.parameterisation()
        check_sizes(
            d_model, self.num_heads or num_heads, chosen, positions, self.scores
        )
        if self.qk_norm or self.scores == "cosine":
            check_qk_norm(chosen)


def option_types(projections: str) -> dict[str, Any]:
    """Return the options of a parameterisation with their types."""
    cls = parameterisation_class(projections)
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


class PositionsConfig(BaseModel):
    """Configuration of the position encoding.

    Attributes:
        scheme: "sinusoidal" (the paper) and "learned" are added to the embeddings; "rotary" and "alibi" apply
            inside self-attention, not in cross-attention; "none" is a model without positions.
        sinusoidal_layout: sines on even and cosines on odd channels as in the paper ("interleaved"), or all
            sines before all cosines ("halves").
        max_tokens: longest text for "learned" positions, source or target, in tokens.
        rotary_dim: number of rotated channels per head; all if None.
        rotary_pairing: channels of a pair: i and i + rotary_dim / 2 ("halves"), or 2i and 2i + 1
            ("interleaved").
        rotary_base: base of the frequencies; the slowest pair rotates by about 1 / base per position.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheme: Literal["none", "sinusoidal", "learned", "rotary", "alibi"] = "sinusoidal"
    sinusoidal_layout: Literal["halves", "interleaved"] = "interleaved"
    max_tokens: int = Field(512, ge=1, le=LONGEST)
    rotary_dim: int | None = Field(None, ge=2)
    rotary_pairing: Literal["halves", "interleaved"] = "halves"
    rotary_base: float = Field(10_000.0, gt=1, allow_inf_nan=False)

    @model_validator(mode="after")
    def _rotary_options_are_for_rotary(self) -> "PositionsConfig":
        if self.rotary_dim is not None and self.scheme != "rotary":
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}, but the scheme is {self.scheme!r}: nothing turns"
            )
        return self

    def in_attention(self) -> AttentionPositions | None:
        """Return the position encoding inside self-attention; None for other schemes."""
        match self.scheme:
            case "rotary":
                return RotaryPositions(
                    self.rotary_dim, self.rotary_pairing, self.rotary_base
                )
            case "alibi":
                return AlibiPositions()
            case _:
                return None

    def embeddings(
        self, vocab_size: int, scale: float, dropout: float
    ) -> EmbeddingsConfig:
        """Build the configuration of embeddings with positions, for a vocabulary of this size."""
        scheme = self.scheme
        return EmbeddingsConfig(
            vocab_size,
            scale=scale,
            positions=scheme if scheme in ("learned", "sinusoidal") else "none",
            num_positions=self.max_tokens if scheme == "learned" else 0,
            sinusoidal_layout=self.sinusoidal_layout,
            dropout=dropout,
        )
