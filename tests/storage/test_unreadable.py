"""What is given in the place of a checkpoint is named, with what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edited import drop_fields, set_fields, set_tensors
from small_checkpoints import llama
from triptych import TriptychError, load

AT = "model.layers.0.self_attn.q_proj"


def refusal(path: Path) -> str:
    with pytest.raises(TriptychError) as refused:
        _ = load(path).layers
    said = str(refused.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("model_index.json", "a pipeline of diffusers.*give the folder of one of them"),
        ("consolidated.00.pth", "under the names of their authors.*in Hugging Face's format"),
        ("shared_vocabulary.json", "CTranslate2 converted .*give the checkpoint that it was converted from"),
        ("openvino_model.xml", "compiled for another engine"),
        ("zero_to_fp32.py", "a state of training .*gather it first"),
        ("weights.npz", "weights of MLX"),
        ("tf_model.h5", "weights of TensorFlow or Flax"),
        ("model.tar.gz", "an archive .*unpack it"),
        ("modules.json", "a model of sentence-transformers without its weights"),
        ("best.pt", "weights are in best.pt: give that file"),
        (
            "model-00001-of-00002.safetensors",
            r"weights in parts, and no index .*: fetch model.safetensors.ind",
        ),
        ("tokenizer.json", "it has a tokenizer and no weights"),
    ],
)
def test_a_folder_of_something_else_says_what_it_holds(
    file: str, named: str, configured: bool, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("{}")
    if configured:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TriptychError, match=named):
        _ = load(tmp_path).layers
    assert ("no config.json" in refusal(tmp_path)) is not configured


def test_an_empty_folder_is_empty(tmp_path: Path) -> None:
    assert "it is empty" in refusal(tmp_path)


def test_folders_within_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "config.json").write_text("{}")
    assert "checkpoints of a training run of transformers (checkpoint-500/config.json)" in refusal(tmp_path)


def changed(folder: Path, tensors: dict[str, Any], **settings: Any) -> Path:
    """A Llama with tensors more, or None for less, and settings changed."""
    set_tensors(llama(folder), tensors)
    set_fields(folder / "config.json", **settings)
    drop_fields(folder / "config.json", *(name for name, value in settings.items() if value is None))
    return folder


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("W_q", "HQQ"),
        ("weight._data", "quanto"),
        ("weight_scales", "EETQ"),
        ("weight_scale_2", r"NVFP4 \(quant_method modelopt\)"),
        ("weight_zero_point", r"zero points \(compressed-tensors\)"),
        ("codebooks", "AQLM"),
    ],
)
def test_a_quantisation_that_is_not_read_is_named(part: str, method: str, tmp_path: Path) -> None:
    of = {"quant_method": "modelopt"} if "NVFP4" in method else None
    folder = changed(tmp_path / "llama", {f"{AT}.{part}": torch.ones(4, 4)}, quantization_config=of)
    with pytest.raises(TriptychError, match=f"{part} is quantised by .*{method}.*, which is not read: use"):
        _ = load(folder).layers


def test_factors_of_mlx_are_named(tmp_path: Path) -> None:
    more = {f"{AT}.scales": torch.ones(4, 1), f"{AT}.biases": torch.ones(4, 1)}
    assert "is quantised by MLX, which is not read" in refusal(changed(tmp_path / "llama", more))


def test_an_adapter_beside_the_weights_is_named(tmp_path: Path) -> None:
    folder = changed(tmp_path / "llama", {f"{AT}.lora_A.default.weight": torch.ones(2, 32)})
    assert f"{AT}.lora_A.default.weight belongs to an adapter of PEFT" in refusal(folder)


def test_a_state_of_training_says_where_its_weights_are(tmp_path: Path) -> None:
    llama(tmp_path / "llama")
    weights = load_file(tmp_path / "llama" / "model.safetensors")
    torch.save({"epoch": 3, "mine": weights}, tmp_path / "llama" / "last.pt")
    said = refusal(tmp_path / "llama" / "last.pt")
    assert "epoch is a int and no tensor; the weights seem to be under mine: save that record alone" in said
