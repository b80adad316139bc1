"""Norms that maps outside the attention read, in every family: folded, the model is the same; or refused."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.oracle import opened
from checkpoints.test_families import made
from checkpoints.test_writing import assert_models_agree, loaded
from checkpoints.tiny_models import TINY, Tiny
from edited import edited_tensors, set_fields, set_tensors
from rewriting.certificates import failing, seal
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.family import family_of, read_family
from triptych.core.checkpoints.norm_readers import norm_sites
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import open_tensors
from triptych.rewriting import other_norms
from triptych.rewriting.certificate import Certificate, NormRecord
from triptych.rewriting.functions import FoldNorm, FoldOtherNorms, Rewrite
from triptych.rewriting.measuring import blocks
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def alike(names: str, expected: dict[str, str]) -> dict[str, dict[str, str]]:
    """The same for several models, whose names are separated by bars."""
    return dict.fromkeys(names.split(" | "), expected)


# Of every norm, by the end of its name, the maps of its first layer that take it up, or why none does.
EXPECTED: dict[str, dict[str, str]] = {
    **alike(
        "bert | bert with cross-attention | roberta | electra | deberta-v2 | "
        "deberta-v2, maps of its own | longformer | mpnet | roformer | "
        "roformer with cross-attention | deberta | deberta, learned | data2vec-text | ernie | "
        "rembert",
        {"LayerNorm": "! post"},
    ),
    "distilbert": {"output_layer_norm": "! post"},
    **alike("albert | albert in groups", {"full_layer_layer_norm": "! post"}),
    **alike(
        "gpt2 | gpt2, scaled by layer | gpt2, not scaled | gpt2, scaled by layer alone | gpt_neo | "
        "gpt_bigcode | gpt_bigcode, a key each",
        {"ln_2": "c_fc", "ln_f": "! tied"},
    ),
    "openai-gpt": {"ln_2": "! post"},
    **alike("biogpt | xglm | xglm with cross-attention", {"final_layer_norm": "fc1", "layer_norm": "! tied"}),
    "gpt_neox": {"post_attention_layernorm": "dense_h_to_4h", "final_layer_norm": "! no slot"},
    **alike("codegen | gptj", {"ln_f": "lm_head"}),
    "opt": {"final_layer_norm": "fc1", "decoder.final_layer_norm": "! tied"},
    **alike(
        "opt, narrow embeddings | bart | plbart | mvp | marian | wav2vec2 | blenderbot-small | led | fsmt",
        {"final_layer_norm": "! post"},
    ),
    **alike(
        "bloom | bloom, six heads | falcon, a key each",
        {"post_attention_layernorm": "dense_h_to_4h", "ln_f": "! tied"},
    ),
    "falcon, one key head": {"ln_f": "! tied"},
    "falcon, groups": {"ln_mlp": "! no slot", "ln_f": "! tied"},
    **alike(
        "mpt | mpt, six heads, clipped | mpt, a scale of its own", {"norm_2": "up_proj", "norm_f": "! tied"}
    ),
    **alike(
        "llama | llama 3 | llama, biases | mistral | qwen2 | qwen3 | granite | ministral | "
        "seed_oss | ministral3 | llama4, text | llama4, stretched | llama4 | helium | deepseek_v2 | "
        "deepseek_v2, queries whole | deepseek_v2, stretched | hunyuan_v1_dense | cwm | "
        "hyperclovax, no norms after | qwen2_moe | dots1 | exaone_moe | mellum | hy_v3 | eurobert | "
        "deepseek_v32 | glm_moe_dsa | glm4_moe_lite | qwen2_vl | qwen2_5_vl | qwen3_vl",
        {"post_attention_layernorm": "gate_proj up_proj", "norm": "lm_head"},
    ),
    "apertus": {"feedforward_layernorm": "up_proj", "norm": "lm_head"},
    "mixtral": {"post_attention_layernorm": "gate w1 w3", "norm": "lm_head"},
    "minimax_m2": {"post_attention_layernorm": "gate w1 w3", "norm": "lm_head"},
    "hunyuan_v1_moe": {"post_attention_layernorm": "gate_proj up_proj wg", "norm": "lm_head"},
    "granitemoe_swa": {"post_attention_layernorm": "gate_up_proj input_linear router", "norm": "lm_head"},
    "arcee": {"post_attention_layernorm": "up_proj", "norm": "lm_head"},
    "minimax": {"post_attention_layernorm": "! post", "norm": "lm_head"},
    "kimi_linear": {"post_attention_layernorm": "gate gate_proj up_proj w1 w3", "norm": "lm_head"},
    **alike(
        "qwen3_moe | olmoe | solar_open",
        {"post_attention_layernorm": "gate gate_proj up_proj", "norm": "lm_head"},
    ),
    **alike(
        "granitemoe | granitemoeshared", {"post_attention_layernorm": "input_linear layer", "norm": "lm_head"}
    ),
    **alike("glm | phi3 | phi3, stretched", {"post_attention_layernorm": "gate_up_proj", "norm": "lm_head"}),
    **alike("glm4 | hyperclovax", {"post_attention_layernorm": "! sandwich", "norm": "lm_head"}),
    "afmoe": {"pre_mlp_layernorm": "! sandwich", "norm": "lm_head"},
    **alike("nemotron | jais2", {"post_attention_layernorm": "up_proj", "norm": "! no slot"}),
    "persimmon": {"post_attention_layernorm": "dense_h_to_4h", "final_layernorm": "! no slot"},
    **alike(
        "exaone4 | exaone4, all turned | olmo2 | olmo3 | flex_olmo | olmo_hybrid | olmo_hybrid, not turned",
        {"post_feedforward_layernorm": "! post", "norm": "lm_head"},
    ),
    **alike(
        "mistral3 | mistral3, ministral | gemma | ernie4_5 | smollm3 | youtu | ernie4_5_moe | "
        "granite_swa | minicpm3",
        {"post_attention_layernorm": "gate_proj up_proj", "norm": "! tied"},
    ),
    **alike(
        "gemma3n | gemma3n, two streams | gemma4, text | gemma4, experts | gemma2 | gemma3, text | "
        "gemma3, both ways",
        {"pre_feedforward_layernorm": "! sandwich", "norm": "! tied"},
    ),
    "t5gemma": {
        "pre_feedforward_layernorm": "! sandwich",
        "encoder.norm": "! cross",
        "decoder.norm": "! tied",
    },
    "gemma3": {"pre_feedforward_layernorm": "! sandwich", "layer_norm2": "fc1", "norm": "! tied"},
    "phi": {"input_layernorm": "fc1", "final_layernorm": "lm_head"},
    "phimoe": {"post_attention_layernorm": "! no slot", "norm": "lm_head"},
    "stablelm": {"post_attention_layernorm": "! no slot", "norm": "! no slot"},
    "starcoder2": {"post_attention_layernorm": "c_fc", "norm": "! tied"},
    **alike("olmo | olmo, clipped | dbrx", {"none": "! none"}),
    **alike("cohere | cohere2", {"input_layernorm": "gate_proj up_proj", "norm": "! tied"}),
    "vaultgemma": {"pre_feedforward_layernorm": "gate_proj up_proj", "norm": "! tied"},
    **alike(
        "qwen3_next | qwen3_5_moe",
        {"post_attention_layernorm": "gate gate_proj shared_expert_gate up_proj", "norm": "lm_head"},
    ),
    "qwen3_5": {"post_attention_layernorm": "gate_proj up_proj", "norm": "lm_head"},
    "granitemoehybrid": {"post_attention_layernorm": "input_linear layer", "norm": "lm_head"},
    "granitemoehybrid, all attention": {"post_attention_layernorm": "input_linear", "norm": "lm_head"},
    "nanochat": {"none": "! none"},
    "lfm2_moe": {"ffn_norm": "gate w1 w3", "embedding_norm": "! tied"},
    "lfm2": {"ffn_norm": "w1 w3", "embedding_norm": "! tied"},
    **alike("falcon_h1 | bamba", {"pre_ff_layernorm": "gate_proj up_proj", "final_layernorm": "lm_head"}),
    "jamba": {"pre_ff_layernorm": "gate_proj router up_proj", "final_layernorm": "lm_head"},
    "nemotron_h": {"norm_f": "lm_head"},
    "gpt_oss": {"post_attention_layernorm": "gate_up_proj router", "norm": "lm_head"},
    **alike(
        "deepseek_v3 | deepseek_v3, halves | deepseek_v3, stretched | glm4_moe",
        {"post_attention_layernorm": "gate_proj up_proj", "norm": "! more tokens"},
    ),
    **alike(
        "t5 | t5, far",
        {"layer_norm": "wi", "encoder.final_layer_norm": "! cross", "decoder.final_layer_norm": "! tied"},
    ),
    **alike(
        "mt5 | umt5",
        {
            "layer_norm": "wi_0 wi_1",
            "encoder.final_layer_norm": "! cross",
            "decoder.final_layer_norm": "! tied",
        },
    ),
    **alike(
        "mbart | pegasus | m2m_100 | whisper | blenderbot",
        {"final_layer_norm": "fc1", "encoder.layer_norm": "! cross", "decoder.layer_norm": "! tied"},
    ),
    **alike("vit | beit | beit, tables", {"layernorm_after": "dense"}),
    **alike("clip | siglip | siglip2, vision", {"layer_norm2": "fc1"}),
    "idefics3": {"post_attention_layernorm": "gate_proj up_proj", "norm": "lm_head"},
    "ctrl": {"layernorm2": "0", "layernorm": "! tied"},
    "dinov2": {"norm2": "fc1"},
    "perceiver": {"layernorm": "dense1"},
    **alike("modernbert | modernbert, biases | modernbert-decoder", {"mlp_norm": "Wi"}),
    **alike("nomic_bert | jina_embeddings_v3", {"norm2": "! post"}),
    "gte": {"mlp_ln": "! post"},
    **alike("esm | esm, rotary | roberta-prelayernorm | xlm-roberta-xl", {"LayerNorm": "dense"}),
    "megatron-bert": {"ln": "dense"},
    "dinov3": {"norm2": "up_proj"},
    "dinov3, gated": {"norm2": "gate_proj up_proj"},
}
REASONS = {
    "! post": "post-norm: the residual carries its gain",
    "! sandwich": "there are norms on both sides",
    "! tied": "the output map is the embedding",
    "! cross": "read by the keys and values of every decoder layer",
    "! no slot": "there is no bias slot on",
    "! none": "no norm is known that maps outside the attention read",
    "! more tokens": "read by the layers that predict further tokens",
}


def in_double(name: str, folder: Path, **settings: Any) -> tuple[Any, Path]:
    """A tiny model, and the folder where it is saved in float64."""
    if settings:
        with pytest.MonkeyPatch.context() as patch:
            tiny = TINY[name]
            patch.setitem(TINY, name, Tiny(tiny.model, {**tiny.settings, **settings}))
            model = made(name, folder / "first")
    else:
        model = made(name, folder / "first")
    model.save_pretrained(folder / "source")
    return loaded(model, folder / "source"), folder / "source"


def folded(source: Path, target: Path, *steps: Rewrite, skip_refused: bool = True) -> Certificate:
    recipe = RewriteRecipe.model_construct(
        step=steps or (FoldNorm(), FoldOtherNorms()), skip_refused=skip_refused, calibration=None
    )
    return rewrite_checkpoint(str(source), target, recipe, compare=False)


def changed(source: Path, target: Path) -> set[str]:
    before, after = open_tensors(source), open_tensors(target)
    assert before.infos.keys() == after.infos.keys()
    return {name for name in before.infos if not torch.equal(before.read(name), after.read(name))}


def as_expected(norm: NormRecord) -> tuple[str, str]:
    """Name and outcome as the table has them."""
    above, _, name = norm.module.rpartition(".")
    stack = above.rpartition(".")[2]
    key = f"{stack}.{name}" if stack in ("encoder", "decoder") else name
    (step,) = norm.steps
    if not step.refused:
        return key, " ".join(sorted({module.rpartition(".")[2] for module in norm.maps}))
    return key, next(short for short, reason in REASONS.items() if reason in step.refused)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", TINY)
def test_all_norms_folded_leave_the_model_as_it_was(name: str, tmp_path: Path) -> None:
    model, source = in_double(name, tmp_path)
    found = folded(source, tmp_path / "out")
    outcomes: dict[str, str] = {}
    for norm in found.norms:
        key, outcome = as_expected(norm)
        outcomes.setdefault(key, outcome)
        assert (norm.measured is None) == outcome.startswith("!")
        if norm.measured is not None:
            assert norm.measured.relative < 1e-14
    assert outcomes == EXPECTED[name]
    again = opened(tmp_path / "out")
    for site in norm_sites(again):
        record = next((norm for norm in found.norms if norm.module == site.module), None)
        if record is not None and record.measured is not None:
            norm = site.read(again.tensors)
            assert torch.equal(norm.weight + norm.offset, torch.ones_like(norm.weight))
            assert norm.bias is None or not norm.bias.any()
    assert_models_agree(model, loaded(model, tmp_path / "out"))
    assert failing(tmp_path / "out", source) == []


def test_every_tiny_model_is_in_the_table() -> None:
    assert EXPECTED.keys() == TINY.keys()


@pytest.mark.parametrize("name", ["gemma", "cohere", "mpt", "smollm3"])  # Gemma stores its gains as 1 + w.
def test_the_last_norm_is_folded_into_an_output_map_of_its_own(name: str, tmp_path: Path) -> None:
    module = "transformer.norm_f" if name == "mpt" else "model.norm"
    model, source = in_double(name, tmp_path, tie_word_embeddings=False)
    found = folded(source, tmp_path / "out")
    assert [norm.maps for norm in found.norms if norm.module == module] == [("lm_head",)]
    assert {f"{module}.weight", "lm_head.weight"} <= changed(source, tmp_path / "out")
    assert_models_agree(model, loaded(model, tmp_path / "out"))


def test_a_t5_whose_output_map_is_not_the_embedding_has_its_last_norm_folded(tmp_path: Path) -> None:
    model, source = in_double("t5", tmp_path, feed_forward_proj="gated-gelu")  # as version 1.1 is published
    set_tensors(source, {"lm_head.weight": torch.randn(40, 24, dtype=torch.float64)})
    set_fields(source / "config.json", tie_word_embeddings=False)
    found = folded(source, tmp_path / "out")
    maps = {norm.module: norm.maps for norm in found.norms}
    assert maps["decoder.final_layer_norm"] == ("lm_head",)
    one, other = loaded(model, source), loaded(model, tmp_path / "out")
    assert not torch.equal(one.lm_head.weight, one.shared.weight)
    assert_models_agree(one, other)


PARALLEL: dict[str, tuple[dict[str, Any], str]] = {
    "falcon, a key each": ({"parallel_attn": True, "alibi": False}, "dense_h_to_4h"),
    "stablelm": ({"use_parallel_residual": True, "qk_layernorm": False}, ""),
    "falcon, groups": ({"num_ln_in_parallel_attn": 1, "bias": True}, "dense_h_to_4h"),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_a_norm_that_attention_shares_is_folded_into_both_or_neither(name: str, tmp_path: Path) -> None:
    settings, reader = PARALLEL[name]
    model, source = in_double(name, tmp_path, **settings)
    found = folded(source, tmp_path / "out", FoldNorm())
    assert {module.rpartition(".")[2] for norm in found.norms for module in norm.maps} == set(reader.split())
    for layer in found.layers:
        (step,) = layer.steps
        if reader:
            assert any(reader in said for said in step.checked)
        else:
            assert "which cannot take it up: there is no bias slot on" in step.refused
    assert bool(changed(source, tmp_path / "out")) == bool(reader)
    assert_models_agree(model, loaded(model, tmp_path / "out"))


def test_each_norm_is_recorded_under_the_step_that_folds_it(tmp_path: Path) -> None:
    settings, _ = PARALLEL["falcon, a key each"]
    _, source = in_double("falcon, a key each", tmp_path, tie_word_embeddings=False, **settings)
    steps = {norm.module: norm.steps[0].rewrite for norm in folded(source, tmp_path / "out").norms}
    assert steps.pop("transformer.ln_f") == "fold_other_norms"
    assert set(steps.values()) == {"fold_norm"}  # the MLP reads what attention reads


def test_an_rms_norm_leaves_the_biases_of_its_readers_alone(tmp_path: Path) -> None:
    model, source = in_double("llama", tmp_path, mlp_bias=True)
    found = folded(source, tmp_path / "out", FoldOtherNorms())
    maps = {module.rpartition(".")[2] for norm in found.norms for module in norm.maps}
    assert maps >= {"gate_proj", "up_proj"}
    names = changed(source, tmp_path / "out")
    assert any(name.endswith("up_proj.weight") for name in names)
    assert not any(name.endswith(".bias") for name in names)
    assert_models_agree(model, loaded(model, tmp_path / "out"))


def test_a_layer_that_refuses_leaves_what_shares_its_norm_alone(tmp_path: Path) -> None:
    _, source = in_double("gptj", tmp_path)  # q, k and v have no place for the shift, the MLP has
    found = folded(source, tmp_path / "out")
    assert all("no bias slot on q, k and v" in layer.steps[0].refused for layer in found.layers)
    assert [norm.module for norm in found.norms] == ["transformer.ln_f"]
    assert not any(".mlp." in name or ".ln_1." in name for name in changed(source, tmp_path / "out"))


def test_the_residual_of_bloom_reads_the_norm(tmp_path: Path) -> None:
    settings = {"apply_residual_connection_post_layernorm": True}
    _, source = in_double("bloom", tmp_path, **settings)
    found = folded(source, tmp_path / "out")
    assert all("which would miss its gain" in norm.steps[0].refused for norm in found.norms[:2])
    assert not changed(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("model.layers.1.mlp.adapter.weight", "not known whether model.layers.1.mlp.adapter.weight reads it"),
        ("score.weight", "not known whether score.weight reads it"),
    ],
)
def test_a_tensor_that_might_read_the_norm_as_well_is_a_reason_to_refuse(
    more: str, said: str, tmp_path: Path
) -> None:
    made("llama", tmp_path / "source")
    set_tensors(tmp_path / "source", {more: torch.randn(3, 24)})
    with pytest.raises(RewriteRefusedError, match=said):
        folded(tmp_path / "source", tmp_path / "out", FoldOtherNorms(), skip_refused=False)


@pytest.mark.parametrize("within", ["layers.{layer}.self_attn", "layers.{layer}.mlp"])
def test_a_map_that_is_claimed_twice_is_a_reason_to_refuse(within: str, tmp_path: Path) -> None:
    made("llama", tmp_path / "source")
    (tmp_path / "mine.toml").write_text(
        f"""
        name = "Mine"
        [[attention]]
        like = "llama"
        [[attention.other_norms]]
        norm = [{{ at = "layers.{{layer}}.post_attention_layernorm", kind = "rms" }}]
        within = "layers.{{layer}}.mlp"
        read_by = ["up_proj"]
        rest = ["*"]
        [[attention.other_norms]]
        norm = [{{ at = "norm", kind = "rms" }}]
        within = "{within}"
        read_by = ["up_proj", "q_proj"]
        rest = ["*"]
        """
    )
    checkpoint = opened(tmp_path / "source", family=read_family(tmp_path / "mine.toml"))
    assert "belongs to attention, or reads another norm" in norm_sites(checkpoint)[-1].refused


def test_a_map_of_another_width_than_the_norm_is_refused(tmp_path: Path) -> None:
    made("llama", tmp_path / "source")
    set_tensors(tmp_path / "source", {"lm_head.weight": torch.randn(40, 12)})
    with pytest.raises(RewriteRefusedError, match="lm_head reads 12 channels, and the norm has shape"):
        folded(tmp_path / "source", tmp_path / "out", FoldOtherNorms(), skip_refused=False)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_float16_that_would_overflow_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "source")
    norm, reader = ("post_attention_layernorm", "up_proj") if name == "llama" else ("input_layernorm", "fc1")
    with edited_tensors(tmp_path / "source") as tensors:
        tensors |= {key: tensor.half() for key, tensor in tensors.items()}
        tensors[f"model.layers.1.{norm}.weight"].fill_(6e4)
        tensors[f"model.layers.1.mlp.{reader}.weight"].fill_(2.0)
    found = folded(tmp_path / "source", tmp_path / "out")
    touched = changed(tmp_path / "source", tmp_path / "out")
    assert not any(f".1.mlp.{reader}" in key or f".1.{norm}" in key for key in touched)
    assert any(f".0.mlp.{reader}" in key for key in touched)
    refused = [s.refused for part in (*found.norms, *found.layers) for s in part.steps if s.refused]
    assert any("numbers do not fit float16" in reason for reason in refused)
    with pytest.raises(RewriteRefusedError, match="do not fit float16"):
        folded(tmp_path / "source", tmp_path / "other", skip_refused=False)


def test_float32_that_overflows_after_all_stops_the_copy(tmp_path: Path) -> None:
    made("llama", tmp_path / "source")
    gain = torch.full((24,), 3e38)
    weight = torch.full((32, 24), 1e3)
    changes = {"post_attention_layernorm.weight": gain, "mlp.up_proj.weight": weight}
    set_tensors(tmp_path / "source", {f"model.layers.0.{name}": t for name, t in changes.items()})
    with pytest.raises(RewriteRefusedError, match=r"mlp.up_proj.weight: .* do not fit float32"):
        folded(tmp_path / "source", tmp_path / "out", FoldOtherNorms())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "mixtral", "phi"])
def test_blocks_of_rows_give_what_one_gives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(name, tmp_path / "source")
    whole = folded(tmp_path / "source", tmp_path / "whole")
    monkeypatch.setattr(other_norms, "blocks", partial(blocks, most_numbers=24 * 5))
    parts = folded(tmp_path / "source", tmp_path / "parts")
    assert parts.tensors == whole.tensors
    assert any(norm.measured is not None for norm in whole.norms)


@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (3, 7, 5)])
def test_blocks_have_every_row_once(shape: tuple[int, ...]) -> None:
    counted = torch.zeros(shape, dtype=torch.int64)
    for block in blocks(counted, most_numbers=11):
        counted[block] += 1
        assert counted[block].numel() <= 11
    assert torch.equal(counted, torch.ones_like(counted))


@pytest.mark.parametrize("first", ["weights", "biases"])
@pytest.mark.parametrize("name", ["llama", "phi", "gpt2"])
def test_a_norm_and_what_reads_it_may_lie_in_different_files(name: str, first: str, tmp_path: Path) -> None:
    model, source = in_double(name, tmp_path)
    tensors = load_file(source / "model.safetensors")
    # Maps first, the norms they read last, a file for each.
    end = {"weights": ".bias", "biases": ".weight"}[first]
    files = sorted(tensors, key=lambda tensor: ("norm" in tensor or "ln_" in tensor, tensor.endswith(end)))
    names = {tensor: f"model-{place:05}-of-{len(files):05}.safetensors" for place, tensor in enumerate(files)}
    for tensor, file in names.items():
        save_file({tensor: tensors[tensor]}, source / file, {"format": "pt"})
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    found = folded(source, tmp_path / "out")
    assert any(norm.measured is not None for norm in found.norms)
    assert_models_agree(model, loaded(model, tmp_path / "out"))


def test_only_the_layers_named_are_folded_and_all_else_keeps_its_bytes(tmp_path: Path) -> None:
    made("llama", tmp_path / "source")
    found = folded(tmp_path / "source", tmp_path / "out", FoldOtherNorms(layers=(1,)))
    at = "model.layers.1"
    assert changed(tmp_path / "source", tmp_path / "out") == {
        f"{at}.{name}.weight" for name in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj")
    }
    assert [norm.module for norm in found.norms] == [f"{at}.post_attention_layernorm"]


def test_a_norm_that_was_folded_has_nothing_left_to_fold(tmp_path: Path) -> None:
    made("llama", tmp_path / "source")
    folded(tmp_path / "source", tmp_path / "once", FoldOtherNorms())
    found = folded(tmp_path / "once", tmp_path / "twice", FoldOtherNorms())
    assert not changed(tmp_path / "once", tmp_path / "twice")
    assert {norm.steps[0].tier for norm in found.norms} == {"bit-exact"}
    assert all(norm.measured is None for norm in found.norms)
    assert failing(tmp_path / "twice", tmp_path / "once") == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TINY)
def test_a_configuration_that_leaves_tying_out_is_read_as_its_class_has_it(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    cls = TINY[name].config
    record = json.loads((tmp_path / "config.json").read_text())
    for part in (record, record.get("text_config", {})):
        part.pop("tie_word_embeddings", None)
    family = family_of(record["model_type"])
    assert family is not None
    silent, said = (
        norm_sites(Checkpoint("tiny", family, Settings(config, "config.json"), open_tensors(tmp_path)))
        for config in (record, cls.from_dict(dict(record)).to_dict())
    )
    assert [(site.module, site.refused) for site in silent] == [(site.module, site.refused) for site in said]


def test_a_checkpoint_without_its_output_map_keeps_its_last_norm(tmp_path: Path) -> None:
    made("llama", tmp_path / "source")
    set_tensors(tmp_path / "source", {"lm_head.weight": None})
    found = folded(tmp_path / "source", tmp_path / "out", FoldOtherNorms())
    assert "there is no map lm_head that reads it" in found.norms[-1].steps[0].refused


# What is certified.


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Certificate]:
    folder = tmp_path_factory.mktemp("norms")
    made("phi", folder / "source")
    return folder / "source", folder / "out", folded(folder / "source", folder / "out")


def forged(certified: tuple[Path, Path, Certificate], folder: Path, **update: Any) -> list[str]:
    """What fails of a copy with a certificate that was changed and sealed anew."""
    source, out, certificate = certified
    shutil.copytree(out, folder)
    seal(folder, certificate.model_copy(update=update))
    return failing(folder, source)


def test_errors_of_norms_are_measured_again(
    certified: tuple[Path, Path, Certificate], tmp_path: Path
) -> None:
    found = certified[2].norms
    assert [norm.steps[0].rewrite for norm in found] == ["fold_norm", "fold_norm", "fold_other_norms"]
    assert all(norm.measured is not None and 0 < norm.measured.relative < 1e-6 for norm in found)
    measured = found[2].measured
    assert measured is not None
    other = measured.model_copy(update={"relative": measured.relative * 1.01})
    wrong = (*found[:2], found[2].model_copy(update={"measured": other}))
    assert "errors measured on the probes" in forged(certified, tmp_path / "copy", norms=wrong)


def test_a_norm_that_is_left_out_of_the_certificate_is_noticed(
    certified: tuple[Path, Path, Certificate], tmp_path: Path
) -> None:
    for kept in (certified[2].norms[:2], certified[2].norms[1:]):
        copy = tmp_path / f"copy{len(kept[0].maps)}{kept[0].module}"
        assert "nothing else has changed" in forged(certified, copy, norms=kept)


def test_a_digit_of_a_map_is_noticed(certified: tuple[Path, Path, Certificate], tmp_path: Path) -> None:
    source, out, _ = certified
    shutil.copytree(out, tmp_path / "copy")
    with edited_tensors(tmp_path / "copy") as tensors:
        tensors["model.layers.0.mlp.fc1.weight"][3, 5] += 1e-3
    assert failing(tmp_path / "copy", source) == ["tensors as written"]


def test_maps_that_never_took_up_the_norm_are_noticed(
    certified: tuple[Path, Path, Certificate], tmp_path: Path
) -> None:
    # Hashes and seal are forged as well: what the maps put out is not what it was.
    source, out, certificate = certified
    name = "lm_head.weight"
    original = load_file(source / "model.safetensors")[name]
    records = dict(certificate.tensors)
    records[name] = records[name].model_copy(update={"written": records[name].read})
    shutil.copytree(out, tmp_path / "copy")
    set_tensors(tmp_path / "copy", {name: original})
    seal(tmp_path / "copy", certificate.model_copy(update={"tensors": records}))
    tier = "what was done is of its tier, and within its bounds"
    assert failing(tmp_path / "copy", source) == ["errors measured on the probes", tier]


def test_a_certificate_without_norms_is_written_as_before_there_were_any(tmp_path: Path) -> None:
    made("llama", tmp_path / "source")
    folded(tmp_path / "source", tmp_path / "out", FoldNorm())
    assert "norms" not in json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert failing(tmp_path / "out", tmp_path / "source") == []
