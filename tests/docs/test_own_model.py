"""The page of models of one's own kind is run: each family file gives the logits of its module."""

from pathlib import Path

import pytest

from blocks import run_blocks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "family.md"


@pytest.mark.filterwarnings("ignore")
def test_the_blocks_of_the_page_run_and_print_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [ran for ran in run_blocks(PAGE) if ran.shown is not None]
    assert len(shown) == 4
    for ran in shown:
        assert ran.printed == ran.shown
