"""What only single families of encoders have: formats of their authors, stored angles, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.test_families import made
from checkpoints.tiny_models import TINY, Tiny
from edited import drop_fields, edited_tensors, set_fields, set_tensors
from rewriting.certificates import failing
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.positions import PatchPositionBias
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.errors import DataError
from triptych.rewriting.functions import EXACT, Truncate
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.verification import verify
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.seeing.inspection.inspecting import inspect

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def outputs(folder: Path) -> list[torch.Tensor]:
    """Of all layers that read one sequence, for one random input."""
    checkpoint = open_checkpoint(folder)
    layers = [checkpoint.read(site).weights.to(torch.float64) for site in checkpoint.sites]
    random = torch.Generator().manual_seed(5)
    x = [torch.randn(1, 9, weights.d_model, generator=random, dtype=torch.float64) for weights in layers]
    return [run_layer(*pair) for pair in zip(layers, x, strict=True)]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "values that turn": ("roformer", {"rotary_value": True}, "RoFormer cannot be read: rotary_value"),
    "talking heads": ("deberta", {"talking_head": True}, "DeBERTa cannot be read: talking_head"),
    "norms before": ("nomic_bert", {"prenorm": True}, "NomicBERT cannot be read: prenorm"),
    "RMS norms": ("nomic_bert", {"use_rms_norm": True}, "NomicBERT cannot be read: use_rms_norm"),
    "causal": ("nomic_bert", {"causal": True}, "NomicBERT cannot be read: causal"),
    "interleaved": ("nomic_bert", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
    "xPos": ("nomic_bert", {"rotary_emb_scale_base": 512}, "rotary_emb_scale_base"),
    "not square": ("beit, tables", {"image_size": [24, 40]}, "3 rows and 5 columns of patches"),
    "another picture": ("beit, tables", {"image_size": 32}, r"the configuration says \[52, 4\]"),
    "no patch": ("dinov3", {"image_size": 4}, "no patch of"),
    "a bias too many": (
        "dinov3",
        {"value_bias": False},
        "the map of v has a bias, against the configuration",
    ),
    "a bias too few": ("dinov3", {"key_bias": True}, "the map of k has no bias, against the configuration"),
    "too few buckets": ("mpnet", {}, "20 rows, where 32 are used"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_family_does_not_hold_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, settings, said = REFUSED[case]
    made(name, tmp_path)
    set_fields(tmp_path / "config.json", **settings)
    if case == "too few buckets":
        set_tensors(tmp_path, {"encoder.relative_attention_bias.weight": torch.zeros(20, 4)})
    with pytest.raises(DataError, match=said):
        outputs(tmp_path)


@pytest.mark.parametrize(
    ("model", "sizes", "said"),
    [
        (
            "XLNetModel",
            {"d_model": 24, "n_layer": 1, "n_head": 4, "d_inner": 32},
            "XLNet cannot be read: its scores have a part for whether two tokens",
        ),
        (
            "DiffLlamaModel",
            {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32},
            "DiffLlama cannot be read: its heads are pairs",
        ),
    ],
)
def test_families_that_are_no_attention_of_ours_are_refused_with_their_reason(
    model: str, sizes: dict[str, int], said: str, tmp_path: Path
) -> None:
    made_of = getattr(transformers, model)
    made_of(made_of.config_class(**sizes, vocab_size=40)).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=said):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("roformer", "encoder.embed_positions.weight"),
        ("esm, rotary", "esm.encoder.layer.*.attention.self.rotary_embeddings.inv_freq"),
    ],
)
def test_stored_angles_must_be_those_of_the_configuration(name: str, tensor: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    expected = outputs(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")[tensor]
    set_tensors(tmp_path, {tensor: stored.half()})  # rounding is no other function
    assert_equal(outputs(tmp_path), expected)
    set_tensors(tmp_path, {tensor: stored * 1.02})
    with pytest.raises(DataError, match="are not what the configuration gives"):
        outputs(tmp_path)


def test_angles_of_each_layer_as_esm_first_stored_them_are_known(tmp_path: Path) -> None:
    made("esm, rotary", tmp_path)
    expected = outputs(tmp_path)
    names = [f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq" for layer in range(2)]
    with edited_tensors(tmp_path) as tensors:
        angles = tensors.pop("esm.encoder.layer.*.attention.self.rotary_embeddings.inv_freq")
        tensors |= {name: angles.clone() for name in names}
        for name in [*tensors]:
            tensors[name.replace("gamma", "weight").replace("beta", "bias")] = tensors.pop(name)
    assert_equal(outputs(tmp_path), expected)
    set_tensors(tmp_path, {names[1]: angles * 2})
    with pytest.raises(DataError, match=r"layer\.1.*are not what the configuration gives"):
        outputs(tmp_path)


def test_modernbert_as_first_published_is_read_as_its_class_has_it(tmp_path: Path) -> None:
    made("modernbert", tmp_path)
    expected = outputs(tmp_path)
    drop_fields(tmp_path / "config.json", "layer_types", "rope_parameters")
    assert_equal(outputs(tmp_path), expected)  # as the class fills them in
    old = {"global_attn_every_n_layers": 2, "global_rope_theta": 5e3, "local_rope_theta": 70.0}
    set_fields(tmp_path / "config.json", **old)
    found = outputs(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    new = transformers.ModernBertConfig.from_dict(record).to_dict()
    assert new["layer_types"] == ["full_attention", "sliding_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(new))
    assert_equal(found, outputs(tmp_path))


def test_nomic_bert_as_its_authors_write_it(tmp_path: Path) -> None:
    made("nomic_bert", tmp_path)
    expected = outputs(tmp_path)
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "rope_parameters")
    drop_fields(tmp_path / "config.json", *names)
    sizes = {"n_embd": 24, "n_head": 4, "n_layer": 2, "qkv_proj_bias": False, "prenorm": False}
    rotary = {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False}
    set_fields(tmp_path / "config.json", **sizes, **rotary, rotary_emb_scale_base=None, causal=False)
    assert_equal(outputs(tmp_path), expected)
    set_fields(tmp_path / "config.json", rotary_emb_base=50)
    assert not torch.equal(outputs(tmp_path)[0], expected[0])


def test_maps_of_global_attention_are_reported_and_not_read(tmp_path: Path) -> None:
    made("longformer", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.unread) == 2 * 3 * 2
    assert all("_global." in name for name in checkpoint.unread)
    assert [checkpoint.read(site).weights.semantics.window for site in checkpoint.sites] == [3, 5]
    for layer in inspect(checkpoint).layers:  # what folds into the output map is not redundant
        assert set(layer.foldable.values()) == {checkpoint.read(checkpoint.sites[0]).fixed} != {""}
        assert layer.cut == {}


@pytest.mark.parametrize(("both", "shared"), [(True, False), (False, True)])
def test_a_table_of_beit_is_of_the_layer_or_of_all(both: bool, shared: bool, tmp_path: Path) -> None:
    tiny = TINY["beit, tables"]
    tables_of = {"use_relative_position_bias": both, "use_shared_relative_position_bias": shared}
    settings = {**tiny.settings, **tables_of}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TINY, "beit, one table", Tiny(tiny.model, settings))
        made("beit, one table", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tables = []
    for site in checkpoint.sites:
        bias = checkpoint.read(site).weights.semantics.bias
        assert isinstance(bias, PatchPositionBias)
        tables.append(bias.table)
    stored = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if "bias_table" in k}
    assert len(stored) == (1 if shared else 2)
    assert all(any(torch.equal(table, of_file) for of_file in stored.values()) for table in tables)
    assert torch.equal(*tables) == shared


@pytest.mark.parametrize("name", ["dinov3", "beit, tables"])
def test_a_picture_is_measured_on_as_many_probes_as_it_has_tokens(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "source")
    recipe = RewriteRecipe.model_construct(step=EXACT, skip_refused=True, calibration=None)
    found = rewrite_checkpoint(str(tmp_path / "source"), tmp_path / "out", recipe, compare=False)
    assert all(layer.measured is not None and layer.measured.relative < 1e-5 for layer in found.layers)
    assert failing(tmp_path / "out", tmp_path / "source") == []
    checks = verify(tmp_path / "out", tmp_path / "source")
    assert any(check.held for check in checks if check.claim == "errors measured on the probes")


@pytest.mark.parametrize("energy", [None, 0.8])
def test_rotary_pairs_that_turn_by_rows_and_columns_are_not_counted_as_those_of_texts(
    energy: float | None, tmp_path: Path
) -> None:
    made("dinov3", tmp_path / "source")
    step = Truncate(rank=4) if energy is None else Truncate(energy=energy)
    recipe = RewriteRecipe.model_construct(step=(step,), skip_refused=True, calibration=None)
    found = rewrite_checkpoint(str(tmp_path / "source"), tmp_path / "out", recipe, compare=False)
    for layer in found.layers:
        assert any("rotary pairs turn by rows and columns of patches" in step.refused for step in layer.steps)


@pytest.mark.parametrize("name", ["dinov3", "beit, tables"])
def test_more_positions_than_a_picture_has_are_an_error(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layer = checkpoint.read(checkpoint.sites[0])
    with pytest.raises(ValueError, match="and a picture has 1"):
        run_layer(layer.weights, torch.randn(1, 30, layer.weights.d_model))
