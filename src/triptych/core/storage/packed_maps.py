"""Maps quantised by a table or a scale: compressed-tensors, NVFP4, bitsandbytes, MLX, quanto.

Sources of the formats: github.com/vllm-project/compressed-tensors, github.com/NVIDIA/Model-Optimizer,
github.com/bitsandbytes-foundation/bitsandbytes, github.com/ml-explore/mlx,
github.com/huggingface/optimum-quanto.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError
from triptych.untrusted import parsed_json, shown

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Values of 4-bit floats with 2 bits of exponent and 1 of mantissa (E2M1); the highest bit is the sign.
_FP4 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
_STATE = ".quant_state.bitsandbytes__"
# Tensors of inputs and outputs next to a map: they do not change it.
_OF_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
)


class Packed(ABC):
    """A quantised map, stored in several tensors."""

    module: str  # the module of the weight
    parts: tuple[str, ...]  # names of its tensors
    shape: tuple[int, int]  # shape of the weight
    method: ClassVar[str]  # name of the format, for messages

    @abstractmethod
    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Return the weight in float32, from the tensors of `parts`."""


@final
@dataclass(frozen=True)
class Integers(Packed):
    """compressed-tensors: (q − z) · s, with a scale for each row, or each group of a row; perhaps packed."""

    module: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    bits: int | None  # bits of a packed integer; None for int8
    has_zeros: bool
    has_order: bool
    groups: tuple[int, ...]  # sizes of groups in the configuration
    method = "compressed-tensors"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        numbers, scale, *more = parts
        rows, columns = self.shape
        zeros = more.pop(0) if self.has_zeros else None
        order = more.pop(0) if self.has_order else None
        if self.bits is not None:
            numbers = _signed(numbers, self.bits, columns)
            # Zero points are packed along the rows, unless a single zero point serves the whole matrix.
            if zeros is not None and zeros.dtype == torch.int32:
                zeros = _signed(zeros.mT, self.bits, rows).mT
        count = scale.reshape(-1, scale.shape[-1]).shape[1]
        # The library divides a row by the count of its scales; the configuration has to agree.
        if count > 1 and self.groups and columns / count not in self.groups:
            raise ValueError(
                f"{columns} columns have {count} scales a row, and group_size is {self.groups[0]}"
            )
        groups = _groups(columns, count)
        if order is not None and bool((order >= 0).all()):
            groups = order.long()
        scales = scale.float().reshape(-1, scale.shape[-1])[:, groups]
        if zeros is None:
            return numbers.float() * scales
        # In floats, since the difference of two 8-bit integers may not fit 8 bits.
        return (
            numbers.float() - zeros.float().reshape(-1, zeros.shape[-1])[:, groups]
        ) * scales


@final
@dataclass(frozen=True)
class Nvfp4(Packed):
    """NVFP4: two 4-bit floats a byte, an 8-bit scale for 16 of them, and a scale of all."""

    module: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    is_divided: bool  # True if values are divided by the tensor's scale
    method = "NVFP4"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        packed, scale, whole = parts[:3]
        pairs = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        values = torch.tensor(_FP4)[pairs.long()]
        factor = 1 / whole.float() if self.is_divided else whole.float()
        return (
            values * (scale.float() * factor)[:, _groups(self.shape[1], scale.shape[1])]
        )


@final
@dataclass(frozen=True)
class Tabled(Packed):
    """bitsandbytes in 4 bits: values of a table, times the largest value of each block of the matrix."""

    module: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    block: int
    nested_block: int | None  # block size of quantised scales; None for plain scales
    nested_offset: float
    method = "bitsandbytes in 4 bits"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        packed, scales, table = parts[:3]
        # Scales may be quantised themselves, less their mean.
        if self.nested_block is not None:
            nested, nested_table = parts[3:5]
            values = nested_table.float()[scales.long()]
            scales = (
                values * _spread(nested.float(), self.nested_block, len(values))
                + self.nested_offset
            )
        flat = packed.flatten()
        numbers = torch.stack((flat >> 4, flat & 15), -1).flatten()[: prod(self.shape)]
        weight = table.float()[numbers.long()] * _spread(
            scales.float(), self.block, len(numbers)
        )
        return weight.reshape(self.shape)


@final
@dataclass(frozen=True)
class Affine(Packed):
    """MLX: q · s + b, with a scale and an offset for each group of a row."""

    module: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    bits: int
    method = "MLX"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        packed, scales, offsets = parts
        numbers = unpacked(packed.view(torch.int32), self.bits).float()
        groups = _groups(self.shape[1], scales.shape[1])
        return numbers * scales.float()[:, groups] + offsets.float()[:, groups]


