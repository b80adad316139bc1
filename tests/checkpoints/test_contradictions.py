"""Configurations and tensors that do not go together: an error that names what is wrong, never a guess."""

from pathlib import Path
from typing import Any

import pytest
import torch

from edited import set_tensors
from small_checkpoints import HEADS, D, gpt2, read_all
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.errors import DataError, UsageError


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        read_all(folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"n_head": 0}, "n_head | num_attention_heads is 0: a whole number of at least 1"),
        ({"n_head": -2}, "is -2"),
        ({"n_head": "4"}, "is '4'"),
        ({"n_head": True}, "is true"),
        ({"n_head": [4]}, "is [4]"),
        ({"n_head": 2.5}, "is 2.5"),
        ({"n_head": None}, "is missing"),
        ({"n_head": 3, "n_embd": 10**400}, "n_embd / n_head is a number too large"),
        ({"n_head": 3}, "n_embd / n_head is"),
        ({"n_head": 8, "n_embd": 2 * D}, "but the configuration says"),
        ({"n_embd": 2 * D}, "but the configuration says 192"),
        ({"n_layer": None}, "is missing"),
        ({"n_layer": 10**9}, "no tensor is below h.3.attn, attention layer 3 of 1,000,000,000"),
        ({"n_layer": 2}, "look like attention and are in no layer"),
        ({"n_layer": 4}, "no tensor is below h.3.attn, attention layer 3 of 4"),
        ({"model_type": "nobodys"}, "no family file knows model_type"),
        ({"model_type": 7}, "no family file knows model_type"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(gpt2(tmp_path, config=config))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    set_tensors(gpt2(tmp_path), {"h.1.attn.c_proj.weight": None})
    assert "h.1.attn.c_proj.weight" in refusal(tmp_path)


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    extra = {"h.1.attn.gate.weight": torch.randn(D, D)}
    assert "h.1.attn.gate.weight is in an attention layer" in refusal(gpt2(tmp_path, extra))


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("h.0.attn.c_attn.weight", torch.randn(D, 3 * D + 1), "but the configuration says 96"),
        ("h.0.attn.c_attn.weight", torch.randn(3 * D), "is not a matrix"),
        ("h.0.attn.c_attn.bias", torch.randn(D), "shape [32], but the configuration says [96]"),
        ("h.0.attn.c_proj.weight", torch.randn(D + 1, D), "but the configuration says 32"),
        ("h.0.attn.c_proj.weight", torch.zeros(D, D, dtype=torch.int32), "is an unknown quantisation"),
    ],
)
def test_a_tensor_of_another_kind_is_named(
    tmp_path: Path, name: str, tensor: torch.Tensor, reason: str
) -> None:
    message = refusal(gpt2(tmp_path, {name: tensor}))
    assert name in message
    assert reason in message


def test_a_folder_without_a_configuration_says_what_is_needed(tmp_path: Path) -> None:
    (gpt2(tmp_path) / "config.json").unlink()
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        read_all(tmp_path)


def test_one_file_beside_its_configuration_is_enough(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gpt2(tmp_path) / "model.safetensors")
    assert checkpoint.read(checkpoint.sites[0]).weights.num_heads == HEADS
