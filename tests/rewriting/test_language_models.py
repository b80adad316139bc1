"""Language models of ours are looked into and rewritten like models for translation."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import triptych
from triptych.core.checkpoints.module_layers import ModuleLayers
from triptych.core.models import (
    LanguageModel,
    LanguageModelConfig,
    attention_weights,
    find_config,
    write_model,
)
from triptych.core.models.sites import input_norms
from triptych.core.models.storage import read_own_model
from triptych.running.opening import open_text_reader, why_not_run


def make_model(kind: str = "decoder", **config: object) -> LanguageModel:
    torch.manual_seed(1)
    given = {"num_layers": 2, "d_model": 16, "num_heads": 2, "context": 8, **config}
    model = LanguageModel.of(LanguageModelConfig.model_validate(given), kind, 13).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


IDS = torch.arange(24).view(3, 8) % 13


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("norm_kind", ["layer", "rms"])
@pytest.mark.parametrize("step", ["fold_norm()", "gauge_fix()", "permute_heads(order=[1, 0])"])
def test_a_rewritten_language_model_computes_the_same_and_is_read_again(
    kind: str, norm_kind: str, step: str, tmp_path: Path
) -> None:
    model = make_model(kind, norm_kind=norm_kind, positions={"scheme": "learned", "max_tokens": 8})
    changed = triptych.rewrite(model, step).result
    assert isinstance(changed, LanguageModel)
    before = model(IDS).logits
    torch.testing.assert_close(changed(IDS).logits, before, rtol=1e-9, atol=1e-9)
    old, new = attention_weights(model), attention_weights(changed)
    moved = [name for name in old if not torch.equal(old[name].W_Q, new[name].W_Q)]
    assert moved == [f"{kind}.0", f"{kind}.1"]
    write_model(changed, tmp_path)
    torch.testing.assert_close(read_own_model(tmp_path)(IDS).logits, before, rtol=1e-9, atol=1e-9)


def test_some_layers_alone_are_rewritten_and_the_configuration_says_which(tmp_path: Path) -> None:
    model = make_model()
    changed = triptych.rewrite(model, "truncate(rank=3)", sites=["decoder.1"]).result
    config = find_config(changed)
    assert list(config.attention_in_layer) == [1]
    write_model(changed, tmp_path)
    assert find_config(read_own_model(tmp_path)) == config


@pytest.mark.parametrize("call", ["fold_norm", "truncate(rank=4)", "truncate(budget=0.6, rotary='pairs')"])
def test_a_model_in_memory_and_its_run_are_rewritten_alike(call: str, tmp_path: Path) -> None:
    model = make_model().float()
    (tmp_path / "run").mkdir()
    write_model(model, tmp_path / "run")
    made = triptych.rewrite(model, call)
    out = tmp_path / "out"
    certificate = triptych.load(tmp_path / "run").rewrite(call, out=out, compare=False).certificate
    assert certificate is not None
    written = read_own_model(out).state_dict()
    for name, tensor in made.result.state_dict().items():
        assert torch.equal(written[name], tensor), name
    for layer in certificate.layers:
        (record,) = made.records[layer.module]
        (step,) = layer.steps
        assert (step.bound, step.choice, step.notes) == (record.bound, record.choice, record.notes)


def test_a_bound_on_forms_holds_where_heads_of_fewer_channels_have_another_scale(tmp_path: Path) -> None:
    """Trained queries and keys are larger than values, so that their bound is the one that counts."""
    model = make_model(positions={"scheme": "learned", "max_tokens": 8}).float()
    with torch.no_grad():
        for block in model.blocks:
            block.self_attention.projections.q_proj.weight.mul_(10)
    (tmp_path / "before").mkdir()
    write_model(model, tmp_path / "before")
    triptych.load(tmp_path / "before").rewrite("truncate(rank=3)", out=tmp_path / "after")
    claims = triptych.verify(tmp_path / "after", tmp_path / "before")
    assert [claim for claim in claims if claim.held is False] == []


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_norms_that_layers_read_are_those_before_them(norm: str) -> None:
    model = make_model(norm=norm)
    first, second = (read for read, _ in input_norms(model).values())
    assert first is not None
    assert second is not None
    blocks = model.blocks
    expected = (
        [blocks[0].self_residual.norm, blocks[1].self_residual.norm]
        if norm == "pre"
        else [model.embeddings.norm, blocks[0].feed_forward_residual.norm]
    )
    assert torch.equal(first.weight, expected[0].weight)
    assert torch.equal(second.weight, expected[1].weight)


def test_a_language_model_of_ours_is_a_checkpoint_to_look_into(tmp_path: Path) -> None:
    model = make_model(bias=False, norm_kind="rms")
    write_model(model, tmp_path)
    opened = ModuleLayers.read_folder(tmp_path)
    assert [(site.module, site.kind) for site in opened.sites] == [
        (f"decoder.{i}", "causal") for i in range(2)
    ]
    assert opened.longest_text(opened.sites[0]) == 8
    layer = opened.read(opened.sites[1])
    maps = model.blocks[1].self_attention.weights("causal")
    assert torch.equal(layer.weights.W_Q, maps.W_Q)
    assert opened.num_tensors == len(load_file(tmp_path / "model.safetensors"))
    assert "embeddings.table.weight" in opened.left_over
    assert not [name for name in opened.left_over if "self_attention" in name]


def test_a_run_of_a_language_model_is_run_by_us_and_its_attention_heard(tmp_path: Path) -> None:
    model = make_model().float()
    write_model(model, tmp_path)
    assert why_not_run(tmp_path) == ""
    opened, source = open_text_reader(tmp_path), ModuleLayers.read_folder(tmp_path)
    assert (opened.by, opened.kind) == ("triptych", "causal")
    window = next(opened.random_windows(0))
    found = opened.outputs(window)
    torch.testing.assert_close(found, model(window.inputs["input_ids"]).logits[0])
    assert set(opened.inputs(window, source, source.sites)) == {site.name for site in source.sites}
