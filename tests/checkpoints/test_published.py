"""What published files have that models made on the spot do not: old names, mixed dtypes, leftovers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edited import edited_json, edited_tensors
from small_checkpoints import HEADS, WIDTH, D, llama, read_all
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.errors import ConfigurationWarning, DataError

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def changed(folder: Path, change: Change) -> Path:
    """A checkpoint with something done to its tensors and its configuration."""
    with edited_tensors(folder) as tensors, edited_json(folder / "config.json") as config:
        change(tensors, config)
    return folder


def written(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bart(folder: Path) -> Path:
    tensors: dict[str, Tensor] = {}
    for stack, kinds in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        for kind in kinds:
            for side in ("q_proj", "k_proj", "v_proj", "out_proj"):
                at = f"model.{stack}.layers.0.{kind}.{side}"
                tensors[f"{at}.weight"], tensors[f"{at}.bias"] = torch.randn(D, D), torch.randn(D)
    config: dict[str, Any] = {"model_type": "bart", "d_model": D}
    for stack in ("encoder", "decoder"):
        config |= {f"{stack}_layers": 1, f"{stack}_attention_heads": HEADS}
    return written(folder, tensors, config)


def test_maps_and_norms_may_have_several_dtypes(tmp_path: Path) -> None:
    def mix(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in tensors:
            if "_proj" in name:
                tensors[name] = tensors[name].bfloat16()

    checkpoint = open_checkpoint(changed(llama(tmp_path / "llama"), mix))
    layer = checkpoint.read(checkpoint.sites[0])
    assert layer.weights.dtype == torch.float32
    stored = load_file(tmp_path / "llama" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(layer.weights.W_Q.mT.flatten(0, 1), stored.float())


def test_float8_with_norms_in_bfloat16_is_read_and_without_scales_refused(tmp_path: Path) -> None:
    def narrow(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in list(tensors):
            if "_proj" in name:
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
                tensors[name.replace("weight", "input_scale")] = torch.ones(1)
            else:
                tensors[name] = tensors[name].bfloat16()

    checkpoint = open_checkpoint(changed(llama(tmp_path / "llama"), narrow))
    stored = load_file(tmp_path / "llama" / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    W_O = checkpoint.read(checkpoint.sites[1]).weights.W_O
    assert torch.equal(W_O.flatten(0, 1).mT, stored.float() * 0.5)

    def without(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if "scale" in name]:
            del tensors[name]

    with pytest.raises(DataError, match="float8 without a scale"):
        open_checkpoint(changed(tmp_path / "llama", without))


def test_a_t5_may_hold_a_table_that_nothing_reads(tmp_path: Path) -> None:
    tensors = {}
    for at in (
        *("encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention"),
        "decoder.block.0.layer.1.EncDecAttention",
    ):
        tensors |= {f"{at}.{side}.weight": torch.randn(D, D) for side in "qkvo"}
        tensors[f"{at}.relative_attention_bias.weight"] = torch.randn(32, HEADS)
        tensors[f"{at.rpartition('.')[0]}.layer_norm.weight"] = torch.ones(D)
    config = {"model_type": "t5", "d_model": D, "d_kv": WIDTH, "num_heads": HEADS, "num_layers": 1}
    assert len(open_checkpoint(written(tmp_path / "t5", tensors, config)).sites) == 3


def test_layers_that_predict_further_ahead_are_read_where_they_are(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn"
        shapes = {"q_a_proj": (6, D), "q_b_proj": (HEADS * 6, 6), "o_proj": (D, HEADS * 5)}
        shapes |= {"kv_a_proj_with_mqa": (7, D), "kv_b_proj": (HEADS * 9, 5)}
        tensors |= {f"{at}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        tensors |= {f"{at}.q_a_layernorm.weight": torch.ones(6), f"{at}.kv_a_layernorm.weight": torch.ones(5)}
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(D)
    config: dict[str, Any] = {
        **{"model_type": "deepseek_v3", "hidden_size": D, "num_attention_heads": HEADS},
        **{"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2},
        **{"v_head_dim": 5, "num_hidden_layers": 1, "num_nextn_predict_layers": 1},
    }
    folder = written(tmp_path / "all", tensors, config)
    with pytest.warns(ConfigurationWarning, match=r"layers\.1\.self_attn predicts further tokens"):
        assert len(open_checkpoint(folder).sites) == 2
    alone = {name: tensor for name, tensor in tensors.items() if "layers.0" in name}
    assert len(open_checkpoint(written(tmp_path / "alone", alone, config)).sites) == 1


@pytest.mark.parametrize(("said", "longest"), [(163_840, 163_840), (0, 2048), ("long", 2048), (None, 2048)])
def test_the_longest_text_is_what_the_configuration_says(said: Any, longest: int, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["max_position_embeddings"] = said

    checkpoint = open_checkpoint(changed(bart(tmp_path / "one"), change))
    assert {checkpoint.longest_text(site) for site in checkpoint.sites} == {longest}


def test_a_stack_may_be_missing_but_not_the_attention_of_one(tmp_path: Path) -> None:
    def without(part: str) -> Change:
        def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
            for name in [name for name in tensors if part in name]:
                del tensors[name]

        return change

    one = open_checkpoint(changed(bart(tmp_path / "one"), without("decoder")))
    assert [site.stack for site in one.sites] == ["encoder"]
    with pytest.raises(DataError, match=r"but its attention is not: decoder.layers.0.self_attn"):
        open_checkpoint(changed(bart(tmp_path / "two"), without("decoder.layers.0.self_attn")))


AT = "model.layers.0.self_attn"
PARTIAL = {"model_type": "nemotron"}  # whose files are named as Llama's, and which turns a part of a head


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({f"{AT}.o_proj.bias": torch.ones(D)}, {}, "the map of o has a bias, against"),
        ({}, {"hidden_size": 4096, "head_dim": WIDTH}, "what queries read has width 32, where .* says 4096"),
        ({f"{AT}.k_proj.weight": torch.ones(D // 2, 40)}, {}, "what keys read has width 40"),
        ({f"{AT}.o_proj.weight": torch.ones(50, D)}, {}, "what is written has width 50"),
        ({"model.layers.0.input_layernorm.weight": torch.ones(7)}, {}, "the norm has width 7"),
        ({}, {**PARTIAL, "partial_rotary_factor": 2.0}, "rotate more than the 8 channels"),
        ({}, {**PARTIAL, "partial_rotary_factor": -1.0}, "rotate more than the 8 channels"),
        ({}, {**PARTIAL, "partial_rotary_factor": 0.7}, "rotate 5 channels of a head, an odd number"),
        ({}, {"rope_theta": 10**400}, "too large, or no number"),
        ({}, {"rope_scaling": {"rope_type": ["x"]}}, "the scaling of rotary positions is not supported"),
        (
            {},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": {}}},
            "scaling of rotary positions is not supported",
        ),
        (
            {},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
            "the scaling of rotary positions is not supported",
        ),
        ({"model.\x1b]0;x\x07": torch.ones(2)}, {}, "unprintable characters"),
    ],
)
def test_what_contradicts_itself_is_one_line(
    tensors: dict[str, Tensor], config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    def put(held: dict[str, Tensor], said: dict[str, Any]) -> None:
        held.update(tensors)
        said.update(config)

    folder = changed(llama(tmp_path / "made"), put)
    with pytest.raises(DataError, match=reason) as error:
        read_all(folder)
    assert "\n" not in str(error.value)
