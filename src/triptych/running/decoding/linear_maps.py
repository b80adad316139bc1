"""Linear maps in a chosen precision, and the memory of their weights."""

import ctypes
import math
import mmap
import os
import platform
import re
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triptych import thresholds
from triptych.core.models.device import has_fast_bf16
from triptych.core.models.experts import Experts
from triptych.core.models.feed_forward import FeedForward
from triptych.literals import Precision
from triptych.running.decoding.row_counts import Product, ProductShape, RowCounts, best_layout, row_counts

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
# Multiple of the block size of vectorised activations, even after halving between two threads.
ACTIVATIONS = 64


def unsupported_precision(precision: Precision, device: torch.device) -> str:
    """Return the reason why a device does not support a precision; "" if it does."""
    if precision != "int8":
        return ""
    if device.type != "cpu":
        return f"int8 is for CPUs, and the model is on {device}"
    engines = {"x86", "fbgemm"} & set(torch.backends.quantized.supported_engines)
    if not engines or not hasattr(torch, "quantize_per_channel"):
        return "this build of torch has no int8 products for this CPU"
    return ""


@final
class Maps:
    """Factory of linear maps in a precision.

    Attributes:
        dtype: dtype of inputs and outputs of the maps.
        packed: True if weights are copied to a packed layout.
    """

    def __init__(self, precision: Precision, dtype: torch.dtype, *, packed: bool = False) -> None:
        """Build maps for a model of this dtype; "fp32" keeps the dtype, and shares memory where possible."""
        self.dtype = torch.bfloat16 if precision == "bf16" else dtype
        self.packed = packed or precision == "int8"
        self._is_int8 = precision == "int8"

    def linear(self, weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None) -> nn.Module:
        """Build the map `x Wᵀ + b`."""
        if self._is_int8:
            return Int8Linear(weight.detach(), bias)
        return self.floating(weight, bias)

    def floating(
        self, weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None
    ) -> nn.Module:
        """Build the map `x Wᵀ + b` in floating point, even if the precision is int8."""
        if self.packed and PackedLinear.serves(weight.device, self.dtype):
            return PackedLinear(weight.to(self.dtype), None if bias is None else bias.to(self.dtype))
        made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        made.weight = constant(weight, self.dtype)
        if bias is not None:
            made.bias = constant(bias, self.dtype)
        return made

    def feed_forward(self, layer: FeedForward) -> None:
        """Replace the maps of a feed-forward layer."""
        # Activations are computed in vectors, but a remainder in scalars with different bits: padding avoids
        # a remainder. Sparsity uses the mean over all channels, so padding would change it.
        pads = self.packed and not layer.config.sparsity
        missing = -layer.inner.weight.shape[0] % ACTIVATIONS if pads else 0
        inner = layer.inner
        outer = layer.outer
        gate = layer.gate
        if missing:
            inner = _with_outputs(inner, missing)
            gate = gate and _with_outputs(gate, missing)
            outer.weight = nn.Parameter(F.pad(outer.weight.detach(), (0, missing)))
        layer.inner = self.linear(inner.weight, inner.bias)  # type: ignore[assignment]
        layer.outer = self.linear(outer.weight, outer.bias)  # type: ignore[assignment]
        if gate is not None:
            layer.gate = self.linear(gate.weight, gate.bias)  # type: ignore[assignment]

    def experts(self, layer: Experts) -> None:
        """Cast the maps of a mixture of experts, in floating point even if the precision is int8."""
        for stacked in (layer.inner, layer.gate, layer.outer):
            if stacked is not None:
                stacked.weight = constant(stacked.weight, self.dtype)
                if stacked.bias is not None:
                    stacked.bias = constant(stacked.bias, self.dtype)


@final
class PackedLinear(nn.Module):
    """A linear map with a weight packed once by oneDNN.

    On AMD processors, oneDNN's products in float32 are also twice as fast as torch's products, since torch
    does not use AVX-512 there.

    The bits of a row do not depend on the other rows: a batch with too many rows is split, and a batch with
    too few rows is padded (`row_counts.py`).
    """

    def __init__(self, weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None) -> None:
        super().__init__()
        shape = ProductShape(weight.shape[1], weight.shape[0], weight.dtype, bias is not None, 0)
        self.shape = replace(shape, layout=best_layout(shape, (thresholds.PACKED_ROWS, 1), packed_product))
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self.shape.layout)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self._threads, self._counts = 0, RowCounts(1, 0)

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        """Return True if packed products are available for a dtype on a device."""
        known = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        if device.type != "cpu" or not known or platform.machine().lower() not in ("x86_64", "amd64"):
            return False
        if dtype == torch.bfloat16:
            return has_fast_bf16(device.type)
        return dtype == torch.float32 and torch._C._has_mkldnn

    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        rows = x.numel() // self.shape.d_in
        if self._threads != torch.get_num_threads() or rows > self._counts.most:
            self._threads = torch.get_num_threads()
            self._counts = row_counts(self.shape, rows, packed_product)
        if self._counts.fewest <= rows <= self._counts.most or rows == 0:
            return self.product(x, self.packed, self.bias, "none", [], "")
        pieces = torch.split(x.reshape(rows, -1), self._counts.pieces(rows))
        return torch.cat([self._filled(piece) for piece in pieces]).view(*x.shape[:-1], -1)

    def _filled(self, x: Float[Tensor, "rows d_in"]) -> Float[Tensor, "rows d_out"]:
        """Compute the product with at least `RowCounts.fewest` rows."""
        filled = F.pad(x, (0, 0, 0, max(0, self._counts.fewest - len(x))))
        return self.product(filled, self.packed, self.bias, "none", [], "")[: len(x)]


