"""DeepSeek at the sizes of the published models: which shapes are read, and by what scores are multiplied.

No number is held: a layer's tensors are stand-ins that have a shape alone.
"""

import math
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from triptych.checkpoints.checkpoint import Checkpoint
from triptych.checkpoints.family import family_of
from triptych.storage.settings import Settings
from triptych.storage.tensors import TensorFile, TensorInfo, Tensors

_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_SHARED = {
    "num_hidden_layers": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
}
V2_LITE = {
    **_SHARED,
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
V2 = {**V2_LITE, "hidden_size": 5120, "num_attention_heads": 128, "q_lora_rank": 1536}
V3 = {
    **V2,
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@final
class Shapes(TensorFile):
    """Tensors that are nothing but shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.name = "shapes"
        self.infos = {
            name: TensorInfo(torch.bfloat16, shape, 2 * math.prod(shape)) for name, shape in shapes.items()
        }

    def read(self, name: str) -> Tensor:
        return torch.empty(self.infos[name].shape, dtype=torch.bfloat16)


def one_layer(config: dict[str, Any]) -> Shapes:
    d, heads, q_rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (512 + 64, d),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (heads * (128 + 128), 512),
        "o_proj.weight": (d, heads * 128),
    }
    if q_rank is None:
        shapes["q_proj.weight"] = (heads * 192, d)
    else:
        shapes["q_a_proj.weight"], shapes["q_a_layernorm.weight"] = (q_rank, d), (q_rank,)
        shapes["q_b_proj.weight"] = (heads * 192, q_rank)
    named = {f"model.layers.0.self_attn.{name}": shape for name, shape in shapes.items()}
    return Shapes({**named, "model.layers.0.input_layernorm.weight": (d,)})


@pytest.mark.parametrize(("config", "mscale"), [(V2_LITE, 0.707), (V2, 0.707), (V3, 1.0)])
def test_a_layer_of_the_published_models_is_read(config: dict[str, Any], mscale: float) -> None:
    family, file = family_of(config["model_type"]), one_layer(config)
    assert family is not None
    checkpoint = Checkpoint(
        "published",
        family,
        Settings(config, "config.json"),
        Tensors("published", dict.fromkeys(file.infos, file)),
    )
    with FakeTensorMode():
        layer = checkpoint.read(checkpoint.sites[0])
    weights, heads, d = layer.weights, config["num_attention_heads"], config["hidden_size"]
    assert checkpoint.left_over == ()
    # As in the authors' own code: 1/√192 times (0.1 · mscale_all_dim · ln 40 + 1)².
    assert weights.scale == pytest.approx((0.1 * mscale * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert weights.q[0].d_in == weights.k[0].d_in == weights.o[-1].d_out == d
    assert weights.q[-1].weight.shape[::2] == weights.k[-1].weight.shape[::2] == (heads, 192)
    assert weights.v[-1].weight.shape[::2] == weights.o[0].weight.shape[:2] == (heads, 128)
    assert weights.k[0] is weights.v[0]
    rotation = layer.weights.semantics.rotary
    assert rotation is not None
    assert (len(rotation.frequencies), rotation.start, rotation.pairing) == (32, 128, "interleaved")
    assert rotation.factor == 1.0
    assert checkpoint.longest_text(checkpoint.sites[0]) == 163840
