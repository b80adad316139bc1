"""Which kind of parallelism a run uses."""

import os
from pathlib import Path

import torch

from triptych.errors import UsageError
from triptych.models.device import find_device
from triptych.models.storage import OwnModel
from triptych.training.parallel.computing import Kind
from triptych.training.parallel.world import World
from triptych.training.sections import OptimisationConfig

# Weights, gradients and two moments of Adam in float32. Muon keeps one moment less of its matrices.
_BYTES_PER_PARAMETER = 16
# The rest of a device is for activations.
_SHARE_FOR_STATE = 0.5


def choose_parallel(config: OptimisationConfig, model: OwnModel, world: World) -> tuple[Kind | None, str]:
    """The kind of parallelism, and why; None for one process."""
    if world.size == 1:
        return None, ""
    require_kind(config, world.size)
    if config.parallel is not None and config.parallel != "none":
        return config.parallel, f"{world.size} processes, {config.parallel}"
    device = find_device(config.device)
    needed = _BYTES_PER_PARAMETER * sum(weight.numel() for weight in model.parameters())
    memory = _device_bytes(device, world)
    sharded: Kind = "hybrid" if 1 < world.num_nodes < world.size else "fsdp"
    kind: Kind = "ddp" if needed <= _SHARE_FOR_STATE * memory else sharded
    return kind, (
        f"{world.size} processes; training.parallel left out, chosen: {kind} (weights, gradients and "
        f"optimizer take {needed / 2**30:.2f} GiB, a device has {memory / 2**30:.0f} GiB)"
    )


def require_kind(config: OptimisationConfig, num_processes: int) -> None:
    """Several processes can do what a recipe asks for."""
    if config.parallel == "none":
        raise UsageError(
            f"training.parallel = 'none' is for one process, and {num_processes} were started: use 'ddp' or "
            "'fsdp'"
        )
    if config.optimizer == "muon" and config.parallel != "ddp":
        raise UsageError(
            "training.optimizer = 'muon' needs whole matrices: set training.parallel = 'ddp', or "
            "optimizer = 'adamw'"
        )


def _device_bytes(device: torch.device, world: World) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    on_machine = world.size // world.num_nodes
    return _machine_bytes() // on_machine


def _machine_bytes() -> int:
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**34
    return min(int(text), physical) if text.isdigit() else physical
