"""Models of recipes in the formats of families: Marian, Pegasus, GPT-2 and Llama.

The family file says which of our tensors each stored tensor comes from. This module gives the settings of
`config.json`, and the names and shapes of the stored tensors.

Source: `modeling_*.py` of marian, pegasus, gpt2 and llama, github.com/huggingface/transformers, version 5.23.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from triptych.algebra.weights import AttentionWeights
from triptych.attention import PositionIds
from triptych.checkpoints.model_parts import ACTIVATIONS
from triptych.checkpoints.models import new_tensors
from triptych.checkpoints.translators import ACTIVATIONS as MARIAN_ACTIVATIONS
from triptych.converting.plain import (
    HeadSizes,
    PlainModel,
    head_sizes,
    max_positions,
    padded,
    plain_layer,
    position_table,
    rotary_base,
)
from triptych.errors import UsageError
from triptych.models import EncoderDecoder, LanguageModel
from triptych.models.architecture import FeedForwardConfig, NormConfig
from triptych.models.blocks import Block
from triptych.models.sites import attention_sites
from triptych.text import TokenizerPair

# The width of the stream, among sizes.
_D: Literal["d_model"] = "d_model"
_Names = Mapping[str, tuple[int | Literal["d_model"], ...]]
_ACTIVATIONS = {our: their for their, our in reversed([*ACTIVATIONS.items()])}


@final
@dataclass(frozen=True)
class Exported:
    """A model in a format."""

    settings: Mapping[str, Any]  # of its `config.json`.
    tensors: Mapping[str, Tensor]  # by the format's names
    done: tuple[str, ...] = ()  # what was done to make the model fit, in words


def _maps(at: str, maps: _Names, bias_from: int | None = 0) -> _Names:
    """Shapes of weights and biases; a bias is as long as dimension `bias_from` of its weight (None: none)."""
    found = {f"{at}.{name}.weight": shape for name, shape in maps.items()}
    if bias_from is not None:
        found |= {f"{at}.{name}.bias": (shape[bias_from],) for name, shape in maps.items()}
    return found


def _shapes(names: _Names, d_model: int) -> dict[str, tuple[int, ...]]:
    return {name: tuple(d_model if n == _D else n for n in shape) for name, shape in names.items()}


# Encoder-decoders.


def translator_type(model: EncoderDecoder) -> Literal["marian", "pegasus"]:
    """Which of Hugging Face's architectures computes the same: Pegasus is Marian with pre-norm."""
    scheme = model.config.positions.scheme
    if model.config.norm == "post":
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


def translator(plain: PlainModel, tokenizers: TokenizerPair, max_extra_tokens: int) -> Exported:
    """A translator with plainly written heads in the format of Marian or Pegasus."""
    model, config = plain.model, plain.model.config
    kind, target = translator_type(model), tokenizers.target
    length, shared = max_positions(model, max_extra_tokens), config.tie_embeddings == "all"
    # Marian's switch is about target and output, Pegasus's about all tables.
    tied = shared or (kind == "marian" and config.tie_embeddings == "target")
    names = {our: their for their, our in reversed(MARIAN_ACTIVATIONS.items())}
    settings: dict[str, Any] = {
        "architectures": [{"marian": "MarianMTModel", "pegasus": "PegasusForConditionalGeneration"}[kind]],
        "model_type": kind,
        "dtype": str(model.decoder.embeddings.table.weight.dtype).removeprefix("torch."),
        "is_encoder_decoder": True,
        "d_model": config.d_model,
        "encoder_layers": config.encoder.num_layers,
        "decoder_layers": config.decoder.num_layers,
        "encoder_attention_heads": plain.num_heads["encoder"],
        "decoder_attention_heads": plain.num_heads["decoder"],
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": names[config.activation],
        "dropout": config.dropout,
        "attention_dropout": config.sites("encoder")[0].dropout,
        "activation_dropout": config.activation_dropout,
        "max_position_embeddings": length,
        "scale_embedding": True,
        "vocab_size": model.src_vocab_size,
        "tie_word_embeddings": tied,
        "pad_token_id": model.pad_id,
        "bos_token_id": target.bos_id,
        "eos_token_id": target.eos_id,
        "forced_eos_token_id": target.eos_id,
        "decoder_start_token_id": target.bos_id,
    }
    if kind == "marian":
        settings["decoder_vocab_size"] = model.tgt_vocab_size
        settings["share_encoder_decoder_embeddings"] = shared
    stored = _translator_names(model, kind, length, shared=shared, tied=tied)
    given = {
        f"{half}.embeddings.positions.weight": position_table(stack, length)
        for half, stack in model.stacks.items()
    }
    sites = sorted(attention_sites(model), key=lambda site: site.stack == "cross")
    layers = [site.layer.weights() for site in sites]
    tensors = new_tensors(model, layers, settings, _shapes(stored, config.d_model), given)
    if "lm_head.weight" in tensors:  # it may be the decoder's table, a tie that Pegasus does not have
        tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    done: tuple[str, ...] = ()
    if config.positions.scheme == "sinusoidal" and config.positions.sinusoidal_layout == "interleaved":
        done = ("channels of the whole model reordered: sines before cosines",)
        order = torch.cat([torch.arange(start, config.d_model, 2) for start in (0, 1)])
        for name, shape in stored.items():
            for dim, size in enumerate(shape):
                if size == _D:
                    tensors[name] = tensors[name].index_select(dim, order)
    if kind == "pegasus" and not shared:
        tensors["model.shared.weight"] = tensors["model.encoder.embed_tokens.weight"].clone()
    return Exported(settings, tensors, done)


