"""Decoder-only models in CTranslate2's format: the same logits, or refused by the part that does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from triptych.converting import ctranslate2
from triptych.converting.ctranslate2 import write_generator
from triptych.core.algebra.positions import GrowingBase
from triptych.core.algebra.semantics import HeadGate, HeadNorm
from triptych.core.attention import PARAMETERISATIONS, MultiHeadAttention
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.core.models.architecture import ExpertsConfig
from triptych.errors import DataError, UsageError

SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
LEARNED: dict[str, Any] = {"positions": {"scheme": "learned", "max_tokens": 40}, "norm_eps": 1e-3}
NEIGHBOURS = {"scheme": "rotary", "rotary_dim": 4, "rotary_pairing": "interleaved", "rotary_base": 500.0}
LLAMA: dict[str, Any] = {"norm_kind": "rms", "bias": False, "gated": True, "activation": "swish"}

pytest.importorskip("ctranslate2", reason="needs CTranslate2")


def make(kind: Any = "decoder", **options: Any) -> LanguageModel:
    """A model in which every number does something."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "d_model": 24, "d_ff": 32, "num_heads": 4, "context": 32}
    config = LanguageModelConfig.model_validate({**sizes, "activation": "gelu_tanh", **options})
    model = LanguageModel.of(config, kind, 50)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=float("weight" in name), std=0.3)
        elif "bias" in name or "table" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def biases(**site: Any) -> dict[str, Any]:
    return {**site, "q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True}


FITTING: dict[str, dict[str, Any]] = {
    "factored": {**LEARNED, "attention": biases(projections="factored")},
    "factored, narrow": {"attention": {"projections": "factored", "d_k": 4, "d_v": 8}},
    "grouped": {**LLAMA, "attention": {"projections": "grouped", "num_kv_heads": 2}},
    "grouped, one": {"attention": biases(projections="grouped", num_kv_heads=1), "tie_embeddings": False},
    "grouped, in one layer": {"attention_in_layer": {1: {"projections": "grouped", "num_kv_heads": 2}}},
    "key_value": {"positions": NEIGHBOURS, "attention": {"projections": "key_value"}},
    "shared": {**LEARNED, "attention": {"projections": "shared", "qkv_bias": True}},
    "latent": {**LEARNED, "attention": {"projections": "latent", "d_latent": 9}},
    "collaborative": {**LEARNED, "attention": {"projections": "collaborative", "d_shared": 6}},
    **{
        name: {**LEARNED, "attention": {"projections": name}}
        for name in (
            *("bilinear", "stacked", "symmetric", "four_matrix", "direct"),
            *("identity_query", "identity_value", "identity_output", "identity_ov"),
        )
    },
}


def test_every_parameterisation_is_tried() -> None:
    assert {name.partition(",")[0] for name in FITTING} == set(PARAMETERISATIONS) - {"differential"}


def test_gates_of_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gate"):
        write_generator(make(attention={"projections": "differential", "num_kv_heads": 2}), tmp_path)


@pytest.mark.parametrize("options", FITTING.values(), ids=FITTING)
def test_logits_are_the_models(options: dict[str, Any], tmp_path: Path) -> None:
    check = write_generator(make(**options), tmp_path)
    assert check.largest_difference is not None
    assert check.largest_difference < 1e-4


def test_a_model_in_another_dtype_is_compared_in_float32(tmp_path: Path) -> None:
    model = make(**LLAMA).bfloat16()
    assert write_generator(model, tmp_path).tried
    assert next(model.parameters()).dtype == torch.bfloat16


def test_what_computes_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctranslate2, "_rotary_args", lambda *_: {"rotary_dim": 0, "rotary_interleave": True})
    with pytest.raises(DataError, match=r"logits by CTranslate2 .*: nothing is written"):
        write_generator(make(), tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "encoder"}, "it is an encoder"),
        ({"norm": "post"}, "there is no norm after the last block"),
        ({"activation": "relu_squared"}, "the activation relu_squared"),
        ({"positions": {"scheme": "none"}}, "it has no positions"),
        ({"positions": {"scheme": "sinusoidal"}}, "sinusoidal positions of the embeddings"),
        ({"positions": {"scheme": "alibi"}}, "the attention of block 0 has alibi positions"),
        ({"attention_in_layer": {1: {"num_heads": 2}}}, "its layers have 2 and 4 heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_does_not_fit_is_refused_by_its_part(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"^CTranslate2 cannot hold this model: {reason}$"):
        write_generator(make(**options), tmp_path)


def with_semantics(**changes: Any) -> LanguageModel:
    """A model the second block of which does something else."""
    model = make()
    weights = model.blocks[1].self_attention.weights("causal")
    changed = replace(weights, semantics=replace(weights.semantics, **changes))
    model.blocks[1].self_attention = MultiHeadAttention.from_weights(changed)
    return model


def test_parts_that_only_checkpoints_have_are_refused_too(tmp_path: Path) -> None:
    blocks = make().architecture.blocks
    parallel = tuple(replace(block, parallel=True) for block in blocks)
    mixtures = [ExpertsConfig(block.feed_forward, num_experts=2, top_k=1) for block in blocks]  # type: ignore[arg-type]
    experts = tuple(replace(block, feed_forward=mixtures[0]) for block in blocks)
    head = make().architecture.head
    assert head is not None
    for part, said in (
        ({"blocks": parallel}, "side by side"),
        ({"blocks": experts}, "mixture of experts"),
        ({"order": (0, 1, 0)}, "blocks serve several times"),
        ({"head": replace(head, soft_cap=30.0)}, "a soft cap of the logits"),
    ):
        model = make()
        model.architecture = replace(model.architecture, **part)
        with pytest.raises(UsageError, match=said):
            write_generator(model, tmp_path)
    of_attention: dict[str, dict[str, Any]] = {
        "a window": {"window": 3},
        "QK-norm": {"q_norm": HeadNorm(1e-5)},
        "sinks": {"sinks": torch.zeros(4)},
        "a gate on the output of each head": {"gate": HeadGate(torch.zeros(4, 24))},
    }
    for said, change in of_attention.items():
        with pytest.raises(UsageError, match=f"the attention of block 1 has {said}"):
            write_generator(with_semantics(**change), tmp_path)
    rotary = make().blocks[1].self_attention.semantics.rotary
    squared = replace(rotary, frequencies=rotary.frequencies**2)
    stretched = replace(rotary, frequencies=rotary.frequencies / 8)
    with pytest.raises(UsageError, match="its layers have different rotary positions"):
        write_generator(with_semantics(rotary=squared), tmp_path)
    with pytest.raises(UsageError, match="rotary positions whose frequencies are scaled"):
        write_generator(with_semantics(rotary=stretched), tmp_path)
    growing = replace(rotary, long=GrowingBase(2048, 10_000.0, 2.0))
    with pytest.raises(UsageError, match="rotary positions that change in texts of more than 2,048 tokens"):
        write_generator(with_semantics(rotary=growing), tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_trained_checkpoints_compute_the_same(name: str, tmp_path: Path) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"needs ../shared/checkpoints/{name}")
    check = write_generator(load_language_model(SHARED / name), tmp_path)
    assert check.largest_difference is not None
    assert check.largest_difference < 1e-4
