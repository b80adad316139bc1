"""Models that give a text a class: accuracy, the worth of heads, and differences of two classes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from blocks import blocks_of, run_blocks
from checkpoints.classifiers import classifier
from face.tiny import write_checkpoint
from small_checkpoints import byte_tokenizer, gpt2_that_runs
from triptych import UsageError

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = [
    "The quick brown fox", "jumps over the lazy dog.", "Don't you?", ("I'm here", "they've gone"),
    "we're not", "The dog",
]  # fmt: skip
GIVEN = ["good", "bad", "2", "fair", "0", "good"]
NUMBERS = [2, 0, 2, 1, 0, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    classifier("Bert", folder)
    lines = [
        "\t".join([label, *([text] if isinstance(text, str) else text)])
        for label, text in zip(GIVEN, TEXTS, strict=True)
    ]
    (folder / "labels.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return triptych.load(folder)


def logits_of(model: Any) -> torch.Tensor:
    return torch.stack([run.logits for run in model.run(TEXTS)])


def test_accuracy_is_the_share_of_right_classes_with_f1_as_in_scikit_learn(model: Any) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    found = model.evaluate(TEXTS, labels=GIVEN)
    predicted = logits_of(model).argmax(dim=1).tolist()
    assert found.predicted == tuple(predicted)
    assert found.right == tuple(NUMBERS)
    assert found.accuracy == metrics.accuracy_score(NUMBERS, predicted)
    assert found.macro_f1 == pytest.approx(metrics.f1_score(NUMBERS, predicted, average="macro"))


def test_the_loss_of_labelled_texts_is_the_cross_entropy_of_their_logits(model: Any) -> None:
    found = model.evaluate(TEXTS, labels=GIVEN)
    expected = torch.nn.functional.cross_entropy(logits_of(model), torch.tensor(NUMBERS))
    assert found.nats_per_text == pytest.approx(float(expected), abs=1e-12)
    low, high = found.interval
    assert low <= found.accuracy <= high
    assert found.majority == 3 / 6
    only = model.evaluate(TEXTS[:1], labels=["good"])
    assert only.accuracy in (0.0, 1.0)
    assert only.macro_f1 == only.accuracy


def test_a_file_of_labelled_lines_is_read_as_its_texts_and_labels(model: Any, folder: Path) -> None:
    assert model.evaluate(labels=folder / "labels.tsv") == model.evaluate(TEXTS, labels=NUMBERS)


def test_heads_are_worth_what_they_change_in_the_loss_of_the_classes(model: Any, folder: Path) -> None:
    found = model.attend_over(folder / "labels.tsv", worth="zero")
    assert found.worth is not None
    assert found.worth.per == "text"
    assert found.worth.loss == pytest.approx(model.evaluate(TEXTS, labels=GIVEN).nats_per_text, abs=1e-12)
    for head in (found.worth.heads[0], found.worth.heads[-1]):
        without = model.ablate(f"{head.layer}.{head.head}").evaluate(TEXTS, labels=GIVEN)
        assert head.change == pytest.approx(without.nats_per_text - found.worth.loss, abs=1e-12)
    assert found.record()["worth"]["texts"] == len(TEXTS)
    assert "nats per text" in found.tables()[1].columns
    assert model.attend_over(TEXTS, NUMBERS, worth="zero").worth == found.worth


def test_two_classes_are_compared_after_each_patch(model: Any) -> None:
    clean, corrupted = TEXTS[0], "jumps over brown dog"
    run = model.run(clean)
    assert len(run.ids) == len(model.run(corrupted).ids)
    swept = model.sweep(clean, corrupted, ("good", 0))
    assert float(swept.clean[0]) == float(run.logits[2] - run.logits[0])
    own = model.sweep(clean, corrupted, lambda run: run.logits[2] - run.logits[0])
    assert torch.equal(swept.values, own.values)
    with pytest.raises(UsageError, match=r"no label 'nice': its labels are bad, fair, good"):
        model.sweep(clean, corrupted, ("nice", "bad"))


def test_two_next_tokens_are_compared_in_the_same_way(tmp_path: Path) -> None:
    model = triptych.load(gpt2_that_runs(tmp_path / "gpt2"))
    run = model.run("two men")
    (one, other) = model.tokenizer.encode("ab")[0]
    expected = float(run.logits[-1, one] - run.logits[-1, other])
    for metric in (("a", "b"), (one, other)):
        assert float(model.sweep("two men", "two mex", metric).clean[0]) == expected
    with pytest.raises(UsageError, match="'men' is 3 tokens"):
        model.sweep("two men", "two mex", ("men", "b"))


def test_two_tokens_are_compared_at_an_encoders_only_mask(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "bert", vocab_size=259)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "mask_token": "<mask>"}
    byte_tokenizer(tmp_path / "bert", "<pad>", "<end>", "<mask>", **names)
    model = triptych.load(tmp_path / "bert")
    run = model.run("a<mask>c")
    assert run.ids[1] == model.tokenizer.mask_id
    swept = model.sweep("a<mask>c", "b<mask>c", (97, 98))
    assert float(swept.clean[0]) == float(run.logits[1, 97] - run.logits[1, 98])
    with pytest.raises(UsageError, match="the text has 0 masks"):
        model.sweep("abc", "bbc", (97, 98))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "nice\tThe dog",
            "line 2: .* has no label 'nice': its labels are bad, fair, good, or numbers from 0",
        ),
        ("3\tThe dog", "line 2: .* has no label '3'"),
        ("good", "line 2: expected a label, a tab and a text"),
        ("good\t ", "line 2: expected a label"),
        ("good\ta\tb\tc", "line 2: expected a label"),
    ],
)
def test_a_line_that_is_not_labelled_is_named(line: str, said: str, model: Any, tmp_path: Path) -> None:
    (tmp_path / "labels.tsv").write_text(f"good\tThe fox\n{line}\n")
    with pytest.raises(UsageError, match=said):
        model.evaluate(labels=tmp_path / "labels.tsv")


def test_labelled_texts_that_do_not_fit_are_refused(model: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="6 texts and 2 labels"):
        model.evaluate(TEXTS, labels=["good", "bad"])
    with pytest.raises(UsageError, match="one class of bad, fair, good: give labels"):
        model.evaluate(TEXTS)
    with pytest.raises(UsageError, match="stride goes with a text to predict"):
        model.evaluate(TEXTS, labels=GIVEN, stride=3)
    with pytest.raises(UsageError, match="context is for texts without labels"):
        model.attend_over(folder / "labels.tsv", worth="zero", context=5)
    for changes, said in (
        ({"id2label": {0: "score"}}, "one number for a text"),
        ({"problem_type": "multi_label_classification"}, "several classes"),
    ):
        classifier("Bert", tmp_path / said, **changes)
        with pytest.raises(UsageError, match=said):
            triptych.load(tmp_path / said).evaluate(TEXTS, labels=GIVEN)


@pytest.mark.slow
def test_the_page_of_classes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    classifier("Bert", tmp_path / "MODEL", num_hidden_layers=4, id2label=labels)
    page = Path(__file__).parents[2] / "docs" / "how-to" / "classes.md"
    (lines,) = [block.text for block in blocks_of(page) if "entailment\t" in block.text]
    (tmp_path / "labels.tsv").write_text(lines, encoding="utf-8")
    assert len([*run_blocks(page)]) == 8