def _translator_names(
    model: EncoderDecoder, kind: str, length: int, *, shared: bool, tied: bool
) -> dict[str, tuple[int | Literal["d_model"], ...]]:
    d_model, d_ff = model.config.d_model, model.config.d_ff
    source, target = model.src_vocab_size, model.tgt_vocab_size
    tables = (
        {"shared": source} if shared else {"encoder.embed_tokens": source, "decoder.embed_tokens": target}
    )
    found: dict[str, Any] = {f"model.{name}.weight": (rows, _D) for name, rows in tables.items()}
    found["final_logits_bias"] = (1, target)
    if not tied:
        found["lm_head.weight"] = (target, _D)
    feed_forward: _Names = {"fc1": (d_ff, _D), "fc2": (_D, d_ff), "final_layer_norm": (_D,)}
    for stack, kinds in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        layer = dict(feed_forward)
        for at in kinds:
            layer |= {f"{at}.{side}_proj": (d_model, _D) for side in "qkv"}
            layer |= {f"{at}.out_proj": (_D, d_model), f"{at}_layer_norm": (_D,)}
        for number in range(len(getattr(model, stack).blocks)):
            found |= _maps(f"model.{stack}.layers.{number}", layer)
        if kind == "pegasus":
            found |= _maps(f"model.{stack}", {"layer_norm": (_D,)})
            found[f"model.{stack}.embed_positions.weight"] = (length, _D)
    return found


# Language models.


def language_model(model: LanguageModel) -> Exported:
    """A language model of a recipe in the first format that holds it."""
    reasons = []
    for fold in (_as_gpt2, _as_llama):
        try:
            return fold(model)
        except UsageError as error:
            reasons.append(str(error))
    raise UsageError(f"no format of transformers holds this model: {'; '.join(reasons)}")


def _refusing(format_name: str) -> Callable[[str], UsageError]:
    return lambda what: UsageError(f"{format_name} has no place for it: {what}")


def _require(
    model: LanguageModel, refused: Callable[[str], UsageError], kind: str, *, gated: bool
) -> tuple[NormConfig, FeedForwardConfig]:
    """Check all but attention against the format; the norm and the feed-forward layer of every block."""
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
    feed_forward = made.blocks[0].feed_forward
    assert isinstance(feed_forward, FeedForwardConfig), "recipes have no other ones"
    if feed_forward.gated != gated:
        raise refused(f"its feed-forward layers have {'no' if gated else 'a'} gate")
    return norm, feed_forward


def _blocks(blocks: Any) -> list[Block]:
    return [block for block in blocks if isinstance(block, Block)]


def _context(model: LanguageModel) -> int:
    assert model.config is not None, "the model is a recipe's"
    return model.config.context


def _exported(
    model: LanguageModel,
    layers: Sequence[AttentionWeights],
    settings: Mapping[str, Any],
    names: Mapping[str, Any],
    given: Mapping[str, Tensor],
    as_trained: bool = True,
) -> Exported:
    d_model = model.architecture.d_model
    assert model.head is not None
    tied = model.head.config.tied
    if not tied:
        names = {**names, "lm_head.weight": (model.vocab_size, _D)}
    dtype = str(model.embeddings.table.weight.dtype).removeprefix("torch.")
    settings = {**settings, "tie_word_embeddings": tied, "vocab_size": model.vocab_size, "dtype": dtype}
    made_of = {block.self_attention.parameterisation.name for block in _blocks(model.blocks)}
    plain = as_trained and made_of <= {"factored", "grouped"}
    done = () if plain else ("the maps of every head multiplied out",)
    return Exported(settings, new_tensors(model, layers, settings, _shapes(names, d_model), given), done)


