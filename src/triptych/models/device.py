"""Where a model computes."""

from typing import TypeVar

import torch
from torch import nn

from triptych.errors import UsageError

ModelT = TypeVar("ModelT", bound=nn.Module)


def to_device(model: ModelT, device: torch.device) -> ModelT:
    """Move a model; one whose parameters have no memory yet stays as it is."""
    return model if any(weight.is_meta for weight in model.parameters()) else model.to(device)


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
