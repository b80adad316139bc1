"""Devices of models."""

from typing import TypeVar

import torch
from torch import nn

from triptych.errors import UsageError

ModelT = TypeVar("ModelT", bound=nn.Module)


def to_device(model: ModelT, device: torch.device) -> ModelT:
    """Move a model to a device; a model with parameters on "meta" stays unchanged."""
    return (
        model
        if any(weight.is_meta for weight in model.parameters())
        else model.to(device)
    )


def has_fast_bf16(kind: str) -> bool:
    """Return True if a kind of device, "cpu" or "cuda", has native bfloat16 products.

    CPUs without AVX-512 compute bfloat16 products many times slower than float32 products.
    """
    if kind == "cuda":  # without a GPU here, assume a GPU of another machine
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(
            including_emulation=False
        )
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def find_device(name: str) -> torch.device:
    """Return the device of a name: cpu, cuda or cuda:N; auto is a GPU if available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name!r} is given, but torch sees {torch.cuda.device_count()} GPUs here"
        )
    return device
