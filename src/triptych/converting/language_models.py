"""A run of a language model as a folder that `AutoModelForCausalLM` reads.

A run that went on with a checkpoint has the format of its family. A model of a recipe is written in GPT-2's
or Llama's, where it folds into one of them.

Source of the formats: `models/gpt2` and `models/llama` of github.com/huggingface/transformers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from triptych.algebra.weights import AttentionWeights
from triptych.attention import PositionIds
from triptych.checkpoints.models import load_language_model
from triptych.converting.checks import (
    TOLERANCES,
    ConversionCheck,
    Written,
    compare_logits,
    quiet_transformers,
)
from triptych.converting.plain_layers import (
    HeadSizes,
    PaddedMaps,
    head_sizes,
    padded_maps,
    plain_layer,
    rotary_base,
)
from triptych.errors import DataError, UsageError
from triptych.extras import is_installed
from triptych.files import write_text
from triptych.models import LanguageModel
from triptych.models.architecture import FeedForwardConfig, NormConfig
from triptych.models.blocks import Block
from triptych.models.feed_forward import FeedForward
from triptych.models.storage import write_weights
from triptych.opening import OpenedModel
from triptych.text import PretrainedTokenizer
from triptych.training.continuing import copy_checkpoint, goes_on

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "gelu_sigmoid": "quick_gelu",
    "swish": "silu",
    "relu_squared": "relu2",
}
_LOGITS = "logits of the folder, read by {}, and of the model"
_SAMPLES = (
    "A little girl, 3 years old: it costs $12.50!",
    "  two  spaces\tand a tab\n",
    "snake_case é ½ 🙂",
    "",
)


def write_language_model(opened: OpenedModel, folder: Path) -> Written:
    """Fill a folder with the model and the tokenizer of a run."""
    if goes_on(opened.folder):
        copy_checkpoint(opened.folder, folder)
        name, folded = "as the checkpoint that the run went on with", tuple[str, ...]()
    else:
        name, folded = _write_folded(opened, folder)
    checks = (_check_with_triptych(opened.language_model, folder), *_checks_with_transformers(opened, folder))
    count = sum(parameter.numel() for parameter in load_language_model(folder).model.parameters())
    return Written(name, count, folded, checks)


def _write_folded(opened: OpenedModel, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Write a model of a recipe in the first format that holds it; its name, and what was done."""
    model, reasons = opened.language_model, []
    for name, fold in (("gpt2", _as_gpt2), ("llama", _as_llama)):
        try:
            found = fold(model)
        except UsageError as error:
            reasons.append(str(error))
            continue
        _write(opened, found, folder)
        folded = () if found.plain else ("the maps of every head multiplied out",)
        return name, folded
    raise UsageError(f"no format of transformers holds this model: {'; '.join(reasons)}")


