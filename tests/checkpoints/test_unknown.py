"""Checkpoints that no family file knows: refused, with the beginning of the family file that reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.oracle import opened
from checkpoints.test_families import TOLERANCE, furthest_of_layers, made
from edited import set_fields
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.family import read_family
from triptych.errors import ConfigurationWarning, DataError, UsageError

D, HEADS, GROUPS, WIDTH = 16, 4, 2, 4
CONFIG: dict[str, Any] = {
    "model_type": "nobodys",
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
}


def tensors(names: tuple[str, ...] = ("query", "key", "value", "dense")) -> dict[str, Tensor]:
    found = {}
    for layer in range(2):
        for name, rows in zip(names, (HEADS, GROUPS, GROUPS, HEADS), strict=True):
            shape = (D, rows * WIDTH) if name == names[3] else (rows * WIDTH, D)
            found[f"net.blocks.{layer}.mixer.{name}.weight"] = torch.randn(shape)
        found[f"net.blocks.{layer}.mlp.up.weight"] = torch.randn(32, D)
    return found


def write(folder: Path, weights: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def refusal(folder: Path) -> tuple[str, str]:
    """The line of the refusal, and the family file to complete."""
    with pytest.raises(DataError) as error:
        open_checkpoint(folder)
    (note,) = error.value.__notes__
    assert "\n" not in str(error.value)
    return str(error.value), note


def test_the_refusal_names_the_type_and_what_looks_like_attention(tmp_path: Path) -> None:
    line, note = refusal(write(tmp_path, tensors()))
    assert "no family file knows model_type 'nobodys'" in line
    assert "net.blocks.{layer}.mixer (dense, key, query, value)" in line
    assert "#   net.blocks.{layer}.mlp.up.weight [32, 16]" in note


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_the_file_of_the_refusal_reads_the_checkpoint_once_it_is_completed(
    tmp_path: Path, pairing: str
) -> None:
    weights, own = tensors(), tmp_path / "my.toml"
    _, note = refusal(write(tmp_path, weights))
    positions = f'{{ kind = "rotary", pairing = "{pairing}" }}'
    own.write_text(note.replace('{ kind = "?" }', positions).replace('kind = "?"', 'kind = "causal"'))
    checkpoint = open_checkpoint(tmp_path, read_family(own))
    found = [(site.stack, site.layer, site.kind) for site in checkpoint.sites]
    assert found == [("decoder", layer, "causal") for layer in range(2)]
    layer = checkpoint.read(checkpoint.sites[1])
    assert layer.weights.semantics.rotary is not None
    assert layer.weights.semantics.rotary.pairing == pairing
    assert layer.weights.num_key_heads == GROUPS
    assert torch.equal(layer.weights.W_Q.mT.flatten(0, 1), weights["net.blocks.1.mixer.query.weight"])


@pytest.mark.parametrize("field", ["clip_qkv", "sliding_window", "qk_norm", "attn_logit_softcapping"])
def test_fields_that_a_completed_file_does_not_read_are_named_in_a_warning(
    tmp_path: Path, field: str
) -> None:
    _, note = refusal(write(tmp_path, tensors(), {**CONFIG, field: 8}))
    own = tmp_path / "my.toml"
    own.write_text(note.replace('{ kind = "?" }', '{ kind = "none" }').replace('kind = "?"', 'kind = "self"'))
    with pytest.warns(ConfigurationWarning, match=f"mine does not say what {field} does: not followed"):
        open_checkpoint(tmp_path, read_family(own))


def test_a_file_that_is_not_completed_is_refused(tmp_path: Path) -> None:
    _, note = refusal(write(tmp_path, tensors(), {**CONFIG, "num_attention_heads": None}))
    own = tmp_path / "my.toml"
    own.write_text(note)
    with pytest.raises(UsageError, match=r"attention\.0\.kind: Input should be 'self', 'causal' or 'cross'"):
        read_family(own)
    own.write_text(note.replace('{ kind = "?" }', '{ kind = "none" }').replace('kind = "?"', 'kind = "self"'))
    with pytest.raises(UsageError, match=r'complete each "\?"'):
        read_family(own)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "bart", "opt"])
def test_maps_and_sizes_are_filled_in_so_that_known_families_are_read_right(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    model = made(name, tmp_path)
    set_fields(tmp_path / "config.json", model_type="nobodys")
    _, note = refusal(tmp_path)
    own = tmp_path / "my.toml"
    tables = note.replace('{ kind = "?" }', '{ kind = "learned" }').split("[[attention]]\n")
    for number, table in enumerate(tables):
        kind = "cross" if "encoder_attn" in table else "self" if "encoder.layers" in table else "causal"
        tables[number] = table.replace('kind = "?"', f'kind = "{kind}"')
    own.write_text("[[attention]]\n".join(tables))
    checkpoint = opened(tmp_path, family=read_family(own))
    apart = furthest_of_layers(model, checkpoint)
    assert apart.keys() == {*checkpoint.sites}
    assert max(apart.values()) < TOLERANCE


def test_a_checkpoint_without_attention_is_refused_with_a_file_to_begin_with(tmp_path: Path) -> None:
    line, note = refusal(write(tmp_path, {"blocks.0.mlp.up.weight": torch.randn(4, 4)}))
    assert "what looks like attention is nothing" in line
    assert 'at = "?"' in note


def test_sizes_of_a_record_within_are_found(tmp_path: Path) -> None:
    within = {name: value for name, value in CONFIG.items() if name != "model_type"}
    _, note = refusal(write(tmp_path, tensors(), {"model_type": "nobodys", "text_config": within}))
    assert 'settings = "text_config"' in note
    assert 'heads = "num_attention_heads"' in note


def test_maps_in_one_are_filled_in_as_such(tmp_path: Path) -> None:
    weights = {f"h.{layer}.attn.c_attn.weight": torch.randn(D, 3 * D) for layer in range(2)}
    _, note = refusal(write(tmp_path, weights))
    assert 'qkv = "c_attn"\n' in note
    assert "\nq = " not in note


@pytest.mark.parametrize(
    "seen",
    [
        ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"),
        ("in_proj_ba", "in_proj_qkvz", "o_proj"),
    ],
    ids=["latents", "linear attention"],
)
def test_names_of_maps_that_are_not_known_are_said(tmp_path: Path, seen: tuple[str, ...]) -> None:
    weights = {f"model.layers.0.self_attn.{name}.weight": torch.randn(D, D) for name in seen}
    line, _ = refusal(write(tmp_path, weights))
    assert f"self_attn ({', '.join(seen)})" in line


@pytest.mark.parametrize(
    "name", ["blocks.0.\x1b[31mattention.w", f"h.{'9' * 5000}.attention.w", "h..attention.w"]
)
def test_names_of_every_kind_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    if "\x1b" in name:
        with pytest.raises(DataError, match="unprintable"):
            open_checkpoint(write(tmp_path, {name: torch.randn(4, 4)}))
    else:
        refusal(write(tmp_path, {name: torch.randn(4, 4)}))
