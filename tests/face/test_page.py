"""The code of `docs/reference/model.md` runs, block after block."""

import re
from pathlib import Path

import pytest

import triptych
from blocks import run_blocks
from small_checkpoints import gpt2_that_runs

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "model.md"


def test_the_page_of_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    gpt2_that_runs(tmp_path / "gpt2", layers=4)
    monkeypatch.chdir(tmp_path)
    printed = [ran.printed for ran in run_blocks(PAGE)]
    assert "GPT-2 decoder, 4 layers × 4 heads" in printed[0]
    assert not triptych.load("gpt2-without-3.2")[3, 2].W_O.any()


def test_methods_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`model\.(\w+)\(", PAGE.read_text(encoding="utf-8")))
    assert {"ablate", "patch", "translate"} <= named
    assert {name for name in named if not callable(getattr(triptych.Model, name, None))} == set()
