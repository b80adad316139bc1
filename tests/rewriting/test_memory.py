"""A layer is rewritten whole, in a few times its size; what is free goes back to the system."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triptych.rewriting.driver import give_back_memory

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="peak memory and malloc_trim are those of Linux")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@LINUX
def test_gaps_between_what_is_in_use_are_given_back() -> None:
    # Smaller than what the system is asked for by itself, and every other one stays in use.
    pieces = [torch.ones(1 << 14, dtype=torch.float32) for _ in range(4096)]
    del pieces[::2]
    held = resident_bytes()
    give_back_memory()
    assert held - resident_bytes() > 0.5 * 2048 * (1 << 16)


REWRITE = """
import resource, sys, torch
from triptych.rewriting.functions import EXACT, PruneHeads, Truncate
from triptych.core.attention import MultiHeadAttention
from triptych.rewriting.functions import LayerToRewrite
from triptych.rewriting.driver import Driver

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

steps = {"exact": EXACT, "rank": (Truncate(rank=32),), "prune": (PruneHeads(number=4),)}[sys.argv[1]]
torch.set_num_threads(1)
weights = MultiHeadAttention(1536, 24).weights().mapped(torch.Tensor.detach)
driver = Driver([(0, lambda: LayerToRewrite("layer", weights))], steps, skip_refused=True)
before = peak()
driver.rewritten(LayerToRewrite("layer", weights.to(torch.float64)))
print((peak() - before) / (8 * weights.num_parameters))
"""


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("steps", ["exact", "rank", "prune"])
def test_a_layer_takes_at_most_four_times_its_size_in_float64(steps: str) -> None:
    done = subprocess.run([sys.executable, "-c", REWRITE, steps], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 4.0
