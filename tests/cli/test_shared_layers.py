"""Layers that share their weights, on the command line: the numbers are those of the library."""

from pathlib import Path

import numpy as np
import pytest
import torch

from command import Command
from face.tiny import write_checkpoint
from triptych import load

pytest.importorskip("transformers", reason="it comes with the extra [dev]")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = "the cat sat on the mat"


def test_a_number_means_the_same_layer_in_every_command(triptych: Command, tmp_path: Path) -> None:
    folder = tmp_path / "albert"
    write_checkpoint("albert", folder, num_hidden_layers=12, num_hidden_groups=3)
    ours, name, found = load(folder), str(folder), {}
    for kind, options in (("whole", []), ("changed", ["--without", "10.1"])):
        out = tmp_path / f"{kind}.npz"
        triptych("attend", name, TEXT, "--heads", "9.2,11.2", "--npz", str(out), *options).done()
        with np.load(out) as arrays:
            found[kind] = [torch.from_numpy(arrays[f"encoder.{layer}"][0]) for layer in (9, 11)]
    for kind, model in (("whole", ours), ("changed", ours.ablate("10.1"))):
        for layer, weights in zip((9, 11), found[kind], strict=True):
            assert torch.allclose(weights, model.attend(TEXT)[layer, 2], atol=1e-6)
    assert torch.equal(found["whole"][0], found["changed"][0])
    assert not torch.allclose(found["whole"][1], found["changed"][1], atol=1e-4)

    plan = triptych("rewrite", name, "--do", "truncate(rank=3)", "--layers", "5", "--plan")
    assert "12 attention layers with the weights of 3" in plan.out
    triptych("rewrite", name, "--exact", "-o", str(tmp_path / "new")).done()
    triptych("verify", str(tmp_path / "new"), "--against", name).done()
    (layer,) = triptych("inspect", name, "--layers", "10", "--json").record()["layers"]
    assert (layer["layer"], layer["caveats"]) == (8, ["layers 8 to 11 share these weights"])
