"""Our models as checkpoints in Hugging Face's format, the inverse of `checkpoints.marian`.

A post-norm model with sinusoidal positions is a Marian model (`MarianMTModel`). Pegasus
(`PegasusForConditionalGeneration`) is the same network with pre-norm and positions in its file: learned
ones and none at all fit into it too.

Source: `modeling_marian.py` and `modeling_pegasus.py` of github.com/huggingface/transformers, version 5.23.0.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from safetensors.torch import save_file
from torch import Tensor

from triptych.attention import LearnedPositions, sinusoidal
from triptych.checkpoints.marian_names import (
    OUTPUT,
    OUTPUT_BIAS,
    POSITIONS,
    SHARED,
    SOURCE,
    TARGET,
    layer_tensors,
)
from triptych.checkpoints.marian_settings import MARIAN_ACTIVATIONS, MarianSettings
from triptych.errors import UsageError
from triptych.models import EncoderDecoder, ModelConfig
from triptych.text import TokenizerPair

Architecture = Literal["marian", "pegasus"]
_CLASSES = {"marian": "MarianMTModel", "pegasus": "PegasusForConditionalGeneration"}
_NORMS = {"encoder_norm": "model.encoder.layer_norm", "decoder_norm": "model.decoder.layer_norm"}


@final
@dataclass(frozen=True)
class Searching:
    """How the checkpoint wants to be searched.

    Attributes:
        beam_size: hypotheses kept.
        alpha: exponent of the length penalty.
        max_extra_tokens: how much longer than its source an output may get.
        until_certain: a sentence is done when nothing can overtake what has ended, not when beam_size
            hypotheses have.
    """

    beam_size: int
    alpha: float
    max_extra_tokens: int
    until_certain: bool


def architecture_for(model: EncoderDecoder) -> Architecture:
    """Which of Hugging Face's architectures computes the same."""
    config = model.config
    scheme = config.positions.scheme
    if config.norm == "post":
        if scheme != "sinusoidal":
            raise UsageError(
                f"positions.scheme is {scheme!r}: Hugging Face's post-norm model (Marian) has sinusoidal "
                "positions only; a model trained with 'sinusoidal', or with norm = 'pre', fits"
            )
        return "marian"
    if scheme not in ("sinusoidal", "learned", "none"):
        raise UsageError(
            f"positions.scheme is {scheme!r}: Hugging Face's pre-norm model (Pegasus) has no positions "
            "inside attention; 'sinusoidal', 'learned' and 'none' fit"
        )
    if model.src_vocab_size != model.tgt_vocab_size:
        raise UsageError(
            f"the vocabularies have {model.src_vocab_size:,} and {model.tgt_vocab_size:,} tokens: Hugging "
            "Face's pre-norm model (Pegasus) has one size for both; a model with tokenizer.joint = true, or "
            "with norm = 'post', fits"
        )
    return "pegasus"


def max_positions(model: EncoderDecoder, max_extra_tokens: int) -> int:
    """Positions that the longest source with its output takes; those learned, if they are learned."""
    config = model.config
    if config.positions.scheme == "learned":
        return config.positions.max_tokens
    return config.max_source_tokens + max_extra_tokens + 1


def position_table(model: EncoderDecoder, side: Literal["src", "tgt"], length: int) -> Tensor:
    """What is added to the embeddings of the first tokens, `[length, d_model]`."""
    positions = model.src_positions if side == "src" else model.tgt_positions
    some, d_model = model.tgt_embedding.weight, model.config.d_model
    if isinstance(positions, LearnedPositions):
        return positions.weight.detach()[:length]
    if model.config.positions.scheme == "none":
        return some.new_zeros(length, d_model)
    return sinusoidal(length, d_model, model.config.positions.sinusoidal_layout).to(some)


