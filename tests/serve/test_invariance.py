"""What /health says of batches: for which models an answer does not depend on other requests."""

from pathlib import Path

import pytest

from face.tiny import write_checkpoint
from served import Served
from triptych import load
from triptych.decoding import engine

PROMISED = "had the same bits alone and together"


def said(folder: Path) -> str:
    """What /health says in words of the only model."""
    with Served({"own": load(folder, device="cpu")}) as served:
        (model,) = served.ask("/health").body["models"]
    return str(model["batch_invariance"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_a_mixture_of_experts_is_named_as_not_promised(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "model")
    assert "; not promised of every text because of mixtures of experts" in said(tmp_path / "model")


@pytest.mark.filterwarnings("ignore")
def test_maps_for_which_there_is_no_room_to_be_packed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("llama", tmp_path / "model")
    assert said(tmp_path / "model").endswith(PROMISED)
    monkeypatch.setattr(engine, "has_room_for_another", lambda model: False)
    assert "because of products in torch.float32 that are not packed" in said(tmp_path / "model")
