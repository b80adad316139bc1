"""`model.check()`: the numbers of `transformers`, or how far from them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.test_families import made
from small_checkpoints import gpt2_that_runs
from triptych import UsageError, load
from triptych.running.opening import Reader, open_reader

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")
pytestmark = pytest.mark.filterwarnings("ignore")
CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"


@pytest.mark.parametrize("name", ["bert", "t5", "deepseek_v3", "falcon, groups", "albert", "bart"])
def test_tiny_models_of_several_kinds_agree(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    found = load(tmp_path).check()
    assert found.logits < 2e-5 * max(found.largest, 1)
    assert found.layers > 0
    assert found.attention is not None
    assert found.attention < 1e-5
    assert (found.loss is None) == (name in ("bert", "t5", "albert", "bart"))
    assert found.by.startswith("transformers ")


@pytest.mark.parametrize(
    ("name", "text", "target"),
    [
        ("gpt2", "First Citizen: Before we proceed any further.", None),
        ("llama-gqa", "First Citizen: Before we proceed any further.", None),
        ("marian-multi30k", "Two men are walking.", "Zwei Männer gehen spazieren."),
    ],
)
def test_trained_models_agree_on_a_text(name: str, text: str, target: str | None) -> None:
    if not (CHECKPOINTS / name).is_dir():
        pytest.skip(f"no trained {name} here")
    found = load(CHECKPOINTS / name).check(text, target)
    assert found.same_tokens
    assert found.logits < 1e-5 * found.largest
    assert found.loss is not None
    assert found.loss < 1e-5
    assert found.layers == (9 if target else 6)
    assert len(repr(found).splitlines()) <= 8


def test_a_wrong_number_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(gpt2_that_runs(tmp_path / "gpt2"))
    assert model.check().logits < 1e-4

    def shifted(*arguments: Any) -> Reader:
        opened = open_reader(*arguments)
        with torch.no_grad():
            next(opened.model.parameters()).add_(torch.randn(32) / 100)
        return opened

    monkeypatch.setattr("triptych.rewriting.against_transformers.open_reader", shifted)
    assert model.check().logits > 1e-3


def test_a_changed_model_is_compared_as_it_would_be_saved(tmp_path: Path) -> None:
    model = load(gpt2_that_runs(tmp_path / "gpt2"))
    found = model.ablate("1.1").check()
    assert found.logits < 1e-4
    assert "ablate(1.1)" in repr(found)
    with pytest.raises(UsageError, match=r"cannot be saved"):
        model.edit("1.1", "scores", torch.relu).check()