@final
@dataclass(frozen=True)
class _Folded:
    """A model in a format.

    Attributes:
        settings: of its `config.json`.
        tensors: by its names.
        plain: whether nothing had to be multiplied out.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    plain: bool


def _write(opened: OpenedModel, found: _Folded, folder: Path) -> None:
    model, tokenizer = opened.language_model, opened.tokenizer
    assert isinstance(tokenizer, PretrainedTokenizer)
    dtype = str(model.embeddings.table.weight.dtype).removeprefix("torch.")
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    common = {"vocab_size": model.vocab_size, "dtype": dtype, **ids, "use_cache": True}
    write_text(folder / "config.json", json.dumps({**found.settings, **common}, indent=2) + "\n")
    tensors = {name: tensor.detach().contiguous() for name, tensor in found.tensors.items()}
    write_weights(tensors, folder / "model.safetensors")
    tokenizer.save_files(folder)


def _refusing(format_name: str) -> Callable[[str], UsageError]:
    return lambda what: UsageError(f"{format_name} has no place for it: {what}")


def _require(model: LanguageModel, refused: Callable[[str], UsageError], kind: str) -> NormConfig:
    """All but attention and feed-forward layers is what both formats hold; the norm that all are."""
    made = model.architecture
    embeddings, head, norm = made.embeddings, made.head, made.final_norm
    names = {"layer": "LayerNorm", "rms": "RMSNorm"}
    if made.kind != "decoder":
        raise refused("it is an encoder")
    if norm is None or any(
        frame.place != "pre" or frame.norm is None or frame.out_norm is not None or frame.scale != 1.0
        for block in made.blocks
        for frame in (block.attention, block.feed_forward_frame)
    ):
        raise refused("its norms stand in other places than before each sub-layer and after the last block")
    if norm.kind != kind:
        raise refused(f"its norms are {names[norm.kind]}, not {names[kind]}")
    if embeddings.norm is not None or embeddings.scale != 1.0 or embeddings.width is not None:
        raise refused("its embeddings are scaled, normalised or of another width")
    if head is None or head.bias or head.transform or head.scale != 1.0 or head.soft_cap is not None:
        raise refused("its logits are more than a product with the output table")
    return norm


def _feed_forward(
    model: LanguageModel, refused: Callable[[str], UsageError], *, gated: bool
) -> FeedForwardConfig:
    config = model.architecture.blocks[0].feed_forward
    assert isinstance(config, FeedForwardConfig), "recipes have no other ones"
    if config.gated != gated:
        raise refused(f"its feed-forward layers have {'no' if gated else 'a'} gate")
    return config


def _blocks(model: LanguageModel) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def _maps(block: Block) -> FeedForward:
    assert isinstance(block.feed_forward, FeedForward)
    return block.feed_forward


def _context(model: LanguageModel) -> int:
    assert model.config is not None, "the model is a recipe's"
    return model.config.context


def _is_plain(model: LanguageModel) -> bool:
    return all(
        block.self_attention.parameterisation.name in ("factored", "grouped") for block in _blocks(model)
    )


def _as_gpt2(model: LanguageModel) -> _Folded:
    refused = _refusing("GPT-2's format")
    norm, feed_forward = _require(model, refused, "layer"), _feed_forward(model, refused, gated=False)
    if any(block.self_attention.semantics.rotary is not None for block in _blocks(model)):
        raise refused("rotary positions")
    layers = [plain_layer(block, number, refused) for number, block in enumerate(_blocks(model))]
    found, d_model = head_sizes(layers, refused), model.architecture.d_model
    width = d_model // found.num_heads
    if d_model % found.num_heads or width < found.width:
        raise refused(f"{found.num_heads} heads of {found.width} channels are more than d_model {d_model}")
    sizes = HeadSizes(found.num_heads, found.num_heads, width)
    positions = _positions(model)
    tensors = {"transformer.wte.weight": model.embeddings.table.weight, "transformer.wpe.weight": positions}
    tensors |= _norm("transformer.ln_f", model.final_norm, d_model)
    for number, (block, weights) in enumerate(zip(_blocks(model), layers, strict=True)):
        tensors |= _gpt2_block(f"transformer.h.{number}", block, weights, sizes)
    assert model.head is not None
    if not model.head.config.tied:
        tensors["lm_head.weight"] = model.head.output.weight
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": len(positions),
        "n_embd": d_model,
        "n_layer": len(layers),
        "n_head": sizes.num_heads,
        "n_inner": feed_forward.d_ff,
        "activation_function": _ACTIVATIONS[feed_forward.activation],
        "layer_norm_epsilon": norm.eps,
        "tie_word_embeddings": model.head.config.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }
    return _Folded(settings, tensors, _is_plain(model) and sizes == found)


def _gpt2_block(at: str, block: Block, weights: AttentionWeights, sizes: HeadSizes) -> dict[str, Tensor]:
    maps, d_model = padded_maps(weights, sizes), weights.d_model
    o_bias = maps.weights["o"].new_zeros(d_model) if weights.o_bias is None else weights.o_bias
    return {
        f"{at}.attn.c_attn.weight": torch.cat([maps.weights[side] for side in "qkv"]).T,
        f"{at}.attn.c_attn.bias": torch.cat([maps.biases[side] for side in "qkv"]),
        f"{at}.attn.c_proj.weight": maps.weights["o"].T,
        f"{at}.attn.c_proj.bias": o_bias,
        **_norm(f"{at}.ln_1", block.self_residual.norm, d_model),
        **_norm(f"{at}.ln_2", block.feed_forward_residual.norm, d_model),
        **_linear(f"{at}.mlp.c_fc", _maps(block).inner, transposed=True, bias=True),
        **_linear(f"{at}.mlp.c_proj", _maps(block).outer, transposed=True, bias=True),
    }


@torch.no_grad()
def _positions(model: LanguageModel) -> Tensor:
    """What is added for every position, a table that is stored or computed."""
    length, table = _context(model), model.embeddings.table.weight
    if model.architecture.embeddings.positions == "learned":
        return model.embeddings.positions.get_parameter("weight")
    zeros = table.new_zeros(1, length, model.architecture.d_model)
    added: Tensor = model.embeddings.positions(zeros, PositionIds(torch.arange(length), length))
    return added[0]


def _as_llama(model: LanguageModel) -> _Folded:
    refused = _refusing("Llama's")
    norm, feed_forward = _require(model, refused, "rms"), _feed_forward(model, refused, gated=True)
    layers = [plain_layer(block, number, refused) for number, block in enumerate(_blocks(model))]
    sizes, d_model = head_sizes(layers, refused), model.architecture.d_model
    rotary = layers[0].semantics.rotary
    if rotary is None or rotary.pairing != "halves" or model.architecture.embeddings.positions != "none":
        raise refused("positions other than rotary ones of two halves")
    if 2 * len(rotary.frequencies) != sizes.width:
        raise refused(f"{2 * len(rotary.frequencies)} of {sizes.width} channels of a head are rotated")
    maps, bias = [padded_maps(weights, sizes) for weights in layers], feed_forward.bias
    in_attention = any(weights.o_bias is not None for weights in layers)
    in_attention |= any(bool(own.any()) for one in maps for own in one.biases.values())
    tensors = {"model.embed_tokens.weight": model.embeddings.table.weight}
    tensors["model.norm.weight"] = model.final_norm.get_parameter("weight")
    for number, (block, weights, one) in enumerate(zip(_blocks(model), layers, maps, strict=True)):
        at = f"model.layers.{number}"
        tensors |= _llama_attention(f"{at}.self_attn", weights, one, biases=in_attention)
        tensors |= _llama_beside(at, block, bias=bias)
    assert model.head is not None
    if not model.head.config.tied:
        tensors["lm_head.weight"] = model.head.output.weight
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d_model,
        "intermediate_size": feed_forward.d_ff,
        "num_hidden_layers": len(layers),
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.width,
        "hidden_act": _ACTIVATIONS[feed_forward.activation],
        "max_position_embeddings": _context(model),
        "rms_norm_eps": norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": rotary_base(rotary, refused)},
        "attention_bias": in_attention,
        "mlp_bias": bias,
        "tie_word_embeddings": model.head.config.tied,
    }
    return _Folded(settings, tensors, _is_plain(model))


def _llama_attention(
    at: str, weights: AttentionWeights, maps: PaddedMaps, *, biases: bool
) -> dict[str, Tensor]:
    tensors = {f"{at}.{side}_proj.weight": maps.weights[side] for side in "qkvo"}
    if biases:
        zeros = maps.weights["o"].new_zeros(weights.d_model)
        tensors |= {f"{at}.{side}_proj.bias": maps.biases[side] for side in "qkv"}
        tensors[f"{at}.o_proj.bias"] = zeros if weights.o_bias is None else weights.o_bias
    return tensors


def _llama_beside(at: str, block: Block, *, bias: bool) -> dict[str, Tensor]:
    fed = _maps(block)
    assert fed.gate is not None
    return {
        f"{at}.input_layernorm.weight": block.self_residual.norm.get_parameter("weight"),
        f"{at}.post_attention_layernorm.weight": block.feed_forward_residual.norm.get_parameter("weight"),
        **_linear(f"{at}.mlp.gate_proj", fed.gate, bias=bias),
        **_linear(f"{at}.mlp.up_proj", fed.inner, bias=bias),
        **_linear(f"{at}.mlp.down_proj", fed.outer, bias=bias),
    }


def _norm(name: str, norm: nn.Module, d_model: int) -> dict[str, Tensor]:
    weight, bias = norm.get_parameter("weight"), getattr(norm, "bias", None)
    return {f"{name}.weight": weight, f"{name}.bias": weight.new_zeros(d_model) if bias is None else bias}


def _linear(name: str, linear: nn.Linear, *, bias: bool, transposed: bool = False) -> dict[str, Tensor]:
    weight = linear.weight.T if transposed else linear.weight
    zeros = weight.new_zeros(linear.out_features)
    biases = {f"{name}.bias": zeros if linear.bias is None else linear.bias} if bias else {}
    return {f"{name}.weight": weight, **biases}


def _random_ids(model: LanguageModel) -> Tensor:
    length = min(24, model.max_tokens or 24)
    return torch.randint(model.vocab_size, (3, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _check_with_triptych(model: LanguageModel, folder: Path) -> ConversionCheck:
    again, ids = load_language_model(folder).model, _random_ids(model)
    dtype = model.embeddings.table.weight.dtype
    return compare_logits(
        _LOGITS.format("triptych"), model.eval()(ids).logits, again(ids).logits, TOLERANCES[dtype]
    )


@torch.no_grad()
def _checks_with_transformers(opened: OpenedModel, folder: Path) -> list[ConversionCheck]:
    what, of_ids = _LOGITS.format("transformers"), "token ids of AutoTokenizer and ours"
    if not is_installed("transformers"):
        note = "transformers is not installed: pip install 'triptych[convert]'"
        return [ConversionCheck(what, False, note=note), ConversionCheck(of_ids, False, note=note)]
    with quiet_transformers():
        import transformers

        model, ids = opened.language_model, _random_ids(opened.language_model)
        auto = transformers.AutoModelForCausalLM if model.causal else transformers.AutoModelForMaskedLM
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        theirs = auto.from_pretrained(folder, dtype="auto", **options).eval()
        dtype = model.embeddings.table.weight.dtype
        checks = [compare_logits(what, model(ids).logits, theirs(ids).logits, TOLERANCES[dtype])]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        for text in _SAMPLES:
            found, (own,) = (
                list(tokenizer(text)["input_ids"]),
                opened.tokenizer.encode(text, add_special=True, parse_special=True),
            )
            if found != own:
                raise DataError(f"{of_ids}: {text!r} is {found} there and {own} here: nothing is written")
        return [*checks, ConversionCheck(of_ids, True, note=f"{len(_SAMPLES)} texts")]
