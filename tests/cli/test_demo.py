import json
from pathlib import Path

import pytest

from command import Command
from triptych import demonstration
from triptych.training.progress import LineDisplay

FAST = (
    "data.train.generated=300",
    "data.valid.generated=4",
    "data.cache=''",
    "tokenizer.vocab_size=400",
    "training.max_steps=3",
    "validation.every_steps=3",
    "validation.max_sentences=2",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> demonstration.Demonstration:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    result = demonstration.demo(folder, LineDisplay(), FAST, num_tested=20)
    assert isinstance(result, demonstration.Demonstration)
    return result


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


def test_a_finished_demo_is_replaced_by_the_next(shown: demonstration.Demonstration) -> None:
    folder = shown.report.parent
    (folder / "mine.txt").write_text("keep")
    again = demonstration.demo(folder, LineDisplay(), FAST, num_tested=20)
    assert isinstance(again, demonstration.Demonstration)
    assert again.exact_match == shown.exact_match
    assert (folder / "mine.txt").read_text() == "keep"


def test_another_run_is_not_touched(triptych: Command, small_run: Path) -> None:
    answer = triptych("demo", "--out", small_run)
    assert answer.code == 2
    assert "has another run: give another folder" in answer.err
    assert (small_run / "model.safetensors").exists()
