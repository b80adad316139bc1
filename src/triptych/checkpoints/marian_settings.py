"""What the JSON files of a Marian checkpoint say, checked."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.errors import DataError
from triptych.storage.untrusted import read_json

MARIAN_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}

_Record = TypeVar("_Record", bound=BaseModel)


class MarianSettings(BaseModel):
    """What is read of `config.json`; fields without a default must be there."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    d_model: int = Field(ge=2)
    encoder_layers: int = Field(ge=1)
    decoder_layers: int = Field(ge=1)
    encoder_attention_heads: int = Field(ge=1)
    decoder_attention_heads: int = Field(ge=1)
    encoder_ffn_dim: int = Field(ge=1)
    decoder_ffn_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    decoder_vocab_size: int | None = Field(None, ge=1)
    max_position_embeddings: int = Field(ge=2)
    activation_function: str
    pad_token_id: int = Field(ge=0)
    eos_token_id: int = Field(ge=0)
    decoder_start_token_id: int = Field(ge=0)
    scale_embedding: bool = False
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    dropout: float = Field(0.1, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    activation_dropout: float = Field(0.0, ge=0, lt=1)
    # Switches of the first conversions, which no released model has otherwise.
    normalize_before: bool = False
    normalize_embedding: bool = False
    add_final_layer_norm: bool = False
    static_position_embeddings: bool = True

    @property
    def tgt_vocab_size(self) -> int:
        """Rows of the output."""
        own = None if self.share_encoder_decoder_embeddings else self.decoder_vocab_size
        return self.vocab_size if own is None else own

    @property
    def has_recipe(self) -> bool:
        """Whether a recipe of ours describes the model: others can be run, and not trained or converted."""
        return self.scale_embedding and self.encoder_ffn_dim == self.decoder_ffn_dim

    def unfit(self) -> str:
        """Why no model of ours is like this; "" if one is."""
        if self.activation_function not in MARIAN_ACTIVATIONS:
            known = ", ".join(MARIAN_ACTIVATIONS)
            return f"activation_function is {self.activation_function!r}: known are {known}"
        for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
            if getattr(self, name):
                return f"{name} is true: only post-norm models without further norms can be read"
        if not self.static_position_embeddings:
            return "static_position_embeddings is false: only sinusoidal positions can be read"
        smallest = min(self.vocab_size, self.tgt_vocab_size)
        for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
            if getattr(self, name) >= smallest:
                return f"{name} {getattr(self, name)} is outside the vocabulary of {smallest}"
        return ""


class TokenizerSettings(BaseModel):
    """What is read of `tokenizer_config.json` and of `special_tokens_map.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    unk_token: str | dict[str, Any] = "<unk>"
    eos_token: str | dict[str, Any] = "</s>"
    pad_token: str | dict[str, Any] = "<pad>"
    separate_vocabs: bool = False
    model_max_length: int | float | None = Field(None, ge=2)
    clean_up_tokenization_spaces: bool | None = None
    sp_model_kwargs: dict[str, Any] | None = None
    additional_special_tokens: list[Any] | None = None
    extra_special_tokens: list[Any] | dict[str, Any] | None = None
    added_tokens_decoder: dict[str, dict[str, Any]] = {}


class GenerationSettings(BaseModel):
    """What is read of `generation_config.json`, or of `config.json` where that is missing."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    num_beams: int | None = Field(None, ge=1)
    length_penalty: float = Field(1.0, ge=0, le=10)
    bad_words_ids: list[list[int]] | None = None


def read_tokenizer_settings(folder: Path) -> TokenizerSettings:
    """What the two files say together, the newer one first."""
    path, legacy = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    record = {
        **(read_json(legacy) if legacy.exists() else {}),
        **(read_json(path) if path.exists() else {}),
    }
    return validated(TokenizerSettings, record, path)


def read_generation(folder: Path, config: dict[str, Any], settings: MarianSettings) -> GenerationSettings:
    """How to search."""
    path = folder / "generation_config.json"
    record = read_json(path) if path.exists() else config
    path = path if path.exists() else folder / "config.json"
    generation = validated(GenerationSettings, record, path)
    never = [[settings.pad_token_id], [settings.decoder_start_token_id]]
    if others := [words for words in generation.bad_words_ids or [] if words not in never]:
        raise DataError(
            f"{path}: bad_words_ids has {others[0]}; only the padding and the token that outputs begin with "
            "can be kept out of them"
        )
    return generation


def validated(kind: type[_Record], record: dict[str, Any], path: Path) -> _Record:
    """The settings in a file's object."""
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        shown = "" if first["type"] == "missing" else f", not {first['input']!r}"
        raise DataError(f"{path}: {where}: {first['msg']}{shown}") from None
