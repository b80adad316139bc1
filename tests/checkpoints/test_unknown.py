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
    "architectures": ["NobodysForCausalLM"],
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
    assert layer.embedded_positions == "learned"
    assert len(checkpoint.left_over) == 3


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    return "\n".join([str(error.value), *error.value.__notes__])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_attention_heads": 3}, "do not fit 3 heads"),
        ({"num_attention_heads": None}, "does not say how many heads net.blocks.{layer}.mixer has"),
        ({"encoder_attention_heads": 2, "num_attention_heads": None}, "does not say how many heads"),
        ({"n_head": 2}, "num_attention_heads and n_head are not the same number of heads"),
        ({"num_key_value_heads": 3}, "do not fit 4 heads on 3 of keys"),
        ({"head_dim": 3}, "do not fit 4 heads"),
        ({"max_position_embeddings": 9}, "which positions net.blocks.{layer}.mixer has cannot be told"),
        (
            {"position_embedding_type": "rotary"},
            "which positions net.blocks.{layer}.mixer has cannot be told",
        ),
        ({"rope_theta": 10000.0}, "nothing says what net.position_embeddings.weight does"),
        ({"architectures": ["NobodysModel"]}, "sees what comes later cannot be told"),
        ({"architectures": None}, "sees what comes later cannot be told"),
        ({"is_decoder": False}, "sees what comes later cannot be told"),
        ({"is_encoder_decoder": True}, "sees what comes later cannot be told"),
    ],
)
def test_what_leaves_a_choice_is_refused(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    message = refusal(write(tmp_path, tensors(), {**CONFIG, **config}))
    assert reason in message
    assert 'name = "mine"\n[[attention]]' in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_qkv", 8),
        ("sliding_window", 128),
        ("softmax_scale", 0.1),
        ("attn_scale", 0.1),
        ("qk_norm", True),
        ("is_causal", False),
        ("use_alibi", True),
        ("attn_logits_soft_cap", 50.0),
        ("attn_logit_softcapping", 50.0),
        ("attention_multiplier", 0.1),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("scale_attn_weights", False),
        ("a_field_that_nobody_has_seen", 1),
        ("attn_config", {"n_heads": 4}),
    ],
)
@pytest.mark.parametrize("rotary", [False, True], ids=["guess", "advice"])
def test_a_field_that_is_not_understood_is_named_and_nothing_is_guessed_or_advised(
    tmp_path: Path, field: str, value: Any, rotary: bool
) -> None:
    weights, config = (rotary_tensors(), ROTARY) if rotary else (tensors(), CONFIG)
    message = refusal(write(tmp_path, weights, {**config, field: value}))
    assert f"nothing says what {field} in" in message
    assert "pairing" not in message


def test_a_table_of_head_width_is_no_table_of_learned_positions(tmp_path: Path) -> None:
    weights = {**tensors(), "net.position_embeddings.weight": torch.randn(8, WIDTH)}
    assert "which positions net.blocks.{layer}.mixer has cannot be told" in refusal(write(tmp_path, weights))


def test_a_kind_of_rope_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    config = {**ROTARY, "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}
    message = refusal(write(tmp_path, rotary_tensors(), config))
    assert "rope_parameters cannot be followed: rope_type 'axial' is not supported" in message


def test_the_heads_of_a_record_within_are_found(tmp_path: Path) -> None:
    above = {name: CONFIG[name] for name in ("model_type", "architectures")}
    within = {name: value for name, value in CONFIG.items() if name not in above}
    checkpoint = open_checkpoint(write(tmp_path, tensors(), {**above, "text_config": within}))
    assert checkpoint.read(checkpoint.sites[0]).weights.num_heads == HEADS
    both = {**above, "text_config": within, "vision_config": within}
    message = refusal(write(tmp_path, tensors(), both))
    assert "text_config, vision_config each say how many heads there are" in message


def test_maps_in_one_are_said_to_be(tmp_path: Path) -> None:
    weights = {f"h.{layer}.attn.c_attn.weight": torch.randn(D, 3 * D) for layer in range(2)}
    assert "h.0.attn.c_attn.weight holds several maps in one" in refusal(write(tmp_path, weights))


def stacks(config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An encoder with 2 heads and a decoder with 4."""
    found: dict[str, Tensor] = {}
    for stack, modules in {"encoder": ["self_attn"], "decoder": ["self_attn", "encoder_attn"]}.items():
        for module in modules:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                found[f"model.{stack}.layers.0.{module}.{name}.weight"] = torch.randn(D, D)
        found[f"model.{stack}.embed_positions.weight"] = torch.randn(10, D)
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "max_position_embeddings": 8}
    about = {"model_type": "nobodys", "architectures": ["NobodysForConditionalGeneration"]}
    return found, {**about, **heads, "is_encoder_decoder": True, **config}


def test_each_stack_has_the_heads_of_its_own_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, *stacks({})))
    found = {(site.stack, site.kind): checkpoint.read(site).weights.num_heads for site in checkpoint.sites}
    assert found == {("encoder", "self"): 2, ("decoder", "causal"): 4, ("decoder", "cross"): 4}


def test_a_stack_is_not_given_the_heads_of_the_other(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, *stacks({"decoder_attention_heads": None, "num_attention_heads": 2})))
    assert "does not say how many heads model.decoder" in message


def test_which_channels_turn_is_asked_for_with_all_else_filled_in(tmp_path: Path) -> None:
    weights = rotary_tensors()
    message = refusal(write(tmp_path, weights, ROTARY))
    assert "which channels of a head turn together" in message
    for pairing in ("halves", "interleaved"):
        own = tmp_path / "my.toml"
        own.write_text(message[message.index('name = "mine"') :].replace('"halves"', f'"{pairing}"'))
        checkpoint = open_checkpoint(tmp_path, read_family(own))
        layer = checkpoint.read(checkpoint.sites[1])
        assert layer.weights.semantics.rotary is not None
        assert layer.weights.semantics.rotary.pairing == pairing
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
    assert f"by names that are known: its attention has {', '.join(seen)}" in refusal(
        write(tmp_path, weights)
    )
