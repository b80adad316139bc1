"""DeepSeek's layers rewritten, and layers rewritten into DeepSeek's: `transformers` is the oracle of both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from edited import edited_tensors
from rewriting.certificates import failing, seal
from small_checkpoints import save_changed, with_words
from triptych import load
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.core.storage.shards import tensor_hash
from triptych.rewriting.certificate import Certificate
from triptych.rewriting.functions import EXACT
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")

HEADS, RANK, PLAIN, TURNED, VALUE, D = 4, 12, 6, 4, 5, 24
KINDS = {"V2": ("DeepseekV2", {"q_lora_rank": None}), "V3": ("DeepseekV3", {"q_lora_rank": 14})}
AT = "model.layers.{}.self_attn."


@pytest.fixture(params=KINDS)
def original(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return small(tmp_path / "original", request.param)


def small(folder: Path, kind: str = "V3") -> Path:
    name, settings = KINDS[kind]
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=60, hidden_size=D, intermediate_size=32, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, kv_lora_rank=RANK, qk_nope_head_dim=PLAIN, qk_rope_head_dim=TURNED,
        v_head_dim=VALUE, max_position_embeddings=64, first_k_dense_replace=2, **settings,
    )  # fmt: skip
    return save_changed(getattr(transformers, f"{name}ForCausalLM")(config), folder)


def logits(folder: Path, change: Any = None) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        if change is not None:
            for layer in model.model.layers:
                change(layer.self_attn)
        return model(torch.arange(48).view(2, 24)).logits  # type: ignore[no-any-return]


def rewritten(folder: Path, *do: str) -> tuple[Path, Certificate]:
    target = folder.parent / "rewritten"
    certificate = rewrite_checkpoint(str(folder), target, RewriteRecipe.model_validate({"do": do}))
    assert failing(target, folder) == []
    return target, certificate


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_every_exact_rewrite_leaves_the_logits_as_they_were(original: Path, tmp_path: Path) -> None:
    target = tmp_path / "exact"
    certificate = rewrite_checkpoint(str(original), target, RewriteRecipe(step=EXACT, skip_refused=True))
    refused = {step.rewrite: step.refused for step in certificate.layers[0].steps if step.refused}
    assert refused.keys() == {"fold"}
    torch.testing.assert_close(logits(target), logits(original), atol=1e-4, rtol=0)
    assert failing(target, original) == []
    gains = [tensor for name, tensor in tensors_of(target).items() if "self_attn" in name and "norm" in name]
    assert gains
    assert all(bool((gain == 1).all()) for gain in gains)


def test_heads_in_another_order_are_the_same_bits(original: Path) -> None:
    target, certificate = rewritten(original, "permute_heads(order=[2,0,3,1])")
    assert {layer.tier for layer in certificate.layers} == {"bit-exact"}
    before, after, name = tensors_of(original), tensors_of(target), AT.format(1) + "kv_b_proj.weight"
    rows = before[name].view(HEADS, -1, RANK)[[2, 0, 3, 1]].flatten(0, 1)
    assert torch.equal(after[name], rows)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split("self_attn.")[1] for name in changed} <= {
        "q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"
    }  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layers", "heads_left"), [("", 2), (", layers=[0, 1]", 2), (", layers=[0]", HEADS)])
def test_heads_that_are_pruned_are_gone_from_the_output(original: Path, layers: str, heads_left: int) -> None:
    target, certificate = rewritten(original, f"prune_heads(heads=[0, 3]{layers})")
    of_one = layers.endswith("[0]")

    def silence(attention: Any) -> None:
        if not of_one or attention.layer_idx == 0:
            attention.o_proj.weight.view(D, HEADS, VALUE)[:, [0, 3]] = 0.0

    torch.testing.assert_close(logits(target), logits(original, silence), atol=1e-4, rtol=0)
    config = transformers.AutoConfig.from_pretrained(target)
    assert config.num_attention_heads == config.num_key_value_heads == heads_left
    assert (certificate.unpadded is None) == (heads_left == 2)


def test_values_of_a_lower_rank_are_the_nearest_to_what_heads_make_of_the_latent(original: Path) -> None:
    target, certificate = rewritten(original, "truncate(rank=3, forms=['ov'])")
    assert certificate.settings == {"v_head_dim": 3}

    def truncate(attention: Any) -> None:
        gain = attention.kv_a_layernorm.weight
        up = attention.kv_b_proj.weight.view(HEADS, -1, RANK)[:, PLAIN:]
        out = attention.o_proj.weight.view(D, HEADS, VALUE)
        for head in range(HEADS):
            right = torch.linalg.svd((up[head].mT * gain[:, None]) @ out[:, head].mT).Vh[:3]
            out[:, head] = right.mT @ (right @ out[:, head])

    torch.testing.assert_close(logits(target), logits(original, truncate), atol=1e-4, rtol=0)
    error = (logits(target) - logits(original)).abs().max()
    assert certificate.end_to_end is not None
    assert float(error) > 0.01


def test_an_ablated_head_is_saved_and_only_output_maps_change(original: Path, tmp_path: Path) -> None:
    load(original).ablate("1.2").save(tmp_path / "ablated")
    before, after = tensors_of(original), tensors_of(tmp_path / "ablated")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [AT.format(1) + "o_proj.weight"]

    def silence(attention: Any) -> None:
        if attention.layer_idx == 1:
            attention.o_proj.weight.view(D, HEADS, VALUE)[:, 2] = 0.0

    torch.testing.assert_close(logits(tmp_path / "ablated"), logits(original, silence))


@pytest.mark.parametrize(
    "do", ["expand", "truncate(rank=4, forms=['qk'])", "merge_kv_heads(num_kv_heads=2, bounded=True)"]
)
def test_what_the_norm_of_a_latent_forbids_is_refused(tmp_path: Path, do: str) -> None:
    with pytest.raises(RewriteRefusedError, match="there is a norm after map 1"):
        rewritten(small(tmp_path / "original"), do)
    assert not (tmp_path / "rewritten").exists()


@pytest.mark.parametrize("layers", ["", ", layers=[1]"])
def test_a_narrower_latent_is_its_best_part_normalised_by_itself(original: Path, layers: str) -> None:
    target, certificate = rewritten(original, f"to_latent(rank=8{layers})")
    assert certificate.settings == ({} if layers else {"kv_lora_rank": 8})

    def narrow(attention: Any) -> None:
        norm = attention.kv_a_layernorm
        P = torch.linalg.svd(norm.weight[:, None] * attention.kv_b_proj.weight.mT).U[:, :8]

        def normalised(c: Tensor) -> Tensor:
            kept = c @ P
            scale = (kept.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon).rsqrt()
            return norm.weight * ((kept * scale) @ P.mT)

        if not layers or attention.layer_idx == 1:
            norm.forward = normalised

    torch.testing.assert_close(logits(target), logits(original, narrow), atol=1e-4, rtol=0)


_SCALED = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def grouped(
    folder: Path, kind: str = "Llama", shard: str = "5GB", dtype: Any = None, **settings: Any
) -> Path:
    torch.manual_seed(6)
    sizes: dict[str, Any] = {
        "hidden_size": D, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 60, "max_position_embeddings": 64,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "shard": "12KB"},
        {"num_key_value_heads": 1, "rope_parameters": _SCALED},
        {"kind": "Mistral", "sliding_window": None, "rms_norm_eps": 1e-5, "initializer_range": 0.5},
    ],
    ids=["grouped", "every head its own, in shards", "one group, stretched", "mistral"],
)
def test_a_rotary_model_is_written_in_deepseeks_format_and_computes_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    original = grouped(tmp_path / "original", **settings)
    target, certificate = rewritten(original, "fold_norm", "to_latent(format='deepseek_v3')")
    torch.testing.assert_close(logits(target), logits(original), atol=1e-4, rtol=0)
    assert transformers.AutoConfig.from_pretrained(target).model_type == "deepseek_v3"
    assert certificate.after.kv_bytes_per_token <= certificate.before.kv_bytes_per_token
    assert all(layer.measured and layer.measured.error_ratio < 2 for layer in certificate.layers)
    assert 0 < max(step.bound for step in certificate.layers[0].steps) < 1e-6
    with torch.no_grad():
        ours = load_language_model(target)(torch.arange(48).view(2, 24)).logits
    torch.testing.assert_close(ours, logits(target), atol=1e-4, rtol=0)


def test_values_of_a_latent_of_a_lower_rank_are_the_nearest_side_by_side(tmp_path: Path) -> None:
    original = grouped(tmp_path / "original")
    target, certificate = rewritten(original, "to_latent(format='deepseek_v3', rank=10)")
    assert certificate.after.kv_bytes_per_token < certificate.before.kv_bytes_per_token

    def truncate(attention: Any) -> None:
        U, S, Vh = torch.linalg.svd(attention.v_proj.weight, full_matrices=False)
        attention.v_proj.weight.copy_((U[:, :10] * S[:10]) @ Vh[:10])

    torch.testing.assert_close(logits(target), logits(original, truncate), atol=1e-4, rtol=0)


@pytest.mark.parametrize("made", [small, grouped], ids=["narrower", "from grouped heads"])
def test_a_latent_of_a_lower_rank_keeps_what_a_text_makes_of_it(made: Any, tmp_path: Path) -> None:
    original, text = made(tmp_path / "original"), tmp_path / "text.txt"
    with_words(original, 60)
    text.write_text(" ".join(f"w{n % 7}" for n in range(200)))
    step = "to_latent(rank=6" if made is small else "to_latent(format='deepseek_v3', rank=10"
    errors = {}
    for options in ("", ", on_text=True"):
        given = {"do": [f"{step}{options})"], "calibration": text if options else None}
        target = tmp_path / f"rewritten{bool(options)}"
        made_of = RewriteRecipe.model_validate(given)
        certificate = rewrite_checkpoint(str(original), target, made_of, text=text)
        assert failing(target, original, text=text, calibration=given["calibration"]) == []
        assert certificate.end_to_end is not None
        errors[options] = certificate.end_to_end.divergence_nats
    assert errors[", on_text=True"] < 0.5 * errors[""]


def test_bfloat16_is_written_to_its_own_rounding(tmp_path: Path) -> None:
    original = grouped(tmp_path / "original", dtype=torch.bfloat16)
    target, certificate = rewritten(original, "to_latent(format='deepseek_v3')")
    assert {tensor.dtype for tensor in tensors_of(target).values()} == {torch.bfloat16}
    assert all(layer.measured and layer.measured.error_ratio < 2 for layer in certificate.layers)


@pytest.mark.parametrize(
    ("settings", "do", "why"),
    [
        ({"kind": "Gemma"}, "", "embeddings of the model"),
        ({"mlp_bias": True}, "", "rest of the model"),
        ({"dtype": torch.float16}, "", "too small for float16"),
        ({}, ", layers=[0]", "a file has one format"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "",
            "with the length",
        ),
    ],
)
def test_what_deepseeks_format_cannot_say_is_refused(
    settings: dict[str, Any], do: str, why: str, tmp_path: Path
) -> None:
    original = grouped(tmp_path / "original", **settings)
    with pytest.raises(RewriteRefusedError, match=why):
        rewritten(original, f"to_latent(format='deepseek_v3'{do})")
    assert not (tmp_path / "rewritten").exists()


def test_a_number_changed_after_the_rewrite_is_found(tmp_path: Path) -> None:
    original = grouped(tmp_path / "original")
    target, certificate = rewritten(original, "to_latent(format='deepseek_v3')")
    name = AT.format(0) + "kv_b_proj.weight"
    with edited_tensors(target) as tensors:
        tensors[name][0, 0] *= 1.01
    record = certificate.tensors[name].model_copy(update={"written": tensor_hash(tensors[name])})
    seal(target, certificate.model_copy(update={"tensors": {**certificate.tensors, name: record}}))
    assert failing(target, original)
