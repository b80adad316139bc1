"""Mixtures of experts: the same as every expert on every token."""

import copy
from dataclasses import replace

import pytest
import torch
from tests.tolerances import assert_same
from torch import Tensor

from triptych.core.attention import MultiHeadAttention
from triptych.core.models.architecture import (
    BlockConfig,
    EmbeddingsConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LanguageModelArchitecture,
    SublayerConfig,
)
from triptych.core.models.experts import Experts
from triptych.core.models.feed_forward import combined
from triptych.core.models.language_model import LanguageModel
from triptych.running.decoding.fused import fuse
from triptych.running.decoding.linear_maps import Maps

D_MODEL, D_FF, COUNT = 12, 10, 8
SWIGLU = FeedForwardConfig(D_FF, "swish", gated=True, bias=False, out_bias=False)
CLAMPED = FeedForwardConfig(D_FF, "swish", gated=True, beta=1.702, offset=1.0, limit=0.3)
SHARED = replace(SWIGLU, d_ff=2 * D_FF)


TWO = ExpertsConfig(SWIGLU, COUNT, 2)
NORMALISED = replace(TWO, normalised=True)
GROUPED = replace(TWO, groups=4, top_groups=2, scale=1.7, shared=SHARED)
CONFIGS = {
    "mixtral": NORMALISED,
    "olmoe": TWO,
    "phimoe": replace(TWO, scores="sparsemixer", threshold=1.0),
    "gpt_oss": ExpertsConfig(CLAMPED, COUNT, 2, normalised=True, router_bias=True),
    "deepseek_v2": GROUPED,
    "deepseek_v3": replace(
        GROUPED, scores="sigmoid", normalised=True, correction=True, group_score="two_best", min_sum=1e-20
    ),
    "qwen2_moe": replace(TWO, shared=SHARED, shared_gate=True),
    "llama4": replace(TWO, scores="sigmoid", scale_input=True, shared=SWIGLU),
    "gemma4": replace(NORMALISED, shared=SHARED, norm_eps=1e-6, weighted=True),
}


def every_expert_on_every_token(layer: Experts, x: Tensor) -> Tensor:
    config, tokens, norms = layer.config, x.flatten(0, -2), layer.norms or {}
    read = norms["experts"](tokens) if norms else tokens
    chosen, weights = layer.router(norms["router"](tokens) * D_MODEL**-0.5 if norms else tokens)

    def expert(given: Tensor, number: int) -> Tensor:
        inner = layer.inner(given, number)
        if layer.gate is None:
            return layer.outer(layer.activation(inner), number)
        gate = layer.gate(given, number)
        return layer.outer(combined(config.expert, layer.activation, gate, inner), number)

    total = torch.zeros_like(tokens)
    for number in range(COUNT):
        weight = (weights * (chosen == number)).sum(dim=-1, keepdim=True).to(x.dtype)
        if config.scale_input:
            total = total + expert(read * weight, number) * (chosen == number).any(dim=-1, keepdim=True)
        else:
            total = total + expert(read, number) * weight
    if layer.shared is not None and norms:
        total = norms["out"](total) + norms["shared_out"](layer.shared(norms["shared"](tokens)))
    elif layer.shared is not None:
        opened = 1.0 if layer.shared_gate is None else (tokens @ layer.shared_gate.mT).sigmoid()
        total = total + layer.shared(tokens) * opened
    return total.view(x.shape)


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 11, D_MODEL, generator=torch.Generator().manual_seed(3)).to(dtype)


def made(config: ExpertsConfig) -> Experts:
    torch.manual_seed(0)
    experts = Experts(config, D_MODEL).double().eval()
    for tensor in (*experts.parameters(), *experts.buffers()):
        tensor.data.normal_(std=0.5)
    return experts


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_gathered_for_each_expert_give_what_every_expert_on_every_token_gives(name: str) -> None:
    experts = made(CONFIGS[name])
    x = inputs().requires_grad_()
    outputs, gradients = [], []
    for output in (experts(x), every_expert_on_every_token(experts, x)):
        outputs.append(output)
        inner = torch.autograd.grad((output * output.detach().sin()).sum(), [x, *experts.parameters()])
        gradients.append(inner)
    assert_same(outputs[0], outputs[1], kind="output")
    for one, other in zip(*gradients, strict=True):
        assert_same(one, other, kind="gradient")
        assert bool(one.abs().sum() > 0)


def test_in_lower_precision_the_same_experts_are_chosen_as_the_rounded_weights_ask_for() -> None:
    experts = made(CONFIGS["mixtral"]).bfloat16()
    x = inputs(torch.bfloat16)
    assert experts(x).dtype == torch.bfloat16
    exact = made(CONFIGS["mixtral"])
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
    experts = made(CONFIGS["gpt_oss"])
    ready = fuse(copy.deepcopy(torch.nn.Sequential(experts)).eval(), Maps("bf16", torch.float32))
    rounded = made(CONFIGS["gpt_oss"]).bfloat16()
    x = inputs(torch.bfloat16)
    assert ready(x).dtype == torch.bfloat16
    assert_same(ready(x), rounded(x), kind="output")
    assert experts.outer.weight.dtype == torch.float64
