"""Quantised maps: unpacked as their formats say, or refused by name."""

import json
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
from triptych.core.storage.tensors import Tensors, open_tensors
from triptych.errors import DataError

D_OUT, D_IN, GROUP = 16, 64, 32
OF_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # its own order: nibble i holds this one of eight columns


def stored(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensors:
    save_file(tensors, folder / "model.safetensors")
    return dequantised(open_tensors(folder), Settings({"quantization_config": config}, "config.json"))


def unpacked(
    folder: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    shape: tuple[int, int] = (D_OUT, D_IN),
) -> Tensor:
    found = stored(folder, tensors, config)
    assert set(found.infos) == {"a.weight", "norm.weight"}
    assert found.infos["a.weight"].shape == shape
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

    def entry(row: int, column: int) -> Tensor:
        return weight[row, column].float() * scale[row // 12, column // 24]

    assert torch.equal(found, weight_of((D_OUT, D_IN), entry))


def test_as_many_blocks_as_rows_are_blocks(tmp_path: Path) -> None:
    """As in DeepSeek-V3's output maps: 56 × 128 blocks for 7,168 rows."""
    weight, scale = torch.randn(8, 64).to(torch.float8_e4m3fn), torch.rand(1, 8) + 0.5
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    found = stored(tmp_path, tensors, {"weight_block_size": [8, 8]}).read("a.weight")
    assert torch.equal(found, weight.float() * scale[0].repeat_interleave(8))


PARTS_THAT_DO_NOT_FIT: dict[str, dict[str, Tensor]] = {
    "an order beyond the groups": {"a.g_idx": torch.full((D_IN,), 9, dtype=torch.int32)},
    "scales of another width": {"a.scales": torch.ones(D_IN // GROUP, D_OUT + 3)},
    "too few scales": {"a.scales": torch.ones(1, D_OUT)},
    "zeros of another width": {"a.qzeros": torch.zeros(D_IN // GROUP, 5, dtype=torch.int32)},
}


@pytest.mark.parametrize("changed", PARTS_THAT_DO_NOT_FIT.values(), ids=PARTS_THAT_DO_NOT_FIT)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, changed: dict[str, Tensor]) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    found = stored(tmp_path, {**blank("gptq", D_IN, D_OUT), **changed}, config)
    said = r"a\.weight: its parts \(a\.qweight, .*\) do not fit together"
    with pytest.raises(DataError, match=said) as error:
        found.read("a.weight")
    assert "\n" not in str(error.value)


def blank(method: str, d_in: int, d_out: int) -> dict[str, Tensor]:
    """Parts of a map in four bits that fit together."""
    return {
        "a.qweight": words(d_in // 8, d_out) if method == "gptq" else words(d_in, d_out // 8),
        "a.qzeros": words(d_in // GROUP, d_out // 8),
        "a.scales": torch.ones(d_in // GROUP, d_out),
    }


@final
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_nothing_larger_than_the_map_is_made_when_it_is_unpacked(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "_NUMBERS_AT_A_TIME", 1 << 12)
    d_out, d_in = 256, 512
    config = {"quant_method": method, "bits": 4, "group_size": GROUP}
    found = stored(tmp_path, blank(method, d_in, d_out), config)
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
    tmp_path: Path, bits: int, version: str, ordered: bool, at_a_time: int, monkeypatch: pytest.MonkeyPatch
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
    tensors = {**blank(method, D_IN, D_OUT), **beside()}
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
    parts = {"a.qweight": packed(numbers, 4, OF_AWQ), "a.qzeros": packed(zeros, 4, OF_AWQ)}
    tensors = {**parts, "a.scales": scales, **beside()}
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    assert torch.equal(unpacked(tmp_path, tensors, config), expected)


def refused(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    with pytest.raises(DataError) as error:
        stored(folder, tensors, config)
    return str(error.value)


def words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def encoded(record: dict[str, Any]) -> Tensor:
    """A record as bitsandbytes stores it, in a tensor of bytes."""
    return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)


def of_compressed_tensors(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_of_compressed_tensors(
    tmp_path: Path, bits: int, has_zeros: bool, ordered: bool
) -> None:
    half = 1 << (bits - 1)
    numbers = torch.randint(-half, half, (D_OUT, D_IN))
    scale = torch.rand(D_OUT, D_IN // GROUP) + 0.5
    tensors = {
        "a.weight_packed": packed(numbers + half, bits),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([D_OUT, D_IN]),
        "a.input_scale": torch.ones(1),
        **beside(),
    }
    zeros = torch.zeros(D_OUT, D_IN // GROUP, dtype=torch.long)
    if has_zeros:  # packed along the rows
        zeros = torch.randint(-half, half, zeros.shape)
        tensors["a.weight_zero_point"] = packed((zeros + half).mT.contiguous(), bits).mT.contiguous()
    order = torch.arange(D_IN) // GROUP
    if ordered:
        order = order[torch.randperm(D_IN)]
        tensors["a.weight_g_idx"] = order.to(torch.int32)

    def entry(row: int, column: int) -> Tensor:
        group = int(order[column])
        return (numbers[row, column] - zeros[row, group]) * scale[row, group]

    found = unpacked(tmp_path, tensors, of_compressed_tensors(bits))
    assert torch.equal(found, weight_of((D_OUT, D_IN), entry))


@pytest.mark.parametrize("has_zeros", [False, True])
def test_int8_of_compressed_tensors_in_groups(tmp_path: Path, has_zeros: bool) -> None:
    weight = torch.randint(-128, 128, (D_OUT, D_IN), dtype=torch.int8)
    scale, zeros = torch.rand(D_OUT, 2), torch.randint(-9, 9, (D_OUT, 2), dtype=torch.int8)
    tensors = {"a.weight": weight, "a.weight_scale": scale, **beside()}
    if has_zeros:
        tensors["a.weight_zero_point"] = zeros
    found = unpacked(tmp_path, tensors, of_compressed_tensors(8))
    apart = weight.long().unflatten(1, (2, -1)) - (zeros.long()[..., None] if has_zeros else 0)  # type: ignore[no-untyped-call]
    assert torch.equal(found, (apart.float() * scale[..., None]).flatten(1))


@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_of_bitsandbytes(tmp_path: Path, nested: bool) -> None:
    """The table of nf4 or fp4 is in the file; the first number of a byte is its upper half."""
    table = torch.randn(16).sort().values
    codes = torch.randint(0, 16, (D_OUT * D_IN,))
    largest = torch.rand(D_OUT * D_IN // 64) + 0.5
    record: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
    record["shape"] = [D_OUT, D_IN]
    tensors = {
        "a.weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "a.weight.absmax": largest,
        "a.weight.quant_map": table,
        **beside(),
    }
    if nested:  # the scales are quantised, too
        record |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.25}
        scales = torch.randint(0, 256, (len(largest),))
        of_blocks, of_scales = torch.rand(len(largest) // 8) + 0.5, torch.randn(256)
        largest = of_scales[scales] * of_blocks[torch.arange(len(largest)) // 8] + 0.25
        tensors |= {
            "a.weight.absmax": scales.to(torch.uint8),
            "a.weight.nested_absmax": of_blocks,
            "a.weight.nested_quant_map": of_scales,
        }
    tensors["a.weight.quant_state.bitsandbytes__nf4"] = encoded(record)
    found = unpacked(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    expected = table[codes] * largest[torch.arange(len(codes)) // 64]
    assert torch.equal(found, expected.reshape(D_OUT, D_IN))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx_as_the_quantiser_of_transformers_for_its_kernels_packs_it(tmp_path: Path, bits: int) -> None:
    metal = pytest.importorskip("transformers.integrations.metal_quantization")
    whole = torch.randn(D_OUT, D_IN)
    weight, scales, offsets = metal._affine_quantize_tensor(whole, GROUP, bits)
    tensors = {"a.weight": weight, "a.scales": scales, "a.biases": offsets, **beside()}
    found = unpacked(tmp_path, tensors, {"group_size": GROUP, "bits": bits})
    assert torch.equal(found, metal._affine_dequantize_tensor(weight, scales, offsets, GROUP, bits))
    assert float((found - whole).abs().max()) <= float(scales.max()) / 2 + 1e-5


def test_eight_bits_of_quanto(tmp_path: Path) -> None:
    weight, scale = torch.randint(-128, 128, (D_OUT, D_IN), dtype=torch.int8), torch.rand(D_OUT, 1)
    tensors = {"a.weight._data": weight, "a.weight._scale": scale, "a.input_scale": torch.ones(1), **beside()}
    assert torch.equal(unpacked(tmp_path, tensors, {"quant_method": "quanto"}), weight.float() * scale)


# Formulas of the formats, entry by entry, on shapes at their edges.
def as_words(numbers: Tensor, bits: int, *, is_dense: bool = True) -> Tensor:
    """Rows of numbers in words of 32 bits, the lowest bits first; the last word may have room left.

    Older files have room in every word if 32 is no multiple of the bits.
    """
    each = bits if is_dense else 32 / (32 // bits)
    words = []
    for row in numbers.tolist():
        places = [
            int(place * each) if is_dense else 32 * (place // (32 // bits)) + place % (32 // bits) * bits
            for place in range(len(row))
        ]
        whole = sum(number << place for number, place in zip(row, places, strict=True))
        count = -(-(places[-1] + bits) // 32)
        words.append([whole >> 32 * word & 0xFFFFFFFF for word in range(count)])
    found = torch.tensor(words)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def weight_of(shape: tuple[int, int], entry: Any) -> Tensor:
    rows = [[float(entry(row, column)) for column in range(shape[1])] for row in range(shape[0])]
    return torch.tensor(rows)


ODD = [(1, 48), (5, 48), (1, 13), (5, 13)]
IN_WHOLE_GROUPS = [(1, 48), (5, 48)]


def quarters(*shape: int) -> Tensor:
    """Random scales whose products with small integers have no rounding in float32."""
    return torch.randint(1, 64, shape) / 4


DENSE = [(bits, True, shape) for bits in (3, 4, 6, 8) for shape in ODD]


@pytest.mark.parametrize(("bits", "is_dense", "shape"), [*DENSE, (3, False, (1, 64)), (3, False, (64, 64))])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_packed_integers_on_odd_shapes(
    tmp_path: Path, shape: tuple[int, int], has_zeros: bool, bits: int, is_dense: bool
) -> None:
    """A row that fills no whole words, rows whose zeros fill none, a scale for each row or of 16 columns."""
    rows, columns = shape
    size = 16 if columns % 16 == 0 else columns
    half = 1 << (bits - 1)
    numbers = torch.randint(-half, half, shape)
    scale = quarters(rows, columns // size)
    zeros = torch.randint(-half, half, scale.shape) * has_zeros
    tensors = {
        "a.weight_packed": as_words(numbers + half, bits, is_dense=is_dense),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor(shape),
        **beside(),
    }
    if has_zeros:
        words_of_zeros = as_words((zeros + half).mT, bits, is_dense=is_dense)
        tensors["a.weight_zero_point"] = words_of_zeros.mT.contiguous()
    config = of_compressed_tensors(bits)
    config["config_groups"]["group_0"]["weights"]["group_size"] = size

    def entry(row: int, column: int) -> Tensor:
        group = column // size
        return (numbers[row, column] - zeros[row, group]) * scale[row, group]

    assert torch.equal(unpacked(tmp_path, tensors, config, shape), weight_of(shape, entry))


def test_a_zero_of_the_whole_matrix_is_not_packed(tmp_path: Path) -> None:
    numbers = torch.randint(-8, 8, (5, 13))
    tensors = {
        "a.weight_packed": as_words(numbers + 8, 4),
        "a.weight_scale": torch.tensor([0.5]),
        "a.weight_zero_point": torch.tensor([-3], dtype=torch.int8),
        "a.weight_shape": torch.tensor([5, 13]),
        **beside(),
    }
    assert torch.equal(unpacked(tmp_path, tensors, of_compressed_tensors(4), (5, 13)), (numbers + 3) * 0.5)


def test_groups_that_do_not_divide_the_width_are_none_of_compressed_tensors(tmp_path: Path) -> None:
    """The library refuses to write them; 48 columns in 2 groups are not read as groups of 24."""
    tensors = {
        "a.weight_packed": as_words(torch.zeros(4, 48, dtype=torch.long), 4),
        "a.weight_scale": torch.ones(4, 2),
        "a.weight_shape": torch.tensor([4, 48]),
        **beside(),
    }
    with pytest.raises(DataError, match="48 columns have 2 scales a row, and group_size is 32"):
        unpacked(tmp_path, tensors, of_compressed_tensors(4), (4, 48))


@pytest.mark.parametrize("rows", [1, 5])
def test_float8_of_compressed_tensors_in_blocks(tmp_path: Path, rows: int) -> None:
    weight, scale = torch.randn(rows, 40).to(torch.float8_e4m3fn), quarters((rows + 3) // 4, 3)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 16]}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    tensors = {"a.weight": weight, "a.weight_scale": scale, **beside()}

    def entry(row: int, column: int) -> Tensor:
        return weight[row, column].float() * scale[row // 4, column // 16]

    assert torch.equal(unpacked(tmp_path, tensors, config, (rows, 40)), weight_of((rows, 40), entry))


@pytest.mark.parametrize("shape", ODD)
def test_eight_bits_of_several_formats_on_odd_shapes(tmp_path: Path, shape: tuple[int, int]) -> None:
    rows = shape[0]
    weight, scale = torch.randint(-128, 128, shape, dtype=torch.int8), quarters(rows)
    expected = weight_of(shape, lambda row, column: weight[row, column] * scale[row])
    of_quanto = {"a.weight._data": weight, "a.weight._scale": scale[:, None], **beside()}
    assert torch.equal(unpacked(tmp_path, of_quanto, {}, shape), expected)
    of_bitsandbytes = {"a.weight": weight, "a.SCB": scale * 127, **beside()}
    assert torch.allclose(unpacked(tmp_path, of_bitsandbytes, {}, shape), expected, rtol=1e-6)
    for scales in (scale[:, None], scale[:1]):
        each = scales.expand(rows, 1)
        of_fp8 = {"a.weight": weight.to(torch.float8_e4m3fn), "a.weight_scale": scales.clone(), **beside()}
        found = unpacked(tmp_path, of_fp8, {"quant_method": "fp8"}, shape)
        assert torch.equal(found, weight.to(torch.float8_e4m3fn).float() * each)


@pytest.mark.parametrize("shape", ODD)
@pytest.mark.parametrize("block", [16, 64])
def test_four_bits_of_bitsandbytes_on_odd_shapes(tmp_path: Path, shape: tuple[int, int], block: int) -> None:
    """Blocks run over the ends of rows, the last one may be shorter, and an odd count leaves half a byte."""
    count = shape[0] * shape[1]
    table, codes = torch.randn(16), torch.randint(0, 16, (count,))
    largest = torch.rand(-(-count // block))
    even = torch.nn.functional.pad(codes, (0, count % 2))
    record = {"quant_type": "fp4", "blocksize": block, "dtype": "float16", "shape": list(shape)}
    tensors = {
        "a.weight": (even[::2] << 4 | even[1::2]).to(torch.uint8)[:, None],
        "a.weight.absmax": largest,
        "a.weight.quant_map": table,
        "a.weight.quant_state.bitsandbytes__fp4": encoded(record),
        **beside(),
    }

    def entry(row: int, column: int) -> Tensor:
        place = row * shape[1] + column
        return table[codes[place]] * largest[place // block]

    assert torch.equal(unpacked(tmp_path, tensors, {}, shape), weight_of(shape, entry))


@pytest.mark.parametrize(
    ("names", "of_all", "method"),
    [
        (("weight", "weight_scale_2"), torch.tensor([4.0]), {"quant_method": "modelopt"}),
        (("weight", "weight_scale_2"), torch.tensor(0.5), {}),
        (("weight_packed", "weight_global_scale"), torch.tensor([4.0]), {"quant_method": "modelopt"}),
    ],
    ids=["multiplied", "multiplied, no method", "divided"],
)
@pytest.mark.parametrize("shape", [(D_OUT, D_IN), *IN_WHOLE_GROUPS])
def test_nvfp4(
    tmp_path: Path, shape: tuple[int, int], names: tuple[str, str], of_all: Tensor, method: dict[str, str]
) -> None:
    """E2M1: the sign, two bits of exponent with a bias of 1, and a bit of mantissa."""
    codes = torch.randint(0, 16, shape)
    scale = (torch.rand(shape[0], shape[1] // 16) * 3 + 0.5).to(torch.float8_e4m3fn)
    codes_of_two = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors = {f"a.{names[0]}": codes_of_two, "a.weight_scale": scale, f"a.{names[1]}": of_all, **beside()}
    factor = float(of_all) if names[0] == "weight" else 1 / float(of_all)

    def entry(row: int, column: int) -> float:
        code = int(codes[row, column])
        exponent, mantissa = code >> 1 & 3, code & 1
        value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        return (-1) ** (code >> 3) * value * float(scale[row, column // 16]) * factor

    assert torch.equal(unpacked(tmp_path, tensors, method, shape), weight_of(shape, entry))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx_on_odd_shapes(tmp_path: Path, rows: int, bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (rows, 96))
    scales, offsets = quarters(rows, 3), quarters(rows, 3)
    weight = packed(numbers, bits).view(torch.uint32)
    tensors = {"a.weight": weight, "a.scales": scales, "a.biases": offsets, **beside()}

    def entry(row: int, column: int) -> Tensor:
        group = column // GROUP
        return numbers[row, column] * scales[row, group] + offsets[row, group]

    found = unpacked(tmp_path, tensors, {"group_size": GROUP, "bits": bits}, (rows, 96))
    assert torch.equal(found, weight_of((rows, 96), entry))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("group", [GROUP, 64, -1])
def test_a_last_group_may_be_smaller(tmp_path: Path, method: str, group: int) -> None:
    """80 inputs in groups of 32 or 64; −1 is one group of all."""
    d_in, d_out = 80, 8
    size = d_in if group < 0 else group
    count = -(-d_in // size)
    numbers, zeros = torch.randint(0, 16, (d_in, d_out)), torch.randint(1, 16, (count, d_out))
    scales = quarters(count, d_out).half()
    if method == "gptq":
        parts = packed(numbers.T.contiguous(), 4).T.contiguous(), packed(zeros - 1, 4)
    else:
        parts = packed(numbers, 4, OF_AWQ), packed(zeros, 4, OF_AWQ)
    tensors = {"a.qweight": parts[0], "a.qzeros": parts[1], "a.scales": scales, **beside()}

    def entry(row: int, column: int) -> Tensor:
        return (numbers[column, row] - zeros[column // size, row]) * scales[column // size, row].float()

    config = {"quant_method": method, "bits": 4, "group_size": group}
    found = unpacked(tmp_path, tensors, config, (d_out, d_in))
    assert torch.equal(found, weight_of((d_out, d_in), entry))


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
    state = {"a.weight.quant_state.other": torch.zeros(3, dtype=torch.uint8)}
    four_bits = {"a.weight": torch.zeros(512, 1, dtype=torch.uint8), **state}
    assert "a.weight is quantised by bitsandbytes in 4 bits" in refused(tmp_path, four_bits, {})
    state = {"a.weight.quant_state.bitsandbytes__nf4": encoded({"shape": [16, 64]})}
    assert "no shape of a matrix and blocksize" in refused(tmp_path, {**four_bits, **state}, {})
    state = {"a.weight.quant_state.bitsandbytes__nf4": encoded({"shape": [16, 64], "blocksize": 64})}
    assert "there is no tensor a.weight.absmax" in refused(tmp_path, {**four_bits, **state}, {})
    three = {"a.weight": torch.zeros(16, 6, dtype=torch.uint32), "a.scales": torch.ones(16, 1)}
    three["a.biases"] = torch.ones(16, 1)
    assert "MLX in 3 bits" in refused(tmp_path, three, {})
    words_of = {"a.weight_packed": words(16, 7), "a.weight_scale": torch.ones(16, 1)}
    words_of["a.weight_shape"] = torch.tensor([16, 64])
    config = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    assert "7 words a row hold no 64 numbers" in refused(tmp_path, words_of, config)
    narrow = torch.zeros(16, 64).to(torch.float8_e4m3fn)
    scales = {"a.weight": narrow, "a.weight_scale_inv": torch.ones(3, 5)}
    assert "no scales of [16, 64]" in refused(tmp_path, scales, {"weight_block_size": [8, 16]})


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("a.W_q", "by HQQ, which is not read: use the checkpoint before quantisation$"),
        ("a.codebooks", "by AQLM, which is not read: use the checkpoint before quantisation$"),
        ("a.weight_packed", r"CompressedTensorsConfig\(dequantize=True\)\)\.save_pretrained\(NEW\)$"),
        ("a.weight.quant_state.x", r"\.dequantize\(\)\.save_pretrained\(NEW, save_original_format=False\)$"),
    ],
)
def test_a_refusal_names_a_way_only_where_the_library_has_one(tmp_path: Path, part: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        unpacked(tmp_path, {part: torch.zeros(4, 4), **beside()}, {})


def test_without_anything_quantised_the_tensors_are_what_they_were(tmp_path: Path) -> None:
    save_file({"a.weight": torch.randn(3, 4)}, tmp_path / "model.safetensors")
    tensors = open_tensors(tmp_path)
    assert dequantised(tensors, Settings({}, "config.json")) is tensors
