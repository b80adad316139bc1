"""Reading GGUF files: hostile headers, quantised tensors, pieces of tensors."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.core.storage.gguf import Gguf
from triptych.errors import DataError
from triptych.untrusted import LocalBytes

gguf = pytest.importorskip("gguf")

# Types that the package quantises and unpacks; further types are only unpacked, from random bytes.
_WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32")
_UNPACKED = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"),
    *("IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"),
)
_STRING = 8


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _file(*, tensors: int = 0, entries: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def _tensor(name: str = "a", sides: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<{len(sides)}Q", *sides)
    return _text(name) + struct.pack("<I", len(sides)) + numbers + struct.pack("<IQ", kind, offset)


def _padded(header: bytes, data: int = 16) -> bytes:
    return header + b"\0" * (-len(header) % 32 + data)


def _opened(path: Path, content: bytes) -> Gguf:
    path.write_bytes(content)
    return Gguf(LocalBytes(path))


def _entry(value: bytes, key: str = "k") -> bytes:
    """A file with one entry of metadata."""
    return _file(entries=1, rest=_text(key) + value)


def _one(data: int = 16, **of_tensor: Any) -> bytes:
    """A file with one tensor."""
    return _padded(_file(tensors=1, rest=_tensor(**of_tensor)), data)


_HUGE = "1,152,921,504,606,846,976"
_NO_UTF8 = struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IQ", 4, 0)
_TWO_KEYS = 2 * (_text("k") + struct.pack("<II", 4, 1)) + b"\0" * 16
_SHARED_BYTES = _tensor("a", (16,)) + _tensor("b", (4,), offset=32)
_HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no GGUF file"),
    "other magic": (b"GGML" + b"\0" * 40, "no GGUF file"),
    "too new": (_file(version=9), "of version 9: versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "written for big-endian machines"),
    "many tensors": (_file(tensors=1 << 60), f"claims {_HUGE} tensors, and 8 bytes are left"),
    "many entries": (_file(entries=1 << 63), "entries of metadata, and"),
    "a long key": (_file(entries=1, rest=struct.pack("<Q", 1 << 60) + b"x" * 64), "characters for a key"),
    "a long text": (
        _entry(struct.pack("<IQ", _STRING, 1 << 60) + b"x" * 64),
        f"claims {_HUGE} characters for k",
    ),
    "a long list of texts": (_entry(struct.pack("<IIQ", 9, _STRING, 1 << 60) + b"x" * 64), "texts of k"),
    "a long list of numbers": (_entry(struct.pack("<IIQ", 9, 4, 1 << 61) + b"x" * 64), "numbers of k"),
    "lists within lists": (_entry(struct.pack("<IIQ", 9, 9, 1) + b"x" * 64), "k is an array of arrays"),
    "a type that is none": (_entry(struct.pack("<IQ", 77, 0)), "k is of type 77"),
    "no UTF-8": (_file(entries=1, rest=_NO_UTF8), "no UTF-8"),
    "a key twice": (_file(entries=2, rest=_TWO_KEYS), "k is in its metadata twice"),
    "many dimensions": (_one(sides=(1,) * 9), "it has 9 dimensions"),
    "a huge side": (_one(sides=(1 << 60,)), "not a valid shape"),
    "a huge tensor": (_one(sides=(1 << 40, 1 << 40)), "the file is truncated"),
    "an offset past the end": (
        _one(offset=1 << 40),
        "tensor a: it ends at byte .* the file is truncated",
    ),
    "an odd offset": (_one(64, offset=7), "7 is no multiple of 32"),
    "shared bytes": (_padded(_file(tensors=2, rest=_SHARED_BYTES), 96), "tensors a and b share bytes"),
    "a tensor twice": (
        _padded(_file(tensors=2, rest=_tensor() + _tensor(offset=32)), 96),
        "tensor a is there twice",
    ),
    "an unknown type": (_one(kind=4000), "its type 4,000 is none"),
    "no whole blocks": (_one(sides=(33,), kind=2), "rows of 33 numbers are no blocks of 32"),
    "an odd alignment": (
        _padded(_entry(struct.pack("<II", 4, 48), "general.alignment")),
        "general.alignment is 48",
    ),
    "a name that is not printed": (_one(name="a\x1b[31m"), "unprintable"),
}


@pytest.mark.parametrize("case", _HOSTILE)
def test_a_hostile_header_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    content, said = _HOSTILE[case]
    with pytest.raises(DataError, match=said) as error:
        _opened(tmp_path / "x.gguf", content)
    assert "\n" not in str(error.value)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    rest = _text("a.b") + struct.pack("<IQ", _STRING, 3) + b"xyz" + _tensor(sides=(4, 2))
    whole = _padded(_file(tensors=1, entries=1, rest=rest), 32)
    assert _opened(tmp_path / "whole.gguf", whole).read("a").shape == (2, 4)
    for length in range(len(whole)):
        with pytest.raises(DataError):
            _opened(tmp_path / "x.gguf", whole[:length])


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(**tensors: tuple[np.ndarray, str]) -> Path:
        path = tmp_path / "some.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        for name, (data, kind) in tensors.items():
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.mark.parametrize("kind", _WRITTEN)
def test_a_quantised_tensor_is_read_as_the_package_unpacks_it(
    kind: str, written: Callable[..., Path]
) -> None:
    numbers = np.random.default_rng(0).standard_normal((3, 5, 256), dtype=np.float32)
    as_kind = gguf.GGMLQuantizationType[kind]
    packed = gguf.quantize(numbers, as_kind)
    file = Gguf(LocalBytes(written(a=(packed, kind))))
    expected = torch.from_numpy(np.array(gguf.dequantize(packed, as_kind)))
    assert file.infos["a"].shape == (3, 5, 256)
    assert torch.equal(file.read("a").float(), expected)
    assert torch.equal(file.read_rows("a", 1, 3).float(), expected[1:3])
    # The stored float32 is shown as the shortest number that it is.
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5


@pytest.mark.parametrize("kind", _UNPACKED)
def test_blocks_of_further_types_are_unpacked(kind: str, written: Callable[..., Path]) -> None:
    as_kind = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[as_kind]
    blocks = np.random.default_rng(0).integers(0, 256, (6, 512 // block * size), dtype=np.uint8)
    file = Gguf(LocalBytes(written(a=(blocks, kind))))
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(np.array(gguf.dequantize(blocks, as_kind)))
    assert torch.equal(file.read("a").nan_to_num(), expected.nan_to_num())


def test_a_large_tensor_is_unpacked_in_pieces(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    packed = gguf.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
    path = written(a=(packed, "Q8_0"))
    whole = Gguf(LocalBytes(path)).read("a")
    seen: list[int] = []
    unpack = gguf.dequantize

    def counted(data: np.ndarray, kind: object) -> np.ndarray:
        seen.append(len(data))
        return np.array(unpack(data, kind))

    monkeypatch.setattr("triptych.core.storage.gguf._NUMBERS_AT_A_TIME", 256 * 10)
    monkeypatch.setattr(gguf, "dequantize", counted)
    assert torch.equal(Gguf(LocalBytes(path)).read("a"), whole)
    assert seen == [10] * 6 + [4]


def _half(block: bytes, at: int) -> np.float32:
    return np.float32(np.frombuffer(block, "<f2", 1, at)[0])


def _nibbles(block: bytes, at: int, count: int) -> list[int]:
    """Four bits each: the lower halves of all bytes, then the upper ones."""
    found = block[at : at + count]
    return [byte & 15 for byte in found] + [byte >> 4 for byte in found]


def _q4_0(block: bytes) -> list[np.float32]:
    return [(code - 8) * _half(block, 0) for code in _nibbles(block, 2, 16)]


def _q4_1(block: bytes) -> list[np.float32]:
    return [code * _half(block, 0) + _half(block, 2) for code in _nibbles(block, 4, 16)]


def _fifth_bits(block: bytes, at: int) -> list[int]:
    return [int.from_bytes(block[at : at + 4], "little") >> place & 1 for place in range(32)]


def _q5_0(block: bytes) -> list[np.float32]:
    codes = zip(_nibbles(block, 6, 16), _fifth_bits(block, 2), strict=True)
    return [((code | high << 4) - 16) * _half(block, 0) for code, high in codes]


def _q5_1(block: bytes) -> list[np.float32]:
    codes = zip(_nibbles(block, 8, 16), _fifth_bits(block, 4), strict=True)
    return [(code | high << 4) * _half(block, 0) + _half(block, 2) for code, high in codes]


def _q8_0(block: bytes) -> list[np.float32]:
    return [np.float32(code) * _half(block, 0) for code in np.frombuffer(block, "i1", 32, 2)]


def _q2_k(block: bytes) -> list[np.float32]:
    """256 numbers in 16 groups: 4 bits of scale and of minimum each, 2 bits of each number."""
    scale, least = _half(block, 80), _half(block, 82)
    found = []
    for place in range(256):
        half, shift, byte = place // 128, place % 128 // 32, place % 32
        code = block[16 + 32 * half + byte] >> 2 * shift & 3
        of_group = block[place // 16]
        found.append(scale * np.float32(of_group & 15) * code - least * np.float32(of_group >> 4))
    return found


def _six_bits(block: bytes, at: int, group: int) -> tuple[int, int]:
    """The scale and the minimum of one of eight groups, in 12 bytes."""
    packed = block[at : at + 12]
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low, high = packed[group + 4], (packed[group - 4] >> 6, packed[group] >> 6)
    return low & 15 | high[0] << 4, low >> 4 | high[1] << 4


def _q4_k(block: bytes, codes: int = 16, more: int | None = None) -> list[np.float32]:
    """256 numbers in 8 groups of 32; two groups share 32 bytes."""
    found = []
    for place in range(256):
        group, byte = place // 32, place % 32
        scale, least = _six_bits(block, 4, group)
        code = block[codes + 32 * (group // 2) + byte] >> 4 * (group % 2) & 15
        if more is not None:
            code |= (block[more + byte] >> group & 1) << 4
        found.append(_half(block, 0) * np.float32(scale) * code - _half(block, 2) * np.float32(least))
    return found


def _q5_k(block: bytes) -> list[np.float32]:
    return _q4_k(block, codes=48, more=16)


def _q6_k(block: bytes) -> list[np.float32]:
    """256 numbers in 16 groups with a scale of 8 bits; 4 lower and 2 upper bits of each number."""
    found = []
    for place in range(256):
        half, quarter, byte = place // 128, place % 128 // 32, place % 32
        low = block[64 * half + 32 * (quarter % 2) + byte] >> 4 * (quarter // 2) & 15
        high = block[128 + 32 * half + byte] >> 2 * quarter & 3
        scale = np.float32(np.frombuffer(block, "i1", 16, 192)[place // 16])
        found.append(_half(block, 208) * scale * ((low | high << 4) - 32))
    return found


# The blocks of ggml-common.h and the formulas of ggml-quants.c in github.com/ggml-org/ggml.
_FORMULAS = {
    **{"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0},
    **{"Q2_K": _q2_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
}
# Places of the two-byte floats of a block: random bytes there would be infinite or no numbers.
_HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q2_K": (80, 82), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", _FORMULAS)
def test_blocks_are_unpacked_by_the_formulas_of_ggml(
    kind: str, rows: int, written: Callable[..., Path]
) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, 3, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        halves = random.standard_normal((rows, 3, 1)).astype("<f2")
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    file = Gguf(LocalBytes(written(a=(blocks.reshape(rows, -1), kind))))
    numbers = [[_FORMULAS[kind](one.tobytes()) for one in row] for row in blocks]
    expected = torch.from_numpy(np.array(numbers, dtype=np.float32).reshape(rows, -1))
    found = file.read("a")
    assert found.shape == (rows, 3 * block)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
