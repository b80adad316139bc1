"""Inference of a recipe's configuration from a model's architecture and layers."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, overload

import torch

from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.models.architecture import (
    EncoderDecoderArchitecture,
    FeedForwardConfig,
    LanguageModelArchitecture,
)
from triptych.core.models.configuration import LanguageModelConfig, ModelConfig
from triptych.core.models.encoder_decoder import AnyModel, EncoderDecoder
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.model_records import describe_semantics
from triptych.core.models.site_configuration import AttentionConfig
from triptych.core.models.sites import attention_sites

# Tried numbers of significant digits of a rotary base.
_DIGITS = range(1, 16)


@overload
def find_config(model: EncoderDecoder) -> ModelConfig: ...


@overload
def find_config(model: LanguageModel) -> LanguageModelConfig: ...


def find_config(model: AnyModel) -> ModelConfig | LanguageModelConfig:
    """Return the configuration of a recipe for a model of the same architecture and layers.

    Raises ValueError if no recipe describes the model.
    """
    layers = {site.name: site.layer for site in attention_sites(model)}
    try:
        found: ModelConfig | LanguageModelConfig
        if isinstance(model, EncoderDecoder):
            found = _of_encoder_decoder(model, layers)
            same = (
                found.architecture(model.src_vocab_size, model.tgt_vocab_size)
                == model.architecture
            )
        else:
            found = _of_language_model(model, layers)
            same = (
                found.architecture(model.architecture.kind, model.vocab_size)
                == model.architecture
            )
        if not same:
            raise ValueError("its architecture is of another kind")
        found = configured(
            found, {name: AttentionConfig.of(layer) for name, layer in layers.items()}
        )
        _require_same_semantics(found, layers)
    except ValueError as error:
        message = str(error).partition("\n")[0]
        raise ValueError(f"no recipe describes the model: {message}") from None
    return found


def has_config(model: AnyModel) -> bool:
    """Return True if a recipe describes a model."""
    try:
        find_config(model)
    except ValueError:
        return False
    return True


def configured(
    config: ModelConfig | LanguageModelConfig, sites: Mapping[str, AttentionConfig]
) -> ModelConfig | LanguageModelConfig:
    """Return the configuration with these attention sites, by name.

    The most frequent site of a stack is its default, and other sites are exceptions by layer.
    """
    # Configurations are compared as JSON.
    of_stack: dict[str, dict[int, AttentionConfig]] = {}
    for name, site in sites.items():
        stack, index = name.split(".")
        of_stack.setdefault(stack, {})[int(index)] = site
    record = config.model_dump()
    for stack, layers in of_stack.items():
        dumps = {i: site.model_dump_json() for i, site in layers.items()}
        most = Counter(dumps.values()).most_common(1)[0][0]
        half = "encoder" if stack == "encoder" else "decoder"
        own = record[half] if isinstance(config, ModelConfig) else record
        kind = "cross_attention" if stack == "cross" else "attention"
        own[kind] = AttentionConfig.model_validate_json(most)
        own[f"{kind}_in_layer"] = {
            i: site for i, site in layers.items() if dumps[i] != most
        }
    return type(config).model_validate(record)


def _of_encoder_decoder(
    model: EncoderDecoder, layers: Mapping[str, MultiHeadAttention]
) -> ModelConfig:
    made: EncoderDecoderArchitecture = model.architecture
    block = made.decoder.blocks[0]
    feed_forward = _require_feed_forward(block.feed_forward)
    head = made.decoder.head
    tied = head is not None and head.tied
    return ModelConfig.model_validate(
        {
            "d_model": made.decoder.d_model,
            "d_ff": feed_forward.d_ff,
            "num_heads": layers["encoder.0"].num_heads,
            "dropout": block.attention.dropout,
            "activation_dropout": feed_forward.dropout,
            "activation": feed_forward.activation,
            "norm": block.attention.place,
            "tie_embeddings": "all" if made.shared else "target" if tied else "none",
            "output_bias": head is not None and head.bias,
            "max_source_tokens": model.max_source_tokens
            or ModelConfig().max_source_tokens,
            "positions": _positions(made.encoder, layers["encoder.0"]),
            "encoder": {
                "num_layers": len(made.encoder.blocks),
                "attention": AttentionConfig.of(layers["encoder.0"]),
            },
            "decoder": {
                "num_layers": len(made.decoder.blocks),
                "attention": AttentionConfig.of(layers["decoder.0"]),
                "cross_attention": AttentionConfig.of(layers["cross.0"]),
            },
        }
    )


def _of_language_model(
    model: LanguageModel, layers: Mapping[str, MultiHeadAttention]
) -> LanguageModelConfig:
    made = model.architecture
    block = made.blocks[0]
    feed_forward = _require_feed_forward(block.feed_forward)
    norm = block.attention.norm
    if norm is None:
        raise ValueError("its blocks have no norm")
    first = layers[f"{made.kind}.0"]
    return LanguageModelConfig.model_validate(
        {
            "num_layers": len(made.blocks),
            "d_model": made.d_model,
            "d_ff": feed_forward.d_ff,
            "num_heads": first.num_heads,
            "attention": AttentionConfig.of(first),
            "dropout": block.attention.dropout,
            "activation_dropout": feed_forward.dropout,
            "activation": feed_forward.activation,
            "gated": feed_forward.gated,
            "norm": block.attention.place,
            "norm_kind": norm.kind,
            "norm_eps": norm.eps,
            "bias": norm.bias,
            "tie_embeddings": made.head is not None and made.head.tied,
            "context": model.context or LanguageModelConfig().context,
            "positions": _positions(made, first),
        }
    )


def _require_feed_forward(found: object) -> FeedForwardConfig:
    if not isinstance(found, FeedForwardConfig):
        raise ValueError("it has a mixture of experts")
    return found


def _positions(
    made: LanguageModelArchitecture, layer: MultiHeadAttention
) -> dict[str, Any]:
    """Return the position encoding of a stack, of its embeddings or of its first layer."""
    embeddings = made.embeddings
    rotary = layer.semantics.rotary
    if embeddings.positions == "learned":
        return {"scheme": "learned", "max_tokens": embeddings.num_positions}
    if embeddings.positions == "sinusoidal":
        return {
            "scheme": "sinusoidal",
            "sinusoidal_layout": embeddings.sinusoidal_layout,
        }
    if rotary is None:
        return {"scheme": "none" if layer.semantics.bias is None else "alibi"}
    return {
        "scheme": "rotary",
        "rotary_dim": 2 * len(rotary.frequencies),
        "rotary_pairing": rotary.pairing,
        "rotary_base": _rotary_base(rotary),
    }


def _rotary_base(rotary: RotaryEmbedding) -> float:
    """Return the base of exactly these frequencies, with as few digits as possible; else ValueError."""
    frequencies = rotary.frequencies
    count = len(frequencies)
    near = float(frequencies[1].double()) ** -count if count > 1 else 10_000.0
    for digits in _DIGITS:
        base = float(f"{near:.{digits}g}")
        if torch.equal(
            RotaryEmbedding.of_width(2 * count, base).frequencies, frequencies
        ):
            return base
    raise ValueError("its rotary frequencies are no powers of a base")


def _require_same_semantics(
    config: ModelConfig | LanguageModelConfig, layers: Mapping[str, MultiHeadAttention]
) -> None:
    """Check that the configuration gives its layers the semantics of the given layers."""
    made: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items():
        stack, _, number = name.partition(".")
        own = config.sites(stack) if isinstance(config, ModelConfig) else config.sites()  # type: ignore[arg-type]
        site = own[int(number)]
        positions = None if stack == "cross" else config.positions.in_attention()
        key = f"{positions} {site.model_dump_json()}"
        if key not in made:
            with torch.random.fork_rng(devices=[]):  # initial values are not used
                fresh = site.layer(config.d_model, config.num_heads, positions)
            made[key] = _without_kind(fresh)
        if _without_kind(layer) != made[key]:
            raise ValueError(f"the semantics of {name} are of another kind")


def _without_kind(layer: MultiHeadAttention) -> dict[str, Any]:
    """Return the semantics as data, without the kind of attention: the stack determines it."""
    return {
        name: value
        for name, value in describe_semantics(layer).items()
        if name != "kind"
    }
