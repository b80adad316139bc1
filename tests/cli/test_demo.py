import json
import shutil
from pathlib import Path

import pytest

from command import Command
from tiny_recipe import FAST_DEMO
from triptych import demonstration
from triptych.training.progress import LineDisplay


def test_the_report_holds_curve_samples_and_attention(shown: demonstration.Demonstration) -> None:
    page = shown.report.read_text()
    assert "vega" in page
    for sample in shown.samples:
        assert sample.source in page
    assert shown.picture.weights.shape[0] == 4
    assert shown.picture.source_tokens[-1] == "<eos>"


def test_the_figures_are_fit_for_a_machine(shown: demonstration.Demonstration) -> None:
    figures = json.loads(json.dumps(shown.figures()))
    assert 0 <= figures["exact_match"] <= 1
    assert figures["sentences"] == 20


@pytest.mark.slow
def test_a_finished_demo_is_replaced_by_the_next(shown: demonstration.Demonstration, tmp_path: Path) -> None:
    folder = shutil.copytree(shown.report.parent, tmp_path / "demo")
    (folder / "mine.txt").write_text("keep")
    again = demonstration.demo(folder, LineDisplay(), FAST_DEMO, num_tested=20)
    assert isinstance(again, demonstration.Demonstration)
    assert again.exact_match == shown.exact_match
    assert (folder / "mine.txt").read_text() == "keep"


def test_another_run_is_not_touched(triptych: Command, small_run: Path) -> None:
    answer = triptych("demo", "--out", small_run)
    assert answer.code == 2
    assert "has another run: give another folder" in answer.err
    assert (small_run / "model.safetensors").exists()
