"""Quantised maps: unpacked as their formats say, or refused by name."""

from pathlib import Path
from typing import Any, final

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from made import Made
from triptych.core.storage import quantised
from triptych.core.storage.quantised import dequantised
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import open_tensors
from triptych.errors import DataError

D_OUT, D_IN, GROUP = 16, 64, 32


def unpacked(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    save_file(tensors, folder / "model.safetensors")
    found = dequantised(open_tensors(folder), Settings({"quantization_config": config}, "config.json"))
    assert set(found.infos) == {"a.weight", "norm.weight"}
    assert found.infos["a.weight"].shape == (D_OUT, D_IN)
    assert torch.equal(found.read("norm.weight"), tensors["norm.weight"])
    return found.read("a.weight")


def beside() -> dict[str, Tensor]:
    return {"norm.weight": torch.randn(4)}


def packed(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers of a row, so many to 32 bits, the first lowest; in groups of 8 in an order if it is given."""
    per_word = 32 // bits
    words = numbers.unflatten(1, (-1, per_word))  # type: ignore[no-untyped-call]
    if order is not None:
        words = words[..., list(order)]
    total = torch.zeros(words.shape[:2], dtype=torch.long)
    for place in range(per_word):
        total |= words[..., place].long() << (bits * place)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


@pytest.mark.parametrize("shape", [(1,), (D_OUT,), (D_OUT, 1)])
def test_float8_with_a_scale_for_all_or_one_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight, scale = torch.randn(D_OUT, D_IN).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    tensors = {"a.weight": weight, "a.weight_scale": scale, **beside()}
    expected = weight.float() * scale.reshape(-1, 1)
    assert torch.equal(unpacked(tmp_path, tensors, {"quant_method": "compressed-tensors"}), expected)


def test_float8_in_blocks_the_last_of_which_are_smaller(tmp_path: Path) -> None:
    weight, scale = torch.randn(D_OUT, D_IN).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, **beside()}
    found = unpacked(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [12, 24]})
    for row in range(D_OUT):
        for column in range(D_IN):
            expected = weight[row, column].float() * scale[row // 12, column // 24]
            assert found[row, column] == expected


def test_as_many_blocks_as_rows_are_blocks(tmp_path: Path) -> None:
    """As in DeepSeek-V3's output maps: 56 × 128 blocks for 7,168 rows."""
    weight, scale = torch.randn(8, 64).to(torch.float8_e4m3fn), torch.rand(1, 8) + 0.5
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    settings = Settings({"quantization_config": {"weight_block_size": [8, 8]}}, "config.json")
    found = dequantised(open_tensors(tmp_path), settings).read("a.weight")
    assert torch.equal(found, weight.float() * scale[0].repeat_interleave(8))


PARTS_THAT_DO_NOT_FIT: dict[str, dict[str, Tensor]] = {
    "an order beyond the groups": {"a.g_idx": torch.full((D_IN,), 9, dtype=torch.int32)},
    "scales of another width": {"a.scales": torch.ones(D_IN // GROUP, D_OUT + 3)},
    "too few scales": {"a.scales": torch.ones(1, D_OUT)},
    "zeros of another width": {"a.qzeros": torch.zeros(D_IN // GROUP, 5, dtype=torch.int32)},
}


@pytest.mark.parametrize("changed", PARTS_THAT_DO_NOT_FIT.values(), ids=PARTS_THAT_DO_NOT_FIT)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, changed: dict[str, Tensor]) -> None:
    parts = {
        "a.qweight": words(D_IN // 8, D_OUT),
        "a.qzeros": words(D_IN // GROUP, D_OUT // 8),
        "a.scales": torch.ones(D_IN // GROUP, D_OUT),
        **changed,
    }
    save_file(parts, tmp_path / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    found = dequantised(open_tensors(tmp_path), Settings({"quantization_config": config}, "config.json"))
    with pytest.raises(
        DataError, match=r"a\.weight: its parts \(a\.qweight, .*\) do not fit together"
    ) as error:
        found.read("a.weight")
    assert "\n" not in str(error.value)


@final
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_nothing_larger_than_the_map_is_made_when_it_is_unpacked(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "_NUMBERS_AT_A_TIME", 1 << 12)
    d_out, d_in = 256, 512
    packed_in, packed_out = (d_in // 8, d_out) if method == "gptq" else (d_in, d_out // 8)
    tensors = {
        "a.qweight": words(packed_in, packed_out),
        "a.qzeros": words(d_in // GROUP, d_out // 8),
        "a.scales": torch.ones(d_in // GROUP, d_out),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": method, "bits": 4, "group_size": GROUP}
    found = dequantised(open_tensors(tmp_path), Settings({"quantization_config": config}, "config.json"))
    with Made() as made:
        weight = found.read("a.weight")
    assert made.largest_bytes == weight.nbytes == 4 * d_out * d_in


def test_eight_bits_of_bitsandbytes(tmp_path: Path) -> None:
    whole = torch.randn(D_OUT, D_IN)
    largest = whole.abs().amax(dim=1)
    weight = (whole / largest[:, None] * 127).round().to(torch.int8)
    found = unpacked(tmp_path, {"a.weight": weight, "a.SCB": largest, **beside()}, {})
    assert float((found - whole).abs().max()) <= float(largest.max()) / 127


@pytest.mark.parametrize("at_a_time", [1, 3 * D_OUT * 16, 1 << 20])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq(
    tmp_path: Path,
    bits: int,
    version: str,
    ordered: bool,
    at_a_time: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantised, "_NUMBERS_AT_A_TIME", at_a_time)
    most = (1 << bits) - 1
    numbers = torch.randint(0, most + 1, (D_IN, D_OUT))
    zeros = torch.randint(1, most + 1, (D_IN // GROUP, D_OUT))
    scales = torch.rand(D_IN // GROUP, D_OUT).half()
    groups = torch.arange(D_IN) // GROUP
    if ordered:
        groups = groups[torch.randperm(D_IN)]
    expected = ((numbers - zeros[groups]).float() * scales.float()[groups]).T
    stored = zeros if version == "gptq_v2" else zeros - 1
    tensors = {
        "a.qweight": packed(numbers.T.contiguous(), bits).T.contiguous(),
        "a.qzeros": packed(stored, bits),
        "a.scales": scales,
        **({"a.g_idx": groups.int()} if ordered else {}),
        **beside(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}
    assert torch.equal(unpacked(tmp_path, tensors, config), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", None])
def test_gptq_zeros_that_contradict_sym_are_refused(tmp_path: Path, bits: int, version: str | None) -> None:
    middle = 1 << (bits - 1)
    right = middle if version == "gptq_v2" else middle - 1
    other = {middle: middle - 1, middle - 1: middle}[right]
    stored = torch.full((D_IN // GROUP, D_OUT), right)
    one_off = stored.clone()
    one_off[-1, -1] = other
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True}
    config |= {} if version is None else {"checkpoint_format": version}
    numbers = torch.randint(0, 1 << bits, (D_IN, D_OUT))

    def tensors(zeros: Tensor) -> dict[str, Tensor]:
        return {
            "a.qweight": packed(numbers.T.contiguous(), bits).T.contiguous(),
            "a.qzeros": packed(zeros, bits),
            "a.scales": torch.ones(D_IN // GROUP, D_OUT),
            **beside(),
        }

    assert torch.equal(unpacked(tmp_path, tensors(stored), config), (numbers - middle).float().T)
    for wrong in (torch.full_like(stored, other), one_off):
        with pytest.raises(DataError, match=f"sym: true, which puts every zero at {middle}, and as"):
            unpacked(tmp_path, tensors(wrong), config)
        assert unpacked(tmp_path, tensors(wrong), config | {"sym": False}).shape == (D_OUT, D_IN)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_scales_of_other_groups_than_the_configuration_has_are_refused(tmp_path: Path, method: str) -> None:
    tensors = {
        "a.qweight": words(*((D_IN // 8, D_OUT) if method == "gptq" else (D_IN, D_OUT // 8))),
        "a.qzeros": words(D_IN // GROUP, D_OUT // 8),
        "a.scales": torch.ones(D_IN // GROUP, D_OUT),
        **beside(),
    }
    config = {"quant_method": method, "bits": 4, "group_size": D_IN}
    with pytest.raises(DataError, match=f"scales for 2 groups, and {D_IN} inputs in groups of {D_IN} are 1"):
        unpacked(tmp_path, tensors, config)
    assert unpacked(tmp_path, tensors, config | {"group_size": GROUP}).shape == (D_OUT, D_IN)


@pytest.mark.parametrize("at_a_time", [1, 5 * D_OUT, 1 << 20])
def test_awq(tmp_path: Path, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_NUMBERS_AT_A_TIME", at_a_time)
    numbers, zeros = torch.randint(0, 16, (D_IN, D_OUT)), torch.randint(0, 16, (D_IN // GROUP, D_OUT))
    scales = torch.rand(D_IN // GROUP, D_OUT).half()
    groups = torch.arange(D_IN) // GROUP
    expected = ((numbers - zeros[groups]).float() * scales.float()[groups]).T
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's own: nibble i holds this one of eight columns
    tensors = {
        "a.qweight": packed(numbers, 4, order),
        "a.qzeros": packed(zeros, 4, order),
        "a.scales": scales,
        **beside(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    assert torch.equal(unpacked(tmp_path, tensors, config), expected)


def refused(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DataError) as error:
        dequantised(open_tensors(folder), Settings({"quantization_config": config}, "config.json"))
    return str(error.value)


def words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    parts = {"a.qweight": words(8, 16), "a.qzeros": words(2, 2), "a.scales": torch.ones(2, 16)}
    config = {"quant_method": "aqlm", "bits": 4, "group_size": 32}
    assert "a.qweight is quantised by aqlm in 4 bits" in refused(tmp_path, parts, config)
    assert "bits 3" in refused(tmp_path, parts, {**config, "bits": 3})
    assert "bits null" in refused(tmp_path, parts, {})
    assert "group_size" in refused(tmp_path, parts, {**config, "group_size": 10**400})
    flat = {**parts, "a.qweight": words(16)}
    assert "a.qweight: it is no matrix" in refused(tmp_path, flat, config)
    alone = {"a.qweight": words(8, 16)}
    assert "there is no tensor a.qzeros" in refused(tmp_path, alone, config)
    four_bits = {
        "a.weight": torch.zeros(512, 1, dtype=torch.uint8),
        "a.weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8),
    }
    assert "a.weight is quantised by bitsandbytes in 4 bits" in refused(tmp_path, four_bits, {})
    narrow = torch.zeros(16, 64).to(torch.float8_e4m3fn)
    scales = {"a.weight": narrow, "a.weight_scale_inv": torch.ones(3, 5)}
    assert "no scales of [16, 64]" in refused(tmp_path, scales, {"weight_block_size": [8, 16]})


def test_without_anything_quantised_the_tensors_are_what_they_were(tmp_path: Path) -> None:
    save_file({"a.weight": torch.randn(3, 4)}, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    assert dequantised(tensors, Settings({}, "config.json")) is tensors
