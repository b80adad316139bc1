"""What /health says of batches: for which models an answer does not depend on other requests."""

from pathlib import Path

import pytest

from face.tiny import write_checkpoint
from served import Served
from triptych import load
from triptych.running.decoding import engine

PROMISED = "had the same bits alone and together"


def said(folder: Path) -> tuple[bool, str]:
    """What /health says of the only model, and in words."""
    with Served({"own": load(folder, device="cpu")}) as served:
        (model,) = served.ask("/health").body["models"]
    return model["batch_invariant"], str(model["batch_invariance"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_a_mixture_of_experts_is_named_as_not_promised(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "model")
    is_invariant, words = said(tmp_path / "model")
    assert not is_invariant
    assert "; not promised of every text because of mixtures of experts" in words


@pytest.mark.filterwarnings("ignore")
def test_maps_for_which_there_is_no_room_to_be_packed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("llama", tmp_path / "model")
    is_invariant, words = said(tmp_path / "model")
    assert is_invariant
    assert words.endswith(PROMISED)
    monkeypatch.setattr(engine, "has_room_for_another", lambda model: False)
    is_invariant, words = said(tmp_path / "model")
    assert not is_invariant
    assert "because of products in torch.float32 that are not packed" in words
