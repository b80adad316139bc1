"""Marian checkpoints in Hugging Face's format (`MarianMTModel`): their tokenizers, search and recipe.

The model is read by its family file. Where a recipe of ours describes it, it has that recipe, so that it can
be converted, rewritten and trained further.

Source: Junczys-Dowmunt et al. 2018, arXiv 1804.00344; `modeling_marian.py` and `tokenization_marian.py`
of github.com/huggingface/transformers, version 5.23.0.
"""

from pathlib import Path

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from triptych.attention import sinusoidal
from triptych.checkpoints.marian_tokenizers import MarianIds, longest_source, read_tokenizers
from triptych.checkpoints.models import Undrawn, load_encoder_decoder, off_meta
from triptych.errors import DataError
from triptych.models import EncoderDecoder, ModelConfig
from triptych.storage.untrusted import read_json, validated
from triptych.text import TokenizerPair

# As recipes and as Marian call them.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
_ROUNDING = 2**-8  # of a table in bfloat16 it is 2⁻⁹


class _Settings(MarianIds):
    """What is read of `config.json`; fields without a default must be there."""

    d_model: int = Field(ge=2)
    encoder_layers: int = Field(ge=1)
    decoder_layers: int = Field(ge=1)
    encoder_attention_heads: int = Field(ge=1)
    decoder_attention_heads: int = Field(ge=1)
    encoder_ffn_dim: int = Field(ge=1)
    decoder_ffn_dim: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=2)
    activation_function: str
    scale_embedding: bool = False
    tie_word_embeddings: bool = True
    dropout: float = Field(0.1, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    activation_dropout: float = Field(0.0, ge=0, lt=1)

    @property
    def has_recipe(self) -> bool:
        return (
            self.scale_embedding
            and self.encoder_ffn_dim == self.decoder_ffn_dim
            and self.activation_function in ACTIVATIONS
        )


def read_marian(folder: Path, device: torch.device | str = "cpu") -> tuple[EncoderDecoder, TokenizerPair]:
    """The model, in evaluation mode, and the tokenizers; one object where both sides have the same."""
    path = folder / "config.json"
    settings = validated(_Settings, read_json(path), path)
    smallest = min(settings.vocab_size, settings.tgt_vocab_size)
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        if getattr(settings, name) >= smallest:
            raise DataError(
                f"{path}: {name} {getattr(settings, name)} is outside the vocabulary of {smallest}"
            )
    longest = longest_source(folder)
    model = load_encoder_decoder(folder)
    if settings.has_recipe:
        model = _with_recipe(model, settings, longest, path)
    return model.to(device), read_tokenizers(folder, settings)


def _with_recipe(
    model: EncoderDecoder, settings: _Settings, longest: int | float | None, path: Path
) -> EncoderDecoder:
    """The model as a recipe makes it, of the same tensors; as it is if it has positions of its own."""
    found = dict(model.named_parameters(remove_duplicate=False))
    for side in ("src", "tgt"):
        table = found.pop(f"{side}_positions.weight", None)
        if table is not None and not _are_sinusoidal(table):
            return model
    if (bias := found.get("output.bias")) is not None and not bias.any():
        del found["output.bias"]
    positions = settings.max_position_embeddings
    most = positions if longest is None else int(min(positions, longest))
    try:
        config = _recipe(settings, most - 1, "output.bias" in found)  # the end takes a position too
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DataError(f"{path}: {message}") from None
    if config.tie_embeddings == "none" and settings.share_encoder_decoder_embeddings:
        # No recipe ties the tables of both sides without the output: each has its own copy.
        found["src_embedding.weight"] = nn.Parameter(found["src_embedding.weight"].detach().clone())
    with torch.device("meta"), Undrawn():
        ours = EncoderDecoder.of(config, model.src_vocab_size, model.tgt_vocab_size, model.pad_id)
    for name, _ in [*ours.named_parameters(remove_duplicate=False)]:
        module, _, own = name.rpartition(".")
        setattr(ours.get_submodule(module), own, found.pop(name))
    assert not found, f"{[*found]} are in no recipe"
    return off_meta(ours).eval()


def _are_sinusoidal(table: Tensor) -> bool:
    rows, width = table.shape
    return bool((table.double() - sinusoidal(rows, width, "halves")).abs().max() <= _ROUNDING)


def _recipe(settings: _Settings, max_source_tokens: int, output_bias: bool) -> ModelConfig:
    biases = dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), True)
    encoder, decoder = (
        {"num_heads": heads, "dropout": settings.attention_dropout, **biases}
        for heads in (settings.encoder_attention_heads, settings.decoder_attention_heads)
    )
    tie = "all" if settings.share_encoder_decoder_embeddings else "target"
    return ModelConfig.model_validate(
        {
            "d_model": settings.d_model,
            "d_ff": settings.encoder_ffn_dim,
            "num_heads": settings.encoder_attention_heads,
            "dropout": settings.dropout,
            "activation_dropout": settings.activation_dropout,
            "activation": ACTIVATIONS[settings.activation_function],
            "norm": "post",
            "tie_embeddings": tie if settings.tie_word_embeddings else "none",
            "output_bias": output_bias,
            "max_source_tokens": max_source_tokens,
            "positions": {"scheme": "sinusoidal", "sinusoidal_layout": "halves"},
            "encoder": {"num_layers": settings.encoder_layers, "attention": encoder},
            "decoder": {
                "num_layers": settings.decoder_layers,
                "attention": decoder,
                "cross_attention": decoder,
            },
        }
    )
