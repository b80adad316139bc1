"""Pages on the logit lens, on layers of ours in a model of torch, and on fine-tuning print what they show."""

from pathlib import Path

import pytest

from blocks import assert_shown, run_blocks

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.mark.parametrize(
    "name",
    [
        "lens",
        # torch.compile and optimisation take half a minute.
        pytest.param("in-torch", marks=pytest.mark.slow),
        pytest.param("fine-tune", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_page_prints_what_it_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for one in run_blocks(PAGES / f"{name}.md"):
        assert_shown(one, name)
