"""A model on the disk: back bit for bit, or refused with the file's name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from edited import drop_fields, set_fields, set_tensors, with_value
from tolerances import assert_same
from triptych.core.models import (
    EncoderDecoder,
    LanguageModel,
    LanguageModelConfig,
    ModelConfig,
    attention_sites,
    find_config,
    read_model,
    write_model,
)
from triptych.core.models.storage import load_tensors, read_own_model, read_tensors
from triptych.errors import DataError

CONFIG = ModelConfig.model_validate(
    {
        **{"d_model": 8, "d_ff": 12, "num_heads": 2, "d_v": 3, "norm": "pre", "tie_embeddings": "target"},
        "encoder": {"num_layers": 1, "attention": {"q_bias": True}},
        "decoder": {"num_layers": 2, "cross_attention": {"num_heads": 1, "d_k": 5, "dropout": 0.1}},
    }
)
WEIGHTS, SETTINGS = "model.safetensors", "config.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write_model(EncoderDecoder.of(CONFIG, 11, 13, pad_id=2), tmp_path)
    return tmp_path


@pytest.fixture
def saved_as_version_1(saved: Path) -> Path:
    """A model with the configuration of older versions: that of its recipe."""
    sizes = {"src_vocab_size": 11, "tgt_vocab_size": 13, "pad_id": 2}
    record = {"format": 1, "architecture": "encoder-decoder", **sizes, "dtype": "float32"}
    (saved / SETTINGS).write_text(json.dumps({**record, "model": CONFIG.model_dump()}))
    return saved


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as refused:
        read_model(folder)
    return str(refused.value)


@pytest.mark.parametrize("tie", ["all", "target", "none"])
def test_what_was_written_is_read_bit_for_bit(tmp_path: Path, tie: str) -> None:
    model = EncoderDecoder.of(CONFIG.model_copy(update={"tie_embeddings": tie}), 13, 13, pad_id=2).eval()
    write_model(model, tmp_path)
    read = read_model(tmp_path)
    assert not read.training
    assert find_config(read) == find_config(model)
    assert (read.src_vocab_size, read.tgt_vocab_size, read.pad_id) == (13, 13, 2)
    expected = dict(model.named_parameters())
    assert dict(read.named_parameters()).keys() == expected.keys()
    for name, parameter in read.named_parameters():
        assert_same(parameter, expected[name], kind="exact")
    src, tgt = torch.tensor([[4, 5, 2]]), torch.tensor([[1, 7]])
    assert_same(read(src, tgt), model(src, tgt), kind="exact")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_model_of_another_dtype_keeps_it(tmp_path: Path, dtype: torch.dtype) -> None:
    model = EncoderDecoder.of(CONFIG, 11, 13, pad_id=2).to(dtype)
    write_model(model, tmp_path)
    read = dict(read_model(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        assert_same(read[name], parameter, kind="exact")


def test_a_dtype_that_is_none_is_refused_and_one_left_out_is_float32(saved: Path) -> None:
    set_fields(saved / SETTINGS, dtype="float8")
    assert "dtype is 'float8': known are float32" in refusal(saved)
    drop_fields(saved / SETTINGS, "dtype")
    assert {parameter.dtype for parameter in read_model(saved).parameters()} == {torch.float32}


def test_tied_tables_are_stored_once(tmp_path: Path) -> None:
    model = EncoderDecoder.of(CONFIG.model_copy(update={"tie_embeddings": "all"}), 13, 13)
    write_model(model, tmp_path)
    tables = [name for name in load_file(tmp_path / WEIGHTS) if "embedding" in name or "output." in name]
    assert tables == ["tgt_embedding.weight"]


def test_a_missing_tensor_is_refused_by_name(saved: Path) -> None:
    set_tensors(saved, {"encoder.0.feed_forward.inner.weight": None})
    message = refusal(saved)
    assert str(saved / WEIGHTS) in message
    assert "1 tensors missing, 0 unknown (encoder.0.feed_forward.inner.weight" in message


def test_an_unknown_tensor_is_refused_by_name(saved: Path) -> None:
    set_tensors(saved, {"encoder.7.weight": torch.zeros(2)})
    message = refusal(saved)
    assert str(saved / WEIGHTS) in message
    assert "0 tensors missing, 1 unknown (encoder.7.weight" in message


def test_a_misshapen_tensor_is_refused_with_both_shapes(saved: Path) -> None:
    set_tensors(saved, {"output.weight": torch.zeros(2, 8)})
    assert "0 tensors missing, 1 unknown" in refusal(saved)  # tied to the target: there is no such tensor
    set_tensors(saved, {"output.weight": None, "tgt_embedding.weight": torch.zeros(2, 8)})
    assert refusal(saved) == f"{saved / WEIGHTS}: tgt_embedding.weight is [2, 8], the model wants [13, 8]"


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 2000])
def test_a_damaged_weights_file_is_refused_by_name(saved: Path, num_bytes: int) -> None:
    whole = (saved / WEIGHTS).read_bytes()
    assert len(whole) > num_bytes
    (saved / WEIGHTS).write_bytes(whole[:num_bytes])
    assert f"{saved / WEIGHTS} cannot be read as safetensors" in refusal(saved)


def test_a_weights_file_that_is_not_there_is_refused_by_name(saved: Path) -> None:
    (saved / WEIGHTS).unlink()
    assert refusal(saved).startswith(f"{saved / WEIGHTS} is missing")


def test_a_folder_without_a_configuration_is_refused_by_name(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path} holds no config.json")


def test_a_wrong_format_number_is_refused_with_both_numbers(saved: Path) -> None:
    set_fields(saved / SETTINGS, format=99)
    assert f"{saved / SETTINGS} has format 99, this triptych reads 1 and 2" in refusal(saved)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"format": 1}', "\x00"])
def test_a_damaged_configuration_is_refused_by_name(saved: Path, content: str) -> None:
    (saved / SETTINGS).write_text(content)
    assert f"{saved / SETTINGS} is not a triptych configuration" in refusal(saved)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"d_modle": 8}}, "d_modle"),
        ({"model": {"d_model": 9}}, "num_heads 8 does not divide d_model 9"),
        ({"model": {"d_model": "wide"}}, "d_model"),
    ],
)
def test_a_configuration_of_version_1_with_bad_values_is_refused_with_file_and_key(
    saved_as_version_1: Path, changes: dict[str, Any], named: str
) -> None:
    set_fields(saved_as_version_1 / SETTINGS, **changes)
    message = refusal(saved_as_version_1)
    assert f"{saved_as_version_1 / SETTINGS} is not a triptych configuration" in message
    assert named in message


def test_nothing_is_changed_by_a_file_that_does_not_fit(saved: Path) -> None:
    from_file = EncoderDecoder.of(CONFIG, 11, 13, pad_id=2)
    before = {name: p.detach().clone() for name, p in from_file.named_parameters()}
    set_tensors(saved, {"tgt_embedding.weight": torch.zeros(2, 8)})
    with pytest.raises(DataError):
        load_tensors(from_file, read_tensors(saved / WEIGHTS), str(saved / WEIGHTS))
    for name, parameter in from_file.named_parameters():
        assert_same(parameter.detach(), before[name], kind="exact")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_id": 99}, "pad_id 99 is outside the vocabularies of 11 and 13"),
        ({"pad_id": "x"}, SETTINGS),
        ({"src_vocab_size": -5}, "pad_id 2 is outside the vocabularies of -5 and 13"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    saved_as_version_1: Path, changes: dict[str, Any], message: str
) -> None:
    set_fields(saved_as_version_1 / SETTINGS, **changes)
    assert message in refusal(saved_as_version_1)


def test_a_configuration_of_version_1_gives_the_same_model(saved_as_version_1: Path, tmp_path: Path) -> None:
    older = read_model(saved_as_version_1)
    write_model(older, tmp_path)
    newer = read_model(tmp_path)
    assert json.loads((tmp_path / SETTINGS).read_text())["format"] == 2
    assert find_config(newer) == find_config(older)
    src, tgt = torch.tensor([[4, 5, 2]]), torch.tensor([[1, 7]])
    assert_same(newer(src, tgt), older(src, tgt), kind="exact")


@pytest.mark.parametrize("scheme", ["learned", "rotary", "alibi", "none"])
@pytest.mark.parametrize(
    "attention",
    [
        {"qk_norm": True, "output_gate": True},
        {"scores": "cosine"},
        {"scores": "additive"},
        {"scale": "outside"},
        {"projections": "differential", "num_kv_heads": 2},
        {"projections": "latent", "d_latent": 5},
    ],
    ids=str,
)
def test_layers_are_written_as_data_with_their_semantics(
    tmp_path: Path, scheme: str, attention: dict[str, Any]
) -> None:
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 4, "context": 12}
    try:
        tree = {**sizes, "positions": {"scheme": scheme}, "attention": attention}
        config = LanguageModelConfig.model_validate(tree)
    except ValidationError:
        pytest.skip("no such layer")
    model = LanguageModel.of(config, "decoder", 11).eval()
    write_model(model, tmp_path)
    read = read_own_model(tmp_path)
    assert isinstance(read, LanguageModel)
    ids = torch.arange(9)[None]
    assert_same(read(ids).logits, model(ids).logits, kind="exact")
    assert find_config(read) == find_config(model)
    assert find_config(read).architecture("decoder", 11) == config.architecture("decoder", 11)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (["architecture", "encoder", "d_model"], "wide", "architecture.encoder.d_model"),
        (["architecture", "encoder", "depth"], 3, "LanguageModelArchitecture has no depth"),
        (["architecture", "encoder", "type"], "Path", "Path"),
        (["layers", 0, "num_heads"], 1.5, "num_heads is 1.5"),
        (["layers", 0, "semantics", "scale"], [1], "semantics.scale is a list"),
        (["layers", 0, "projections", "name"], "square", "projections = 'square' is not one of"),
        (["attention", "encoder.self"], [7], "list index out of range"),
        (["pad_id"], 12, "pad_id 12 is outside the vocabularies of 11 and 13"),
    ],
)
def test_a_part_of_another_type_is_refused_with_its_name(
    saved: Path, path: list[Any], value: Any, named: str
) -> None:
    record = json.loads((saved / SETTINGS).read_text())
    (saved / SETTINGS).write_text(json.dumps(with_value(record, ("model", *path), value)))
    message = refusal(saved)
    assert f"{saved / SETTINGS} is not a triptych configuration" in message
    assert named in message


def test_weights_that_are_not_trained_are_stored_and_must_be_there(tmp_path: Path) -> None:
    config = LanguageModelConfig(num_layers=1, d_model=8, num_heads=2, d_ff=8)
    made = LanguageModel.of(config, "decoder", 11)
    (block,) = made.architecture.blocks
    assert block.feed_forward is not None
    block = replace(block, feed_forward=replace(block.feed_forward, activation="xielu", gated=False))
    layers = [site.layer for site in attention_sites(made)]
    model = LanguageModel(replace(made.architecture, blocks=(block,)), layers)
    (name,) = (name for name, _ in model.named_buffers() if name.endswith("beta"))
    model.get_buffer(name).fill_(0.7)
    write_model(model, tmp_path)
    assert read_own_model(tmp_path).get_buffer(name).item() == pytest.approx(0.7)
    set_tensors(tmp_path, {name: None})
    with pytest.raises(DataError, match=rf"1 tensors missing, 0 unknown \({name}"):
        read_own_model(tmp_path)


@pytest.mark.parametrize("frozen", [["no such name"], 5, [7]])
def test_frozen_parameters_that_cannot_be_are_refused(saved: Path, frozen: object) -> None:
    set_fields(saved / SETTINGS, frozen=frozen)
    with pytest.raises(DataError, match="is not a triptych configuration"):
        read_own_model(saved)


def test_weights_of_a_wider_type_are_refused_and_of_a_narrower_one_are_read_exactly(saved: Path) -> None:
    held = load_file(saved / WEIGHTS)
    halves = {name: value.half() for name, value in held.items()}
    set_tensors(saved, halves)
    for name, value in read_own_model(saved).state_dict().items():
        if name in halves:
            assert value.dtype == torch.float32
            assert torch.equal(value, halves[name].float()), name
    set_tensors(saved, {name: value.double() for name, value in held.items()})
    assert "is torch.float64, the model torch.float32" in refusal(saved)
