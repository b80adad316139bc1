"""Families that no file knows: worked out where there is one way, refused with help where not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from triptych.checkpoints.checkpoint import open_checkpoint
from triptych.checkpoints.family import read_family
from triptych.errors import DataError

D, HEADS, GROUPS, WIDTH = 16, 4, 2, 4
CONFIG: dict[str, Any] = {
    "model_type": "nobodys",
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "max_position_embeddings": 8,
}
ROTARY = {**CONFIG, "rope_theta": 10000.0}


def tensors(
    names: tuple[str, ...] = ("query", "key", "value", "dense"), layers: int = 2
) -> dict[str, Tensor]:
    found = {}
    for layer in range(layers):
        for name, rows in zip(names, (HEADS, GROUPS, GROUPS, HEADS), strict=True):
            shape = (D, rows * WIDTH) if name == names[3] else (rows * WIDTH, D)
            found[f"net.blocks.{layer}.mixer.{name}.weight"] = torch.randn(shape)
        found[f"net.blocks.{layer}.mlp.up.weight"] = torch.randn(32, D)
    found["net.position_embeddings.weight"] = torch.randn(8, D)
    return found


def rotary_tensors() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors().items() if "position" not in name}


def write(folder: Path, weights: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


@pytest.mark.parametrize(
    "names",
    [("query", "key", "value", "dense"), ("q_proj", "k_proj", "v_proj", "o_proj"), ("wq", "wk", "wv", "wo")],
)
def test_the_only_way_to_read_it_is_taken_and_said(tmp_path: Path, names: tuple[str, ...]) -> None:
    weights = tensors(names)
    checkpoint = open_checkpoint(write(tmp_path, weights))
    assert checkpoint.known_by == "names and shapes"
    assert [(site.stack, site.layer, site.kind) for site in checkpoint.sites] == [
        ("decoder", 0, "causal"),
        ("decoder", 1, "causal"),
    ]
    layer = checkpoint.read(checkpoint.sites[1])
    assert layer.weights.num_key_heads == GROUPS
    assert torch.equal(layer.weights.W_Q.mT.flatten(0, 1), weights[f"net.blocks.1.mixer.{names[0]}.weight"])
    assert layer.weights.traits.positions == "learned"
    assert len(checkpoint.left_over) == 3


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        open_checkpoint(folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_attention_heads": 3}, "do not fit 3 heads"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "the configuration has none of"),
        (
            {"rope_theta": 10000.0},
            "whether its positions are rotary over whole heads, learned or something else",
        ),
        ({"attn_logit_softcapping": 50.0}, "nothing says what attn_logit_softcapping does to the scores"),
        ({"attention_multiplier": 0.1}, "nothing says what attention_multiplier does"),
    ],
)
def test_what_leaves_a_choice_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    message = refusal(write(tmp_path, tensors(), {**CONFIG, **config}))
    assert reason in message
    assert 'name = "mine"\n[[attention]]' in message


def test_which_channels_turn_is_asked_for_with_all_else_filled_in(tmp_path: Path) -> None:
    weights = rotary_tensors()
    message = refusal(write(tmp_path, weights, ROTARY))
    assert "which channels of a head turn together" in message
    for pairing in ("halves", "interleaved"):
        own = tmp_path / "my.toml"
        own.write_text(message[message.index('name = "mine"') :].replace('"halves"', f'"{pairing}"'))
        checkpoint = open_checkpoint(tmp_path, read_family(own))
        layer = checkpoint.read(checkpoint.sites[1])
        assert layer.scoring.rotation is not None
        assert layer.scoring.rotation.pairing == pairing
        assert layer.weights.num_key_heads == GROUPS
        expected = weights["net.blocks.1.mixer.query.weight"]
        assert torch.equal(layer.weights.W_Q.mT.flatten(0, 1), expected)


@pytest.mark.parametrize("number", ["00", "9" * 5000])
def test_a_layer_without_a_number_of_its_own_is_refused(tmp_path: Path, number: str) -> None:
    weights = {name.replace(".0.", f".{number}."): tensor for name, tensor in tensors(layers=1).items()}
    assert "no module has maps" in refusal(write(tmp_path, weights))


def test_two_stacks_alike_are_refused(tmp_path: Path) -> None:
    other = {name.replace("net.", "second."): tensor for name, tensor in tensors().items()}
    assert "more than one stack of the same kind" in refusal(write(tmp_path, {**tensors(), **other}))


def test_a_layer_that_is_missing_is_refused(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in tensors(layers=3).items() if ".1." not in name}
    assert "some are missing" in refusal(write(tmp_path, weights))


def test_names_that_look_like_attention_are_shown(tmp_path: Path) -> None:
    weights = {"h.0.strange_attention.w": torch.randn(4, 4)}
    message = refusal(write(tmp_path, weights))
    assert "h.0.strange_attention.w" in message
    assert "--family my.toml" in message


def test_a_family_file_reads_what_was_refused(tmp_path: Path) -> None:
    write(tmp_path, tensors(("a", "b", "c", "d")))
    refusal(tmp_path)
    own = tmp_path / "my.toml"
    own.write_text(
        'name = "mine"\n[[attention]]\nat = "net.blocks.{layer}.mixer"\nlayers = "2"\n'
        'q = "a"\nk = "b"\nv = "c"\no = "d"\nwidth = "4"\n'
    )
    checkpoint = open_checkpoint(tmp_path, read_family(own))
    assert checkpoint.written_as == "mine"
    assert len(checkpoint.sites) == 2