def packed_product(shape: ProductShape, weight: Tensor, bias: Tensor | None) -> Product:
    """Build the product of `PackedLinear` for a shape, without splitting or padding rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, shape.layout)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")


@final
class Int8Linear(nn.Module):
    """A linear map with int8 weights, scaled by output channel; activations are scaled by row.

    Integer sums are exact, so a row's result does not depend on the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        largest = weight.float().abs().amax(dim=1).clamp_min(1e-12)
        scales = (largest / 127).double()
        zeros = torch.zeros_like(scales, dtype=torch.long)
        with warnings.catch_warnings():
            # torch plans to replace these tensors, but its other int8 products are slower on CPUs so far.
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch.quantize_per_channel(weight.float().contiguous(), scales, zeros, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        self.bias = None if bias is None else bias.detach().float()
        # CPUs without VNNI add pairs of products in 16 bits. Such sums overflow at full range.
        has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
        steps = 127 if has_vnni else 63
        self.scale = 1 / steps
        self.zero = steps + 1
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        # torch's checks of a packed weight before each call would take a tenth of a small product.
        self.product: Callable[..., Tensor] = getattr(product, "_op", product)

    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        # A row of zeros gives the bias: 0 / 0 is quantised to some integers and then multiplied by 0.
        largest = x.abs().amax(-1, True)
        y = self.product(x / largest, self.scale, self.zero, self.packed)
        return y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest, out=y)


def _with_outputs(linear: nn.Linear, missing: int) -> nn.Linear:
    """Pad a map with `missing` outputs of value 0."""
    filled = nn.Linear(linear.in_features, linear.out_features + missing, device="meta")
    filled.weight = nn.Parameter(F.pad(linear.weight.detach(), (0, 0, 0, missing)))
    bias = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
    filled.bias = nn.Parameter(F.pad(bias, (0, missing)))
    return filled


def has_room_for_another(model: nn.Module) -> bool:
    """Return True if a copy of a model's weights would be a small part of the machine's memory."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    return size <= thresholds.SHARE_PACKED * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def constant(tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """Cast a tensor to a contiguous parameter without gradient."""
    return nn.Parameter(tensor.detach().to(dtype).contiguous(), requires_grad=False)


# MADV_DONTNEED of Linux's <sys/mman.h>: pages are read from the file again at their next use.
_DONTNEED = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")


@final
class MappedFiles:
    """File mappings of this process."""

    def __init__(self) -> None:
        """Record the current mappings; their pages must not be written to afterwards."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._is_clean: list[bool] = []  # True if no page was written to: releasing would discard changes
        self._library = ctypes.CDLL(None) if sys.platform == "linux" else None
        if self._library is not None:
            self._library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            self._note()

    def hold(self, tensor: Tensor) -> bool:
        """Return True if a tensor's data lies in a mapped file."""
        return tensor.device.type == "cpu" and self._place(tensor.data_ptr(), tensor.nbytes) is not None

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Release the pages that lie wholly within tensors, if they belong to unmodified file mappings."""
        for tensor in tensors:
            if self._library is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
                continue
            page = mmap.PAGESIZE
            start = tensor.data_ptr()
            first = -(-start // page) * page
            end = (start + tensor.nbytes) // page * page
            place = self._place(first, end - first)
            if place is not None and self._is_clean[place]:
                self._library.madvise(first, end - first, _DONTNEED)

    def _place(self, start: int, length: int) -> int | None:
        """Return the index of the mapping with these bytes, or None."""
        place = bisect_right(self._starts, start) - 1
        return place if length > 0 and place >= 0 and start + length <= self._ends[place] else None

    def _note(self) -> None:
        try:
            lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        # Each mapping has a header line, then its properties; "Anonymous" counts modified pages.
        found: tuple[int, int] | None = None
        for line in lines:
            if header := _MAPPING.match(line):
                start, end, rights, inode = header.groups()
                is_file = inode != "0" and rights.startswith("r") and rights.endswith("p")
                found = (int(start, 16), int(end, 16)) if is_file else None
            elif found is not None and line.startswith("Anonymous:"):
                self._starts.append(found[0])
                self._ends.append(found[1])
                self._is_clean.append(line.split()[1] == "0")


# Share of the available memory reserved for other needs.
_LEFT_FREE = 0.1


def own_memory(modules: Iterable[nn.Module]) -> None:
    """Copy parameters and buffers of modules from mapped files to memory.

    Otherwise, overwriting or truncating the file would change them or crash the process. Tensors with shared
    memory still share it afterwards. If the available memory is too small for all tensors, they stay in the
    files.
    """
    files = MappedFiles()
    held = [
        tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
        if not tensor.is_meta and tensor.layout == torch.strided and files.hold(tensor)
    ]
    if sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values()) > _free_memory():
        return
    # File pages are released after each copy, so that the peak grows by a single tensor.
    copies = dict[tuple[object, ...], Tensor]()
    for tensor in held:
        old = tensor.data
        key = (old.data_ptr(), old.dtype, old.shape, old.stride())
        if key not in copies:
            copies[key] = old.clone()
        tensor.data = copies[key]
        files.let_go([old])


def give_memory_back() -> None:
    """Let glibc return freed memory to the system."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _free_memory() -> float:
    """Return the available memory in bytes, including releasable file pages, less the reserved share."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), None)
    return math.inf if free is None else (1 - _LEFT_FREE) * free