@final
@dataclass(frozen=True)
class OfRows(Packed):
    """quanto in 8 bits: values times a scale for each row."""

    module: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    method = "quanto"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0].float() * parts[1].float().reshape(-1, 1)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 `[n, m]` to integers `[n, m · (32 // bits)]`, from the lowest bits to the highest."""
    per_word = 32 // bits
    shifts = torch.arange(per_word) * bits
    numbers = (packed[..., None].long() >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2)


def _dense(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 `[n, m]` to integers `[n, count]` without unused bits: some lie in two words."""
    first = torch.arange(count) * bits
    word = first // 32
    words = torch.nn.functional.pad(packed.long() & 0xFFFFFFFF, (0, 1))
    both = words[..., word] | words[..., word + 1] << 32
    return (both >> first % 32) & ((1 << bits) - 1)


def _words(bits: int, count: int) -> tuple[int, int]:
    """Return the words of a packed row, without unused bits, and with whole integers in every word."""
    return ceil(count * bits / 32), ceil(count / (32 // bits))


def _signed(packed: Tensor, bits: int, count: int) -> Tensor:
    # Versions of the library differ in 3, 5, 6 and 7 bits: the number of words identifies the version.
    is_dense = packed.shape[-1] == _words(bits, count)[0]
    numbers = _dense(packed, bits, count) if is_dense else unpacked(packed, bits)
    return numbers[..., :count] - (1 << (bits - 1))


def _groups(columns: int, count: int) -> Tensor:
    """Return the group of each column."""
    if columns % count:
        raise ValueError(f"{columns} columns are no whole groups of {count}")
    return torch.arange(columns) // (columns // count)


def _spread(scales: Tensor, block: int, count: int) -> Tensor:
    """Repeat the scale of each block for its entries."""
    if len(scales) != ceil(count / block):
        raise ValueError(
            f"there are {len(scales)} scales, and {count} numbers in blocks of {block}"
        )
    return scales.repeat_interleave(block)[:count]


def find_packed(name: str, tensors: Tensors, settings: Settings) -> Packed | None:
    """Return the quantised map with a tensor as its main part; None for tensors of other kinds."""
    info = tensors.infos[name]
    infos = tensors.infos
    if len(info.shape) != 2:
        return None
    if (
        name.endswith(".weight._data")
        and f"{name.removesuffix('_data')}_scale" in infos
    ):
        if info.dtype != torch.int8 and info.dtype not in _FLOAT8:
            return None
        module = name.removesuffix(".weight._data")
        parts = (name, f"{module}.weight._scale")
        return OfRows(
            module,
            (*parts, *_of_activations(module, tensors)),
            (info.shape[0], info.shape[1]),
        )
    # The dtype distinguishes formats with the same names.
    module, _, last = name.rpartition(".")
    match last:
        case "weight_packed" if info.dtype == torch.uint8:
            return _nvfp4(module, name, "weight_global_scale", tensors)
        case "weight_packed" if f"{module}.weight_shape" in infos:
            return _packed_integers(module, tensors, settings)
        case "weight" if (
            info.dtype == torch.uint8 and f"{module}.weight_scale_2" in infos
        ):
            return _nvfp4(module, name, "weight_scale_2", tensors)
        case "weight" if info.dtype == torch.uint8:
            return _tabled(module, name, tensors)
        case "weight" if info.dtype == torch.uint32 and f"{module}.scales" in infos:
            return _affine(module, name, tensors, settings)
        case "weight" if info.dtype == torch.int8 and _has_groups(module, tensors):
            shape = info.shape[0], info.shape[1]
            return _integers(module, name, shape, None, tensors, settings)
    return None


def _has_groups(module: str, tensors: Tensors) -> bool:
    """Return True for int8 with zero points, or with scales of groups of a row."""
    scale = tensors.infos.get(f"{module}.weight_scale")
    rows = tensors.infos[f"{module}.weight"].shape[0]
    has_zeros = f"{module}.weight_zero_point" in tensors.infos
    is_grouped = (
        scale is not None
        and len(scale.shape) == 2
        and scale.shape[0] == rows
        and scale.shape[1] > 1
    )
    return scale is not None and (has_zeros or is_grouped)


def _packed_integers(
    module: str, tensors: Tensors, settings: Settings
) -> Packed | None:
    name = f"{module}.weight_packed"
    sizes = tensors.read(f"{module}.weight_shape").tolist()
    rows, words = tensors.infos[name].shape
    if len(sizes) != 2 or sizes[0] != rows or sizes[1] < 1:
        raise DataError(
            f"{tensors.name}, tensor {name}: weight_shape is {shown(sizes)}, and it has {rows} rows"
        )
    # The number of bits is that of the configuration with which the packed columns are as many as stored.
    said = [
        bits
        for bits in of_weights("num_bits", settings)
        if isinstance(bits, int) and 1 < bits <= 8 and words in _words(bits, sizes[1])
    ]
    if not said:
        raise DataError(
            f"{tensors.name}, tensor {name}: {words} words a row hold no {sizes[1]} numbers of num_bits in "
            "quantization_config"
        )
    return _integers(module, name, (rows, int(sizes[1])), said[0], tensors, settings)


def of_weights(key: str, settings: Settings) -> Iterator[Any]:
    """Yield the values of a key of compressed-tensors' schemes for weights."""
    groups = settings.value("quantization_config.config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get(key) is not None:
            yield weights[key]


def _integers(
    module: str,
    name: str,
    shape: tuple[int, int],
    bits: int | None,
    tensors: Tensors,
    settings: Settings,
) -> Packed | None:
    scale, zeros, order = (
        f"{module}.{part}"
        for part in ("weight_scale", "weight_zero_point", "weight_g_idx")
    )
    if scale not in tensors.infos:
        return None
    named = [one for one in (zeros, order) if one in tensors.infos]
    beside = [f"{module}.weight_shape"] if bits is not None else []
    parts = (name, scale, *named, *beside, *_of_activations(module, tensors))
    groups = tuple(
        size for size in of_weights("group_size", settings) if _is_size(size)
    )
    return Integers(module, parts, shape, bits, zeros in named, order in named, groups)


def _nvfp4(module: str, name: str, whole: str, tensors: Tensors) -> Packed | None:
    scales = (f"{module}.weight_scale", f"{module}.{whole}")
    if any(part not in tensors.infos for part in scales):
        return None
    rows, pairs = tensors.infos[name].shape
    parts = (name, *scales, *_of_activations(module, tensors))
    return Nvfp4(
        module, parts, (rows, 2 * pairs), is_divided=whole == "weight_global_scale"
    )


def _tabled(module: str, name: str, tensors: Tensors) -> Packed | None:
    beside = tensors.below(name)
    state = next((one for one in beside if one.startswith(f"{name}{_STATE}")), None)
    if state is None:
        return None
    # A JSON record, stored as bytes in a tensor.
    record = parsed_json(
        bytes(tensors.read(state).to(torch.uint8).tolist()), f"{tensors.name}, {state}"
    )
    shape = record.get("shape")
    block = record.get("blocksize")
    nested = record.get("nested_blocksize")
    are_sizes = (
        isinstance(shape, list)
        and len(shape) == 2
        and all(_is_size(size) for size in shape)
    )
    is_known = _is_size(block) and (nested is None or _is_size(nested))
    if (
        not isinstance(shape, list)
        or not isinstance(block, int)
        or not are_sizes
        or not is_known
    ):
        raise DataError(
            f"{tensors.name}, tensor {state}: it has no shape of a matrix and blocksize"
        )
    read = ["absmax", "quant_map"] + (
        [] if nested is None else ["nested_absmax", "nested_quant_map"]
    )
    parts = (name, *(f"{name}.{part}" for part in read))
    if missing := [part for part in parts if part not in tensors.infos]:
        raise DataError(
            f"{tensors.name}: there is no tensor {missing[0]}, and {name} needs it"
        )
    others = tuple(one for one in beside if one not in parts)
    offset = float(record.get("nested_offset") or 0.0)
    return Tabled(
        module, (*parts, *others), (shape[0], shape[1]), block, nested, offset
    )


def _is_size(value: Any) -> bool:
    return (
        isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40
    )


def _affine(
    module: str, name: str, tensors: Tensors, settings: Settings
) -> Packed | None:
    scales = f"{module}.scales"
    offsets = next(
        (
            f"{module}.{one}"
            for one in ("biases", "qbiases")
            if f"{module}.{one}" in tensors.infos
        ),
        None,
    )
    group = settings.value(
        "quantization.group_size | quantization_config.group_size | 64"
    )
    rows, words = tensors.infos[name].shape
    shape = tensors.infos[scales].shape
    if offsets is None or len(shape) != 2 or not _is_size(group) or not shape[1]:
        return None
    # The number of bits follows from the words of a row; it may differ between layers.
    columns = shape[1] * group
    bits = 32 * words // columns
    if bits not in (2, 4, 8) or bits * columns != 32 * words:
        raise DataError(
            f"{tensors.name}, tensor {name}: MLX in {shown(bits)} bits and groups of {shown(group)} is not "
            "read: 2, 4 and 8 bits are; mlx_lm.convert --hf-path FOLDER --mlx-path NEW -d unpacks it"
        )
    return Affine(module, (name, scales, offsets), (rows, columns), bits)


def _of_activations(module: str, tensors: Tensors) -> tuple[str, ...]:
    return tuple(
        one for part in _OF_ACTIVATIONS if (one := f"{module}.{part}") in tensors.infos
    )
