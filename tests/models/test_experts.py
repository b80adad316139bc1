"""Mixtures of experts: the same as every expert on every token, and as the families that have them."""

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tests.tolerances import assert_same
from torch import Tensor

from triptych.attention import MultiHeadAttention
from triptych.decoding.fused import evaluating_copy, fuse
from triptych.decoding.maps import Maps
from triptych.models.architecture import (
    BlockConfig,
    EmbeddingsConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LanguageModelArchitecture,
    SublayerConfig,
)
from triptych.models.experts import Experts
from triptych.models.language_model import LanguageModel

D_MODEL, D_FF, COUNT = 12, 10, 8
SWIGLU = FeedForwardConfig(D_FF, "swish", gated=True, bias=False, out_bias=False)
CLAMPED = FeedForwardConfig(D_FF, "swish", gated=True, beta=1.702, offset=1.0, limit=0.3)
SHARED = replace(SWIGLU, d_ff=2 * D_FF)


class Family(NamedTuple):
    """A block of `transformers` and what it is here.

    Attributes:
        block: name of its class, in the module of the family.
        config: class of its configuration.
        ours: the same of ours.
        settings: of the configuration, besides the sizes.
        transposed: whether its experts multiply from the right.
        interleaved: whether gate and inner map alternate.
        shared: name of the layer that every token passes.
    """

    block: str
    config: str
    ours: ExpertsConfig
    settings: Mapping[str, Any] = MappingProxyType({})
    transposed: bool = False
    interleaved: bool = False
    shared: str = "shared_experts"


TWO = ExpertsConfig(SWIGLU, COUNT, 2)
FAMILIES = {
    "mixtral": Family("mixtral.MixtralSparseMoeBlock", "MixtralConfig", replace(TWO, normalised=True)),
    "qwen3_moe": Family(
        "qwen3_moe.Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        replace(TWO, normalised=True),
        {"norm_topk_prob": True},
    ),
    "olmoe": Family("olmoe.OlmoeSparseMoeBlock", "OlmoeConfig", TWO, {"norm_topk_prob": False}),
    "phimoe": Family(
        "phimoe.PhimoeSparseMoeBlock",
        "PhimoeConfig",
        replace(TWO, scores="sparsemixer", threshold=1.0),
        {"router_jitter_noise": 0.5},
    ),
    "granitemoe": Family("granitemoe.GraniteMoeMoE", "GraniteMoeConfig", replace(TWO, normalised=True)),
    "gpt_oss": Family(
        "gpt_oss.GptOssMLP",
        "GptOssConfig",
        ExpertsConfig(CLAMPED, COUNT, 2, normalised=True, router_bias=True),
        {"swiglu_limit": 0.3, "swiglu_alpha": 1.702},
        transposed=True,
        interleaved=True,
    ),
    "deepseek_v2": Family(
        "deepseek_v2.DeepseekV2Moe",
        "DeepseekV2Config",
        replace(TWO, groups=4, top_groups=2, scale=1.7, shared=SHARED),
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v3": Family(
        "deepseek_v3.DeepseekV3MoE",
        "DeepseekV3Config",
        replace(
            TWO,
            scores="sigmoid",
            normalised=True,
            correction=True,
            groups=4,
            top_groups=2,
            group_score="two_best",
            scale=1.7,
            shared=SHARED,
        ),
        {
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
        },
    ),
    "llama4": Family(
        "llama4.Llama4TextMoe",
        "Llama4TextConfig",
        replace(TWO, scores="sigmoid", scale_input=True, shared=SWIGLU),
        transposed=True,
        shared="shared_expert",
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe.Ernie4_5_MoeSparseMoeBlock",
        "Ernie4_5_MoeConfig",
        replace(TWO, normalised=True, correction=True, min_sum=0.9, shared=SHARED),
        {"moe_norm_min": 0.9, "moe_num_shared_experts": 2},
    ),
}
CONFIGS = {name: family.ours for name, family in FAMILIES.items()}
CONFIGS["gemma4"] = replace(TWO, normalised=True, shared=SHARED, norm_eps=1e-6, weighted=True)
SIZES = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_FF,
    "moe_intermediate_size": D_FF,
    "num_local_experts": COUNT,
    "num_experts": COUNT,
    "n_routed_experts": COUNT,
    "moe_num_experts": COUNT,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "hidden_act": "silu",
}


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 11, D_MODEL, generator=torch.Generator().manual_seed(3)).to(dtype)


def made(config: ExpertsConfig) -> Experts:
    torch.manual_seed(0)
    experts = Experts(config, D_MODEL).double().eval()
    for tensor in (*experts.parameters(), *experts.buffers()):
        tensor.data.normal_(std=0.5)
    return experts


