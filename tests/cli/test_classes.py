"""`triptych evaluate --labels` and `attend --pair` of a model with a head of classes."""

from pathlib import Path

import pytest

from checkpoints.classifiers import LABELS, classifier
from command import Command
from small_checkpoints import gpt2_that_runs

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LINES = "good\tThe quick brown fox\n0\tDon't you?\nfair\tThe dog\tthey've gone\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    classifier("Bert", folder)
    (folder / "labels.tsv").write_text(LINES)
    return folder


def test_the_command_measures_the_accuracy_of_labelled_lines(
    triptych: Command, folder: Path, tmp_path: Path
) -> None:
    labels = folder / "labels.tsv"
    record = triptych("evaluate", folder, "--labels", labels, "--json").record()
    assert record["texts"] == 3
    assert [one["label"] for one in record["classes"]] == [*LABELS.values()]
    shown = triptych("evaluate", folder, "--labels", labels)
    assert shown.out.startswith(f"accuracy {record['accuracy']:.4f} (")
    assert "3 texts, 3 classes; interval over texts" in shown.err
    both = triptych("evaluate", folder, folder, "--labels", labels, "--without", "0.*")
    assert "accuracy" in both.out
    assert both.out.count("classifier") == 2
    text = ("--text", labels)
    triptych("evaluate", folder, "--labels", labels, *text).refused("--text does not go with --labels")
    gpt2 = gpt2_that_runs(tmp_path / "gpt2")
    triptych("evaluate", gpt2, "--labels", labels).refused("has no head that tells classes of texts apart")


def test_heads_are_worth_a_loss_of_labelled_lines(triptych: Command, folder: Path) -> None:
    answer = triptych("attend", folder, "--over", folder / "labels.tsv", "--worth", "zero").done()
    assert "nats per text over 3 texts" in " ".join(answer.out.split())


def test_both_texts_of_a_pair_are_told_apart_in_the_terminal_and_in_json(
    triptych: Command, folder: Path
) -> None:
    given = ("attend", folder, "The quick brown fox", "--pair", "The dog")
    shown = triptych(*given)
    assert "¹ token of the first text, ² of the second." in shown.out
    assert "² " in shown.out.split("¹ token")[0]
    record = triptych(*given, "--json").record()
    assert record["tokens"][record["second"] - 1] == "[SEP]"
    assert triptych("attend", folder, "--file", folder / "labels.tsv", "--pair", "a").code == 2
