"""Compiled blocks: `torch.compile` where it pays.

It generates kernels that join what lies between the matrix products, for every shape of batch at once.
That takes about a minute at the start. On the CPUs measured it does not win (docs/log.md); on GPUs, where
launching small kernels costs most, it is meant to.
"""

import shutil
from collections.abc import Iterable

import torch
from torch import nn

from triptych.errors import UsageError


def compile_blocks(blocks: Iterable[nn.Module], device: torch.device, backend: str = "inductor") -> None:
    """Compile each block in place; weights and their names stay."""
    on_cpu = device.type == "cpu"
    if backend == "inductor" and on_cpu and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UsageError(
            "training.compile needs a C++ compiler on a CPU (g++ or clang++): install one or leave it"
        )
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)