def copied(family: Family, theirs: torch.nn.Module) -> Experts:
    """Ours with the weights of theirs, whose names say what they are."""
    ours, state = Experts(family.ours, D_MODEL).eval(), theirs.state_dict()
    found = {name.removesuffix(".weight"): tensor for name, tensor in state.items()}
    both, outer = found["experts.gate_up_proj"], found["experts.down_proj"]
    if family.transposed:
        both, outer = both.mT, outer.mT
    gate, inner = (both[:, ::2], both[:, 1::2]) if family.interleaved else both.chunk(2, dim=1)
    taken = {"inner.weight": inner, "gate.weight": gate, "outer.weight": outer}
    if family.ours.expert.bias:
        bias = found["experts.gate_up_proj_bias"]
        taken |= {"gate.bias": bias[:, ::2], "inner.bias": bias[:, 1::2]}
        taken["outer.bias"] = found["experts.down_proj_bias"]
    for name, tensor in state.items():
        if name in ("gate.weight", "router.weight"):
            taken["router.weight"] = tensor
        elif name == "router.bias":
            taken["router.bias"] = tensor
        elif name.endswith("e_score_correction_bias"):
            taken["router.correction"] = tensor.flatten()
    if family.ours.shared is not None:
        for own, other in (("inner", "up_proj"), ("gate", "gate_proj"), ("outer", "down_proj")):
            taken[f"shared.{own}.weight"] = state[f"{family.shared}.{other}.weight"]
    ours.load_state_dict(taken)
    return ours


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixture_gives_what_that_of_its_family_gives(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    family = FAMILIES[name]
    module, block = family.block.split(".")
    config = getattr(transformers, family.config)(**SIZES, **family.settings)
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(1)
    theirs = getattr(code, block)(config).eval()
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        tensor.data.normal_(std=0.5)
    x = inputs(torch.float32)
    expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert_same(copied(family, theirs)(x), expected.detach().view(x.shape), kind="output")


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_gathered_for_each_expert_give_what_every_expert_on_every_token_gives(name: str) -> None:
    experts = made(CONFIGS[name])
    x = inputs().requires_grad_()
    outputs, gradients = [], []
    for way in (experts, experts.reference):
        output = way(x)
        outputs.append(output)
        inner = torch.autograd.grad((output * output.detach().sin()).sum(), [x, *experts.parameters()])
        gradients.append(inner)
    assert_same(outputs[0], outputs[1], kind="output")
    for one, other in zip(*gradients, strict=True):
        assert_same(one, other, kind="gradient")
        assert bool(one.abs().sum() > 0)


def test_in_lower_precision_the_same_experts_are_chosen_as_the_rounded_weights_ask_for() -> None:
    experts = made(FAMILIES["mixtral"].ours).bfloat16()
    x = inputs(torch.bfloat16)
    assert experts(x).dtype == torch.bfloat16
    exact = made(FAMILIES["mixtral"].ours)
    exact.load_state_dict(experts.state_dict())
    rows = x.flatten(0, 1)
    assert torch.equal(experts.router(rows).experts, exact.router(rows.double()).experts)


def test_a_model_of_experts_learns_and_its_first_block_may_be_dense() -> None:
    torch.manual_seed(0)
    frame = SublayerConfig()
    dense = BlockConfig(frame, SWIGLU, frame)
    architecture = LanguageModelArchitecture(
        "decoder", D_MODEL, EmbeddingsConfig(13), (dense, replace(dense, feed_forward=TWO))
    )
    model = LanguageModel(architecture, [MultiHeadAttention(D_MODEL, 2) for _ in range(2)])
    assert isinstance(model.blocks[1].feed_forward, Experts)
    ids = torch.arange(13)[None] * 5 % 13
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3


@pytest.mark.parametrize(
    ("options", "words"),
    [({"top_k": 9}, "top_k is 9: there are 8 experts"), ({"groups": 3}, "cannot be in 3 groups")],
)
def test_sizes_that_do_not_fit_are_refused_with_their_numbers(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(TWO, **options)


def test_a_mixture_made_ready_for_decoding_in_bf16_gives_that_of_rounded_weights() -> None:
    experts = made(FAMILIES["gpt_oss"].ours)
    ready = fuse(evaluating_copy(torch.nn.Sequential(experts)), Maps("bf16", torch.float32))
    rounded = made(FAMILIES["gpt_oss"].ours).bfloat16()
    x = inputs(torch.bfloat16)
    assert ready(x).dtype == torch.bfloat16
    assert_same(ready(x), rounded(x), kind="output")
    assert experts.outer.weight.dtype == torch.float64