def write_checkpoint(
    model: EncoderDecoder,
    num_heads: dict[str, int],
    tokenizers: TokenizerPair,
    searching: Searching,
    folder: Path,
) -> Architecture:
    """Write `config.json`, `generation_config.json` and `model.safetensors`."""
    architecture = architecture_for(model)
    config = _config(architecture, model, num_heads, tokenizers, searching)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation(config, tokenizers, searching))
    tensors = _tensors(architecture, model, MarianSettings.model_validate(config))
    save_file(
        {name: t.cpu().contiguous() for name, t in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return architecture


def _config(
    architecture: Architecture,
    model: EncoderDecoder,
    num_heads: dict[str, int],
    tokenizers: TokenizerPair,
    searching: Searching,
) -> dict[str, Any]:
    own, target = model.config, tokenizers.target
    names = {ours: theirs for theirs, ours in reversed(MARIAN_ACTIVATIONS.items())}
    record: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "dtype": str(model.tgt_embedding.weight.dtype).removeprefix("torch."),
        "is_encoder_decoder": True,
        "d_model": own.d_model,
        "encoder_layers": own.encoder.num_layers,
        "decoder_layers": own.decoder.num_layers,
        "encoder_attention_heads": num_heads["encoder"],
        "decoder_attention_heads": num_heads["decoder"],
        "encoder_ffn_dim": own.d_ff,
        "decoder_ffn_dim": own.d_ff,
        "activation_function": names[own.activation],
        "dropout": own.dropout,
        "attention_dropout": own.encoder_sites()[0].dropout,
        "activation_dropout": own.activation_dropout,
        "max_position_embeddings": max_positions(model, searching.max_extra_tokens),
        "scale_embedding": True,
        "vocab_size": model.src_vocab_size,
        "tie_word_embeddings": _tied(architecture, own),
        "pad_token_id": model.pad_id,
        "bos_token_id": target.bos_id,
        "eos_token_id": target.eos_id,
        "forced_eos_token_id": target.eos_id,
        "decoder_start_token_id": target.bos_id,
    }
    if architecture == "marian":
        record["decoder_vocab_size"] = model.tgt_vocab_size
        record["share_encoder_decoder_embeddings"] = own.tie_embeddings == "all"
    return record


def _tied(architecture: Architecture, config: ModelConfig) -> bool:
    """Whether their switch for one table is on: Marian's is about target and output, Pegasus's about all."""
    return config.tie_embeddings in (("all", "target") if architecture == "marian" else ("all",))


def _generation(config: dict[str, Any], tokenizers: TokenizerPair, searching: Searching) -> dict[str, Any]:
    never = dict.fromkeys((config["pad_token_id"], tokenizers.target.bos_id))
    record: dict[str, Any] = {
        name: config[name]
        for name in (
            "bos_token_id",
            "decoder_start_token_id",
            "eos_token_id",
            "forced_eos_token_id",
            "pad_token_id",
        )
    }
    record |= {
        "bad_words_ids": [[token] for token in never],
        "max_length": config["max_position_embeddings"],
        "num_beams": searching.beam_size,
        # As our search: what is left has probabilities that sum to 1.
        "renormalize_logits": True,
    }
    if searching.beam_size > 1:
        record["length_penalty"] = searching.alpha
        record["early_stopping"] = "never" if searching.until_certain else True
    return record


def _tensors(
    architecture: Architecture, model: EncoderDecoder, settings: MarianSettings
) -> dict[str, Tensor]:
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors = {expected.theirs: own[expected.ours] for expected in layer_tensors(settings)}
    source, target = model.src_embedding.weight.detach(), model.tgt_embedding.weight.detach()
    output, bias = model.output.weight.detach(), model.output.bias
    tensors[OUTPUT_BIAS] = (target.new_zeros(len(target)) if bias is None else bias.detach())[None]
    shared = model.config.tie_embeddings == "all"
    if shared:
        tensors[SHARED] = target
    else:
        tensors |= {SOURCE: source, TARGET: target}
    if not settings.tie_word_embeddings:
        tensors[OUTPUT] = output.clone()
    if architecture == "pegasus":
        for ours, theirs in _NORMS.items():
            tensors |= {f"{theirs}.{kind}": own[f"{ours}.{kind}"] for kind in ("weight", "bias")}
        length = settings.max_position_embeddings
        of_source, of_target = POSITIONS
        tensors[of_source] = position_table(model, "src", length)
        tensors[of_target] = position_table(model, "tgt", length)
        if not shared:
            tensors[SHARED] = source.clone()
    return tensors


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
