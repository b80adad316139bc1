"""Free memory goes back."""

import sys
from pathlib import Path

import pytest
import torch

from triptych.rewriting.memory import give_back_memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="it is the C library of Linux that keeps what is free")
def test_gaps_between_what_is_in_use_are_given_back() -> None:
    # Smaller than what the system is asked for by itself, and every other one stays in use.
    pieces = [torch.ones(1 << 14, dtype=torch.float32) for _ in range(4096)]
    del pieces[::2]
    held = resident_bytes()
    for _ in range(8):  # not every call does it
        give_back_memory()
    assert held - resident_bytes() > 0.5 * 2048 * (1 << 16)
