"""Pages of mapped files that are given back: read again where clean, and never lost where written."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from triptych.core.storage.tensors import open_tensors
from triptych.running.memory import MappedFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems give nothing back")
_NUMBERS = 1 << 22  # of 4 bytes


def mapped(folder: Path) -> Tensor:
    """A tensor of a mapped file, every page of it read once."""
    save_file({"w": torch.arange(_NUMBERS, dtype=torch.float32)}, folder / "model.safetensors")
    found = open_tensors(folder, mapped=True).read("w")
    assert float(found.sum()) > 0
    return found


def pages_of_files() -> int:
    """Bytes of files in the memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


def test_pages_of_a_file_are_given_back_and_read_again(tmp_path: Path) -> None:
    weight = mapped(tmp_path)
    before = pages_of_files()
    MappedFiles().let_go([weight, torch.ones(3)])
    assert pages_of_files() < before - 3 * _NUMBERS
    assert torch.equal(weight, torch.arange(_NUMBERS, dtype=torch.float32))


def test_a_mapping_that_was_written_to_is_left_alone(tmp_path: Path) -> None:
    weight = mapped(tmp_path)
    weight[5000] = -1.0
    MappedFiles().let_go([weight])
    assert float(weight[5000]) == -1.0
