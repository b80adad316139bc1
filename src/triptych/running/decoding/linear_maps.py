"""Linear maps in a chosen precision."""

import platform
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triptych import thresholds
from triptych.core.models import Experts, FeedForward, has_fast_bf16
from triptych.literals import Precision
from triptych.running.decoding.row_counts import (
    Product,
    ProductShape,
    RowCounts,
    best_layout,
    row_counts,
)

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

    def __init__(
        self, precision: Precision, dtype: torch.dtype, *, packed: bool = False
    ) -> None:
        """Build maps for a model of this dtype; "fp32" keeps the dtype, and shares memory where possible."""
        self.dtype = torch.bfloat16 if precision == "bf16" else dtype
        self.packed = packed or precision == "int8"
        self._is_int8 = precision == "int8"

    def linear(
        self, weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None
    ) -> nn.Module:
        """Build the map `x Wᵀ + b`."""
        if self._is_int8:
            return Int8Linear(weight.detach(), bias)
        return self.floating(weight, bias)

    def floating(
        self, weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None
    ) -> nn.Module:
        """Build the map `x Wᵀ + b` in floating point, even if the precision is int8."""
        if self.packed and PackedLinear.serves(weight.device, self.dtype):
            return PackedLinear(
                weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
            )
        made = nn.Linear(
            weight.shape[1], weight.shape[0], bias is not None, device="meta"
        )
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

    def __init__(
        self, weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None
    ) -> None:
        super().__init__()
        shape = ProductShape(
            weight.shape[1], weight.shape[0], weight.dtype, bias is not None, 0
        )
        self.shape = replace(
            shape,
            layout=best_layout(shape, (thresholds.PACKED_ROWS, 1), packed_product),
        )
        self.packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach(), self.shape.layout
        )
        self.bias = (
            None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        )
        self.product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self._threads, self._counts = 0, RowCounts(1, 0)

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        """Return True if packed products are available for a dtype on a device."""
        known = hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        if (
            device.type != "cpu"
            or not known
            or platform.machine().lower() not in ("x86_64", "amd64")
        ):
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
        return torch.cat([self._filled(piece) for piece in pieces]).view(
            *x.shape[:-1], -1
        )

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
            quantized = torch.quantize_per_channel(
                weight.float().contiguous(), scales, zeros, 0, torch.qint8
            )
            self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        self.bias = None if bias is None else bias.detach().float()
        # CPUs without VNNI add pairs of products in 16 bits. Such sums overflow at full range.
        has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
        steps = 127 if has_vnni else 63
        self.scale = 1 / steps
        self.zero = steps + 1
        product = (
            torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        )
        # torch's checks of a packed weight before each call would take a tenth of a small product.
        self.product: Callable[..., Tensor] = getattr(product, "_op", product)

    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        # A row of zeros gives the bias: 0 / 0 is quantised to some integers and then multiplied by 0.
        largest = x.abs().amax(-1, True)
        y = self.product(x / largest, self.scale, self.zero, self.packed)
        return (
            y.mul_(largest)
            if self.bias is None
            else torch.addcmul(self.bias, y, largest, out=y)
        )


def _with_outputs(linear: nn.Linear, missing: int) -> nn.Linear:
    """Pad a map with `missing` outputs of value 0."""
    filled = nn.Linear(linear.in_features, linear.out_features + missing, device="meta")
    filled.weight = nn.Parameter(F.pad(linear.weight.detach(), (0, 0, 0, missing)))
    bias = (
        linear.weight.new_zeros(linear.out_features)
        if linear.bias is None
        else linear.bias.detach()
    )
    filled.bias = nn.Parameter(F.pad(bias, (0, missing)))
    return filled


def constant(tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """Cast a tensor to a contiguous parameter without gradient."""
    return nn.Parameter(tensor.detach().to(dtype).contiguous(), requires_grad=False)
