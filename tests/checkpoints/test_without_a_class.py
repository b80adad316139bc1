"""Families that `transformers` has no class of its own for: they have another family's layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from checkpoints.oracle import apart, in_float64
from checkpoints.test_model_writing import trained, write_read_model
from triptych.core.checkpoints.stored_models import load_language_model

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
QKV = ("q_proj", "k_proj", "v_proj")


def by_group(state: dict[str, Tensor], at: str) -> Tensor:
    """Group by group two queries, a key and a value, each of 6 rows."""
    q, k, v = (state[f"{at}.{side}_proj.weight"].unflatten(0, (2, -1)) for side in "qkv")
    return torch.cat([q, k, v], dim=1).flatten(0, 1)


def internlm2(folder: Path) -> nn.Module:
    sizes = {**SIZES, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5))
    state = moved(model)
    names = (
        *(("embed_tokens", "tok_embeddings"), ("lm_head", "output"), ("self_attn.o_proj", "attention.wo")),
        *(("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3")),
        *(("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm")),
        ("post_attention_layernorm", "ffn_norm"),
    )
    stored = renamed(state, names, QKV)
    for layer in range(2):
        joined = by_group(state, f"model.layers.{layer}.self_attn")
        stored[f"model.layers.{layer}.attention.wqkv.weight"] = joined
    save(folder, stored, {**sizes, "model_type": "internlm2", "bias": False, "rms_norm_eps": 1e-5})
    return model


def internlm3(folder: Path) -> nn.Module:
    sizes = {**SIZES, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 10, "rms_norm_eps": 1e-5}
    config = transformers.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)
    model = transformers.LlamaForCausalLM(config)
    save(folder, moved(model), {**sizes, "model_type": "internlm3", "qkv_bias": True, "bias": True})
    return model


def openelm(folder: Path) -> nn.Module:
    heads, groups, inner = (4, 6), (2, 3), (32, 48)
    configs = [
        transformers.Qwen3Config(
            **SIZES, head_dim=6, num_attention_heads=q, num_key_value_heads=k, intermediate_size=d
        )
        for q, k, d in zip(heads, groups, inner, strict=True)
    ]
    model = transformers.Qwen3ForCausalLM(configs[0])
    model.model.layers[1] = type(model.model.layers[0])(configs[1], 1)
    state = moved(model)
    names = (
        *(("model.", "transformer."), ("embed_tokens", "token_embeddings")),
        *(("self_attn.o_proj", "attn.out_proj"), ("self_attn", "attn"), ("mlp.down_proj", "ffn.proj_2")),
        *(("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")),
    )
    stored = renamed(state, names, (*QKV, "gate_proj", "up_proj"))
    for layer in range(2):
        at, own = f"model.layers.{layer}", f"transformer.layers.{layer}"
        sides = [state[f"{at}.self_attn.{side}_proj.weight"] for side in "qkv"]
        stored[f"{own}.attn.qkv_proj.weight"] = torch.cat(sides)
        sides = [state[f"{at}.mlp.{side}_proj.weight"] for side in ("gate", "up")]
        stored[f"{own}.ffn.proj_1.weight"] = torch.cat(sides)
    record = {
        **{"model_type": "openelm", "model_dim": 24, "num_transformer_layers": 2, "head_dim": 6},
        **{"num_query_heads": heads, "num_kv_heads": groups, "ffn_multipliers": (1.5, 2.0)},
        **{"ffn_with_glu": True, "ffn_dim_divisor": 16, "normalize_qk_projections": True},
        **{"vocab_size": SIZES["vocab_size"]},
        **{"activation_fn_name": "swish", "normalization_layer_name": "rms_norm", "rope_max_length": 128},
        **{"rope_freq_constant": 10000, "share_input_output_layers": False, "max_context_length": 64},
    }
    save(folder, stored, record)
    return model


def moved(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def renamed(
    state: dict[str, Tensor], names: tuple[tuple[str, str], ...], joined: tuple[str, ...]
) -> dict[str, Tensor]:
    """By their own names, without those that the file holds as one."""
    found = {}
    for name, tensor in state.items():
        own = name
        for theirs, other in names:
            own = own.replace(theirs, other)
        if not any(part in name for part in joined):
            found[own] = tensor.contiguous()
    return found


def save(folder: Path, stored: dict[str, Tensor], record: dict[str, Any]) -> None:
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(record))


@pytest.mark.parametrize("make", [internlm2, internlm3, openelm])
@torch.no_grad()
def test_its_logits_are_those_of_the_same_layers_by_other_names_and_it_is_written_back(
    make: Callable[[Path], nn.Module], tmp_path: Path
) -> None:
    _ = transformers.LlamaForCausalLM, transformers.Qwen3ForCausalLM  # imports their modules
    with in_float64():
        torch.manual_seed(0)
        other = make(tmp_path / "made").eval()
        ids = torch.randint(3, 40, (2, 11))
        expected = other(input_ids=ids).logits
    model = load_language_model(tmp_path / "made")
    assert apart(model(ids).logits, expected) < 1e-10
    cache = model.new_cache()
    steps = [model(ids[:, place : place + 1], cache=cache).logits for place in range(ids.shape[1])]
    assert apart(torch.cat(steps, dim=1), expected) < 1e-10
    write_read_model(trained(model), tmp_path / "made", tmp_path / "written")
    again = load_language_model(tmp_path / "written")
    assert apart(again(ids).logits, model(ids).logits) < 1e-10
