"""Where a model computes."""

from typing import TypeVar

import torch
from torch import nn

from triptych.errors import UsageError

ModelT = TypeVar("ModelT", bound=nn.Module)


def to_device(model: ModelT, device: torch.device) -> ModelT:
    """Move a model; one whose parameters have no memory yet stays as it is."""
    return model if any(weight.is_meta for weight in model.parameters()) else model.to(device)


def has_fast_bf16(kind: str) -> bool:
    """Whether a kind of device, "cpu" or "cuda", has products in bfloat16 of its own.

    CPUs without AVX-512 compute them many times slower than in float32.
    """
    if kind == "cuda":  # a plan may be for GPUs that are not here
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def find_device(name: str) -> torch.device:
    """The device of a name: cpu, cuda or cuda:N; auto is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name!r} is given, but torch sees {torch.cuda.device_count()} GPUs here")
    return device
