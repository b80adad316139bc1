"""Pages on the logit lens, on layers of ours in a model of torch, and on fine-tuning print what they show."""

import subprocess
import sys
from pathlib import Path

import pytest

from blocks import assert_shown, run_blocks

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


@pytest.mark.parametrize(
    "name",
    [
        "lens",
        # Optimisation takes half a minute.
        pytest.param("fine-tune", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_page_prints_what_it_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for one in run_blocks(PAGES / f"{name}.md"):
        assert_shown(one, name)


@pytest.mark.slow
def test_the_page_of_layers_in_torch_prints_what_it_shows(tmp_path: Path) -> None:
    # In a process of its own: `torch.compile` does not take the checks of types that tests add.
    code = f"""
import sys, warnings
from pathlib import Path
sys.path.insert(0, {str(PAGES.parents[1] / "tests")!r})
warnings.simplefilter("ignore")
from blocks import assert_shown, run_blocks
for one in run_blocks(Path({str(PAGES / "in-torch.md")!r})):
    assert_shown(one, "in-torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
