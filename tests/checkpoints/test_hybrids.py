"""Models of which some layers are attention: which those are, their weights, and what rewrites may do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import triptych
from checkpoints.oracle import opened as open_any
from checkpoints.test_families import TOLERANCE, furthest_of_layers, in_batch, inputs, made, overheard
from edited import drop_fields, set_fields
from triptych.core.algebra.function import channels, probabilities, run_layer
from triptych.core.algebra.weights import Link
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.errors import DataError, TriptychError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

DELTA_NETS = "layer 3 of 4 is attention; the rest are gated delta nets, which are not"
BLOCKS = ["mamba", "attention", "mamba"]
MAMBA_2 = "layer 1 of 3 is attention; the rest are Mamba-2 mixers, which are not"
FEED_FORWARD = "layer 1 of 4 is attention; the rest are Mamba-2 mixers and feed-forward layers, which are not"


def opened(folder: Path, **fields: Any) -> Checkpoint:
    """A checkpoint with other fields in its configuration; None takes one out."""
    set_fields(folder / "config.json", **fields)
    drop_fields(folder / "config.json", *(name for name, value in fields.items() if value is None))
    return open_any(folder)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("qwen3_next", {}, DELTA_NETS),
        ("qwen3_next", {"layer_types": None}, DELTA_NETS),  # every fourth, if nothing is said
        ("granitemoehybrid", {}, MAMBA_2),
        ("granitemoehybrid", {"layer_types": None, "layers_block_type": BLOCKS}, MAMBA_2),
        ("lfm2", {"layer_types": None}, "layer 1 of 3 is attention; the rest are short convolutions"),
        ("jamba", {}, "layer 1 of 4 is attention; the rest are Mamba mixers"),
        ("bamba", {}, "layer 1 of 2 is attention; the rest are Mamba-2 mixers"),
        ("nemotron_h", {}, FEED_FORWARD),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*E-"}, FEED_FORWARD),
    ],
)
def test_layers_that_are_no_attention_are_named(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made(name, tmp_path)
    checkpoint = opened(tmp_path, **fields)
    assert checkpoint.others.startswith(said)
    (number,) = (site.layer for site in checkpoint.sites)
    d_model = checkpoint.read(checkpoint.sites[0]).weights.d_model
    assert triptych.load(tmp_path)[number, 3].W_Q.shape[0] == d_model
    with pytest.raises(DataError, match=said) as raised:
        load_language_model(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "nemotron_h"])
def test_attention_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    checkpoint, given = opened(tmp_path), inputs(model)
    heard = overheard(model, checkpoint, given)
    with torch.no_grad():
        expected = [one for one in model(**given, output_attentions=True).attentions if one is not None]
    assert len(expected) == len(checkpoint.sites)
    for site, weights_of_layer in zip(checkpoint.sites, expected, strict=True):
        weights = checkpoint.read(site).weights.to(torch.float64)
        q, k, _ = channels(weights, in_batch(heard[site.module, "x"]))
        found = probabilities(weights, q, k)
        assert float((found - weights_of_layer).abs().max()) < 1e-6


def test_a_configuration_that_says_no_kind_of_layer_is_refused(tmp_path: Path) -> None:
    made("granitemoehybrid", tmp_path)
    with pytest.raises(DataError, match="does not say what layer 0 of 3 is"):
        opened(tmp_path, layer_types=None)
    with pytest.raises(DataError, match="none of its 3 layers is attention: they are Mamba-2 mixers"):
        opened(tmp_path, layer_types=["linear_attention"] * 3)


@pytest.mark.parametrize("step", ["permute_heads(order=[1, 0, 3, 2])", "prune_heads(heads=[2])"])
def test_gates_follow_their_heads_and_all_other_layers_stay_as_they_were(step: str, tmp_path: Path) -> None:
    model = made("qwen3_next", tmp_path / "source")
    triptych.load(tmp_path / "source").rewrite(step).save(tmp_path / "out")
    one, other = (load_file(tmp_path / place / "model.safetensors") for place in ("source", "out"))
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    at = "model.layers.3.self_attn"
    assert {f"{at}.q_proj.weight", f"{at}.q_proj.bias", f"{at}.o_proj.weight"} <= changed
    assert all(name.startswith(f"{at}.") for name in changed)
    before, after = opened(tmp_path / "source"), opened(tmp_path / "out")
    weights = before.read(before.sites[0]).weights.to(torch.float64)
    if step.startswith("prune"):
        without = weights.o[0].weight.index_fill(0, torch.tensor([2]), 0.0)
        weights = replace(weights, o=(Link(without),))
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    found = run_layer(after.read(after.sites[0]).weights.to(torch.float64), x)
    assert float((found - run_layer(weights, x)).abs().max()) < 1e-12
    again = type(model).from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager"
    )
    (apart,) = furthest_of_layers(again.double().eval(), after).values()
    assert apart < TOLERANCE


@pytest.mark.parametrize("name", ["minimax", "helium"])
def test_heads_stay_where_something_else_has_as_many(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "source")
    triptych.load(tmp_path / "source").rewrite("prune_heads(number=1)", compare=False).save(tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out")
    assert again.config.num_attention_heads == model.config.num_attention_heads


@pytest.mark.parametrize("name", ["minimax", "falcon_h1"])
def test_hybrids_are_not_written_in_deepseeks_format(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "source")
    with pytest.raises(TriptychError, match="the rest of the model cannot be read from DeepSeek's format"):
        triptych.load(tmp_path / "source").rewrite("to_latent(format='deepseek_v3')", compare=False)


@pytest.mark.parametrize("step", ["truncate(forms=['ov'], rank=5)", "gauge_fix(forms=['ov'])"])
def test_rewrites_that_gates_of_channels_forbid_are_refused_by_name(step: str, tmp_path: Path) -> None:
    made("qwen3_next", tmp_path)
    with pytest.raises(TriptychError, match="each channel of a head's values has a gate of its own"):
        triptych.load(tmp_path).rewrite(step)
