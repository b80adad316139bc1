"""Every tiny model under a model_type that nobody knows: a guess or advice is right, or it is refused."""

import json
from pathlib import Path

import pytest
import torch

from checkpoints.test_families import TOLERANCE, in_batch, made, overheard
from checkpoints.tiny_models import TINY
from triptych.algebra.function import attend
from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.family import read_family
from triptych.errors import DataError

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def furthest(model: torch.nn.Module, checkpoint: Checkpoint) -> float:
    """The largest relative difference of an attention layer's output from the model's."""
    heard, apart = overheard(model, checkpoint), []
    for site in checkpoint.sites:
        layer = checkpoint.read(site)
        memory = in_batch(heard[site.module, "memory"]) if site.kind == "cross" else None
        x, expected = in_batch(heard[site.module, "x"]), in_batch(heard[site.module, "out"])
        found = attend(layer.weights.to(torch.float64), x, memory)
        apart.append(float((found - expected).abs().max() / expected.abs().max()))
    return max(apart)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_guess_is_right_and_so_is_advice(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    path = tmp_path / "config.json"
    record = {**json.loads(path.read_text()), "model_type": "nobodys"}
    path.write_text(json.dumps(record))
    try:
        checkpoint = open_checkpoint(tmp_path)
    except DataError as error:
        if "which channels of a head" not in str(error):
            return
        note, apart = "\n".join(error.__notes__), []
        for pairing in ("halves", "interleaved"):
            own = tmp_path / "my.toml"
            own.write_text(note[note.index('name = "mine"') :].replace('"halves"', f'"{pairing}"'))
            advised = open_checkpoint(tmp_path, read_family(own))
            assert isinstance(advised, Checkpoint)
            apart.append(furthest(model, advised))
        assert min(apart) < TOLERANCE
    else:
        assert isinstance(checkpoint, Checkpoint)
        assert furthest(model, checkpoint) < TOLERANCE
