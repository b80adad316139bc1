"""Free memory goes back, and memory of maps is used again."""

import sys
from pathlib import Path

import pytest
import torch

from heads import make_layer
from triptych.algebra.slices import heads_of
from triptych.algebra.weights import SIDES, AttentionWeights
from triptych.rewriting import memory
from triptych.rewriting.memory import Workspace, give_back_memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="it is the C library of Linux that keeps what is free")
def test_gaps_between_what_is_in_use_are_given_back() -> None:
    # Smaller than what the system is asked for by itself, and every other one stays in use.
    pieces = [torch.ones(1 << 14, dtype=torch.float32) for _ in range(4096)]
    del pieces[::2]
    held = resident_bytes()
    give_back_memory()
    assert held - resident_bytes() > 0.5 * 2048 * (1 << 16)


def test_a_workspace_has_the_numbers_of_the_last_heads_in_the_same_memory() -> None:
    weights: AttentionWeights = make_layer("factored", biased=True).weights().to(torch.float16)
    workspace = Workspace()
    places: list[list[int]] = []
    biases = []
    for start in range(weights.num_heads):
        part = heads_of(weights, start, start + 1)
        cast, plain = workspace.cast(part, torch.float64), part.to(torch.float64)
        for one, other in zip(cast.tensors(), plain.tensors(), strict=True):
            assert one.dtype == torch.float64
            assert one.shape == other.shape
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
        places.append([cast.chain(side)[0].weight.data_ptr() for side in SIDES])
        biases.append(cast.q[0].bias)
    assert len(places) > 1
    assert all(place == places[0] for place in places)
    assert len(set(places[0])) == len(SIDES)
    for head, bias in enumerate(biases):  # those of earlier heads are still what they were
        whole = weights.q[0].bias
        assert bias is not None
        assert whole is not None
        assert torch.equal(bias[0], whole[head].double())


def test_a_workspace_gives_back_after_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = []
    part = heads_of(make_layer("factored", biased=False).weights(), 0, 1)
    size = 8 * sum(link.weight.numel() for link in part.links())
    monkeypatch.setattr(memory, "_MOST_PASSED", 3 * size)
    monkeypatch.setattr(memory, "give_back_memory", lambda: given_back.append(1))
    workspace, seen = Workspace(), []
    for _ in range(9):
        workspace.cast(part, torch.float64)
        seen.append(len(given_back))
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_a_workspace_takes_heads_of_other_sizes() -> None:
    workspace = Workspace()
    for heads in (2, 1, 2):
        part = heads_of(make_layer("factored", biased=False).weights(), 0, heads)
        cast = workspace.cast(part, torch.float16)
        assert torch.equal(cast.q[0].weight, part.q[0].weight.half())