def _as_gpt2(model: LanguageModel) -> Exported:
    refused = _refusing("GPT-2's format")
    norm, feed_forward = _require(model, refused, "layer", gated=False)
    if any(block.self_attention.semantics.rotary is not None for block in _blocks(model.blocks)):
        raise refused("rotary positions")
    layers = [plain_layer(block, number, refused) for number, block in enumerate(_blocks(model.blocks))]
    d_model, d_ff = model.architecture.d_model, feed_forward.d_ff
    found = head_sizes(layers, refused)
    width = d_model // found.num_heads
    if d_model % found.num_heads or width < found.width:
        raise refused(f"{found.num_heads} heads of {found.width} channels are more than d_model {d_model}")
    sizes = HeadSizes(found.num_heads, found.num_heads, width)
    positions = _positions(model)
    settings = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": len(positions),
        "n_embd": d_model,
        "n_layer": len(layers),
        "n_head": sizes.num_heads,
        "n_inner": d_ff,
        "activation_function": _ACTIVATIONS[feed_forward.activation],
        "layer_norm_epsilon": norm.eps,
        "tie_word_embeddings": True,  # its place in the file: `_exported` sets it
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }
    layer: _Names = {
        "ln_1": (_D,),
        "attn.c_attn": (_D, 3 * d_model),
        "attn.c_proj": (d_model, _D),
        "ln_2": (_D,),
        "mlp.c_fc": (_D, d_ff),
        "mlp.c_proj": (d_ff, _D),
    }
    names: dict[str, Any] = {
        "transformer.wte.weight": (model.vocab_size, _D),
        "transformer.wpe.weight": (len(positions), _D),
    }
    names |= _maps("transformer", {"ln_f": (_D,)})
    for number in range(len(layers)):
        names |= _maps(f"transformer.h.{number}", layer, bias_from=-1)
    given = {"embeddings.positions.weight": positions}
    padded_layers = [padded(weights, sizes) for weights in layers]
    return _exported(model, padded_layers, settings, names, given, sizes == found)


@torch.no_grad()
def _positions(model: LanguageModel) -> Tensor:
    """What is added for every position, a table that is stored or computed."""
    length, table = _context(model), model.embeddings.table.weight
    if model.architecture.embeddings.positions == "learned":
        return model.embeddings.positions.get_parameter("weight")
    zeros = table.new_zeros(1, length, model.architecture.d_model)
    added: Tensor = model.embeddings.positions(zeros, PositionIds(torch.arange(length), length))
    return added[0]


def _as_llama(model: LanguageModel) -> Exported:
    refused = _refusing("Llama's")
    norm, feed_forward = _require(model, refused, "rms", gated=True)
    layers = [plain_layer(block, number, refused) for number, block in enumerate(_blocks(model.blocks))]
    d_model, d_ff = model.architecture.d_model, feed_forward.d_ff
    sizes, rotary = head_sizes(layers, refused), layers[0].semantics.rotary
    if rotary is None or rotary.pairing != "halves" or model.architecture.embeddings.positions != "none":
        raise refused("positions other than rotary ones of two halves")
    if 2 * len(rotary.frequencies) != sizes.width:
        raise refused(f"{2 * len(rotary.frequencies)} of {sizes.width} channels of a head are rotated")
    biases = any(
        bias is not None and bool(bias.any())
        for weights in layers
        for bias in (weights.multiplied(side).bias for side in ("q", "k", "v"))
    ) or any(weights.o_bias is not None for weights in layers)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d_model,
        "intermediate_size": d_ff,
        "num_hidden_layers": len(layers),
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.width,
        "hidden_act": _ACTIVATIONS[feed_forward.activation],
        "max_position_embeddings": _context(model),
        "rms_norm_eps": norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": rotary_base(rotary, refused)},
        "attention_bias": biases,
        "mlp_bias": feed_forward.bias,
    }
    rows, kv_rows = sizes.num_heads * sizes.width, sizes.num_kv_heads * sizes.width
    attention: _Names = {
        "q_proj": (rows, _D),
        "k_proj": (kv_rows, _D),
        "v_proj": (kv_rows, _D),
        "o_proj": (_D, rows),
    }
    mlp: _Names = {"gate_proj": (d_ff, _D), "up_proj": (d_ff, _D), "down_proj": (_D, d_ff)}
    names: dict[str, Any] = {"model.embed_tokens.weight": (model.vocab_size, _D), "model.norm.weight": (_D,)}
    for number in range(len(layers)):
        at = f"model.layers.{number}"
        names |= _maps(at, {"input_layernorm": (_D,), "post_attention_layernorm": (_D,)}, None)
        names |= _maps(f"{at}.self_attn", attention, 0 if biases else None)
        names |= _maps(f"{at}.mlp", mlp, 0 if feed_forward.bias else None)
    padded_layers = [padded(weights, sizes) for weights in layers]
    return _exported(model, padded_layers, settings, names, {})
