"""Dequantisation of maps in known formats; maps in further formats are refused.

Sources of the formats: github.com/huggingface/transformers (integrations of fp8 and bitsandbytes),
github.com/neuralmagic/compressed-tensors, github.com/AutoGPTQ/AutoGPTQ, github.com/casper-hansen/AutoAWQ.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain
from math import ceil, prod
from typing import final

import torch
from torch import Tensor

from triptych.core.storage.packed_maps import (
    Packed,
    find_packed,
    of_weights,
    unpacked,
)
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import TensorFile, TensorInfo, Tensors
from triptych.core.storage.unreadable import quantisation_of
from triptych.errors import DataError
from triptych.untrusted import shown

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Nibbles of AWQ's eight columns within 32 bits.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_LARGEST_GROUP = 1 << 30
# Ways to unpack with `transformers` and the library of a method, by words in the method's name.
_UNPACKED_BY = {
    # transformers 5.23 tries to quantise again without the last argument, and fails.
    "bitsandbytes": "AutoModelForCausalLM.from_pretrained(FOLDER).dequantize().save_pretrained(NEW, "
    "save_original_format=False)",
    "compressed-tensors": "AutoModelForCausalLM.from_pretrained(FOLDER, "
    "quantization_config=CompressedTensorsConfig(dequantize=True)).save_pretrained(NEW)",
}
_NUMBERS_AT_A_TIME = 1 << 20


@final
@dataclass(frozen=True)
class Scaled(Packed):
    """Entries times scales: a scale for the matrix, for each row, or for each block of rows and columns."""

    module: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    times: float
    block: tuple[int, int] | None
    method = "8-bit numbers with scales"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        weight = parts[0].float()
        scale = parts[1].float() * self.times
        if self.block is None:
            return weight * scale.reshape(-1, 1)
        rows, columns = self.block
        wide = scale.repeat_interleave(rows, dim=0).repeat_interleave(columns, dim=1)
        return weight * wide[: self.shape[0], : self.shape[1]]


@final
@dataclass(frozen=True)
class Gptq(Packed):
    """GPTQ: `[in, out]` packed along `in`; zeros packed along `out`, and stored less 1 in version 1."""

    module: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    bits: int
    group: int
    zero_offset: int
    symmetric: bool  # True if the configuration declares symmetric quantisation
    method = "GPTQ"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        packed, zeros, scales = parts[:3]
        # A symmetric map has all zeros in the middle: a wrong version of the format would shift them by 1.
        offsets = unpacked(zeros, self.bits) + self.zero_offset
        middle = 1 << (self.bits - 1)
        if self.symmetric and bool((offsets != middle).any()):
            other = int(offsets[offsets != middle][0])
            version = "gptq" if self.zero_offset else "gptq_v2"
            raise ValueError(
                f"quantization_config says sym: true, which puts every zero at {middle}, and as "
                f"checkpoint_format {version} stores them some are {other}: one of the two is wrong"
            )
        _require_groups(scales, self.shape[1], self.group)
        groups = (
            parts[3].long()
            if len(parts) > 3
            else torch.arange(self.shape[1]) // self.group
        )
        return _block_by_block(
            packed,
            self.shape,
            offsets,
            scales,
            groups,
            lambda words: unpacked(words.mT, self.bits).mT,
        )


@final
@dataclass(frozen=True)
class Awq(Packed):
    """AWQ: `[in, out]` packed along `out`, with columns in the order of `_AWQ_ORDER`."""

    module: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    group: int
    method = "AWQ"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        packed, zeros, scales = parts
        _require_groups(scales, self.shape[1], self.group)
        groups = torch.arange(self.shape[1]) // self.group

        def numbers(words: Tensor) -> Tensor:
            return (
                unpacked(words, 4).view(len(words), -1, 8)[..., _AWQ_ORDER].flatten(1)
            )

        return _block_by_block(
            packed, self.shape, numbers(zeros), scales, groups, numbers
        )


def _require_groups(scales: Tensor, d_in: int, group: int) -> None:
    wanted = ceil(d_in / group)
    if len(scales) != wanted:
        raise ValueError(
            f"there are scales for {len(scales)} groups, and {d_in} inputs in groups of {group} are {wanted}"
        )


def _block_by_block(
    packed: Tensor,
    shape: tuple[int, int],
    offsets: Tensor,
    scales: Tensor,
    groups: Tensor,
    numbers_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute (q − z) · s as `[out, in]`, from a few packed rows at a time to save memory."""
    # A packed row has values of `per_row` inputs (GPTQ), or of a single input (AWQ).
    d_out, d_in = shape
    if len(groups) != d_in:
        raise ValueError(f"{len(groups)} inputs have a group, and there are {d_in}")
    weight = torch.empty(shape)
    per_row = d_in // max(1, len(packed))
    rows = max(1, _NUMBERS_AT_A_TIME // max(1, d_out * per_row))
    for start in range(0, len(packed), rows):
        inputs = slice(start * per_row, (start + rows) * per_row)
        block = numbers_of(packed[start : start + rows]) - offsets[groups[inputs]]
        weight[:, inputs] = (block.float() * scales.float()[groups[inputs]]).mT
    return weight


def dequantised(tensors: Tensors, settings: Settings) -> Tensors:
    """Replace quantised maps by plain weights; their parts are no longer listed."""
    found = [
        packed
        for name in tensors.infos
        if (packed := _packed(name, tensors, settings)) is not None
    ]
    hidden = {*chain.from_iterable(packed.parts for packed in found)}
    _refuse_by_name(tensors, settings, hidden)
    if not found:
        return tensors
    return tensors.replacing(hidden, _Unpacking(tensors, found))


@final
class _Unpacking(TensorFile):
    """Quantised maps, read as plain weights."""

    def __init__(self, tensors: Tensors, maps: list[Packed]) -> None:
        self.name = tensors.name
        self._tensors = tensors
        self._maps = {f"{packed.module}.weight": packed for packed in maps}
        self.infos = {
            name: TensorInfo(
                torch.float32,
                packed.shape,
                sum(tensors.infos[part].num_bytes for part in packed.parts),
            )
            for name, packed in self._maps.items()
        }

    def packed_as(self, name: str) -> str:
        return self._maps[name].method

    def read(self, name: str) -> Tensor:
        packed = self._maps[name]
        # Shapes of parts are not trusted: unpacking fails for incompatible parts.
        try:
            found = packed.unpack(
                tuple(self._tensors.read(part) for part in packed.parts)
            )
        except (IndexError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]
            raise DataError(
                f"{self.name}, tensor {name}: its parts ({', '.join(packed.parts)}) do not fit together: "
                f"{reason}"
            ) from None
        if tuple(found.shape) != packed.shape:
            raise DataError(
                f"{self.name}, tensor {name}: its parts unpack to {list(found.shape)} instead of "
                f"{list(packed.shape)}"
            )
        return found


def _packed(name: str, tensors: Tensors, settings: Settings) -> Packed | None:
    """Return the quantised map with a tensor as its main part, or None for tensors of other kinds."""
    if (found := find_packed(name, tensors, settings)) is not None:
        return found
    module, _, last = name.rpartition(".")
    info = tensors.infos[name]
    if (
        last == "weight"
        and (info.dtype in _FLOAT8 or info.dtype == torch.int8)
        and len(info.shape) == 2
    ):
        shape = info.shape[0], info.shape[1]
        for scale, times in (
            ("weight_scale_inv", 1.0),
            ("weight_scale", 1.0),
            ("SCB", 1 / 127),
        ):
            part = f"{module}.{scale}"
            if part in tensors.infos:
                # Scales of inputs do not change the map: list them as parts without using them.
                more = tuple(
                    m
                    for m in (f"{module}.input_scale", f"{module}.weight_format")
                    if m in tensors.infos
                )
                block = _block(tensors, part, shape, settings)
                return Scaled(module, (name, part, *more), shape, times, block)
        return None
    if last != "qweight":
        return None
    method, bits, group = (
        settings.value(f"quantization_config.{key}")
        for key in ("quant_method", "bits", "group_size")
    )
    return _packed_in_groups(module, str(method), bits, group, tensors, settings)


def _refuse_by_name(
    tensors: Tensors, settings: Settings, read: Collection[str]
) -> None:
    """Raise DataError for known, unsupported quantisation formats of tensors not in `read`."""
    # AWQ's layouts differ only by the configuration; further formats are recognised by their tensors.
    method = settings.value("quantization_config.quant_method")
    version = settings.value("quantization_config.version")
    if method == "awq" and version not in (None, "gemm", "GEMM"):
        raise DataError(
            _unread(tensors, "its maps", f"AWQ in the layout {str(version)[:40]!r}")
        )
    if found := quantisation_of([name for name in tensors.infos if name not in read]):
        raise DataError(_unread(tensors, f"tensor {found[0]}", _said(found[1], method)))
    for name in tensors.infos:
        if ".quant_state." in name and name not in read:
            raise DataError(
                _unread(
                    tensors,
                    f"tensor {name.partition('.quant_state.')[0]}",
                    "bitsandbytes in 4 bits",
                )
            )
        if name.endswith(".weight_format") and bool(tensors.read(name).any()):
            raise DataError(
                _unread(
                    tensors, f"tensor {name}", "bitsandbytes in a layout of its own"
                )
            )


def _said(known: str, method: object) -> str:
    """Return the method known by its tensors, with the configuration's name if different."""
    same = not isinstance(method, str) or method.lower() in known.lower()
    return known if same else f"{known} (quant_method {shown(method)})"


def _unread(tensors: Tensors, what: str, how: str) -> str:  # words for messages
    found = next((way for method, way in _UNPACKED_BY.items() if method in how), None)
    way = "" if found is None else f", or where its library runs, transformers: {found}"
    return (
        f"{tensors.name}: {what} is quantised by {how}, which is not read: use the checkpoint before "
        f"quantisation{way}"
    )


def _packed_in_groups(
    module: str,
    method: str,
    bits: object,
    group: object,
    tensors: Tensors,
    settings: Settings,
) -> Packed:
    names = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    missing = [name for name in names if name not in tensors.infos]
    if missing:
        raise DataError(
            f"{tensors.name}: there is no tensor {missing[0]}, and {names[0]} needs it"
        )
    if len(tensors.infos[names[0]].shape) != 2:
        raise DataError(f"{tensors.name}, tensor {names[0]}: it is no matrix")
    rows, columns = tensors.infos[names[0]].shape
    is_group = isinstance(group, int) and -1 <= group <= _LARGEST_GROUP
    if (
        not isinstance(bits, int)
        or bits not in (2, 4, 8)
        or not isinstance(group, int)
        or not is_group
    ):
        raise DataError(
            f"{settings.where}: quantization_config has bits {shown(bits)} and group_size {shown(group)}: "
            "2, 4 or 8 and a whole number are read"
        )
    per_word = 32 // bits  # values packed in an int32
    if method == "gptq":
        order = f"{module}.g_idx"
        names += [order] if order in tensors.infos else []
        second = settings.value("quantization_config.checkpoint_format") == "gptq_v2"
        d_in = rows * per_word
        size = group if group > 0 else d_in
        symmetric = settings.value("quantization_config.sym") is True
        return Gptq(
            module,
            tuple(names),
            (columns, d_in),
            bits,
            size,
            0 if second else 1,
            symmetric,
        )
    if method == "awq" and bits == 4:
        return Awq(
            module,
            tuple(names),
            (columns * per_word, rows),
            group if group > 0 else rows,
        )
    raise DataError(
        f"{tensors.name}: tensor {names[0]} is quantised by {shown(method)} in {bits} bits, which is not "
        "read: use the checkpoint before quantisation"
    )


def _block(
    tensors: Tensors, scale: str, shape: tuple[int, int], settings: Settings
) -> tuple[int, int] | None:
    """Return the size of blocks with one scale; None for a scale for each row, or for the matrix."""
    found = tensors.infos[scale].shape
    # Compare shapes, not counts of scales: the number of b × b blocks equals the number of rows for b²
    # columns.
    if prod(found) == 1 or found in ((shape[0],), (shape[0], 1)):
        return None
    block = settings.value("quantization_config.weight_block_size")
    if block is None:
        block = next(of_weights("block_structure", settings), None)
    is_block = (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    )
    if is_block and found == tuple(
        ceil(n / size) for n, size in zip(shape, block, strict=True)
    ):
        return block[0], block[1]
    raise DataError(
        f"{tensors.name}: tensor {scale} has shape {list(found)}: no scales of {list(shape)} in blocks "
        f"of {shown(block)}"
    )
