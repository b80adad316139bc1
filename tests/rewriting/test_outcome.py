"""The word for the size of a rewrite's outcome, and the sentence that a card begins with."""

import json
import math
from pathlib import Path

import pytest
import torch

import triptych
from checkpoints.classifiers import classifier
from small_checkpoints import bert_that_runs
from triptych.rewriting.certificate import EndToEnd
from triptych.rewriting.outcome import outcome, outcome_in_words


def compared(divergence: float, before: float | None = None, after: float | None = None) -> EndToEnd:
    losses = {"loss_before_nats": before, "loss_after_nats": after}
    found = {"by": "triptych", "text": "test.txt", "tokens": 1234, "worst_logit": 0.5}
    return EndToEnd.model_validate({**found, **losses, "divergence_nats": divergence})


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (compared(0.0), "no change"),
        (compared(9e-5, 3.4, 3.40009), "no change"),
        (compared(1.1e-4), "below 0.01 nats"),
        (compared(9e-5, 3.4, 3.409), "below 0.01 nats"),
        (compared(0.011), "noticeable"),
        (compared(0.001, 3.4, 3.62), "noticeable"),
        # A loss that falls is a change, too: the divergence says how large.
        (compared(0.2, 3.4, 3.3), "noticeable"),
        (compared(0.5, 3.41, 9.93), "ruined"),
        (compared(1.0), "ruined"),
        (compared(math.nan), "ruined"),
    ],
)
def test_a_rewrite_is_called_by_the_larger_of_what_it_adds_to_the_loss_and_of_its_divergence(
    found: EndToEnd, word: str
) -> None:
    assert outcome(found) == word
    assert outcome_in_words(found).startswith(f"{word.capitalize()}: on test.txt (1,234 tokens) ")


def test_a_ruined_model_is_said_to_be_with_its_loss_and_perplexity() -> None:
    assert outcome_in_words(compared(5.7, 3.41, 9.931)) == (
        "Ruined: on test.txt (1,234 tokens) the loss goes from 3.4100 to 9.9310 nats a token "
        "(perplexity 30.27 to 20,558), and the next token's distribution moves by 5.7 nats a token "
        "(KL divergence)."
    )


def of_states(relative: float, cosine: float = 0.9) -> EndToEnd:
    states = {"output": "hidden states", "relative": relative, "cosine": cosine}
    return compared(0.0).model_copy(update={"divergence_nats": None, **states})


@pytest.mark.parametrize(
    ("relative", "word"),
    [(9e-5, "no change"), (2e-4, "below 1 %"), (0.3, "noticeable"), (1.1, "ruined"), (math.nan, "ruined")],
)
def test_hidden_states_are_called_by_the_size_of_their_change(relative: float, word: str) -> None:
    found = of_states(relative)
    assert outcome(found) == word
    assert outcome_in_words(found) == (
        f"{word.capitalize()}: on test.txt (1,234 tokens) the hidden states move by {relative:.3g} of their "
        "size (mean cosine 0.9000)."
    )


def test_classes_are_called_by_the_divergence_of_their_distribution() -> None:
    found = compared(0.02).model_copy(update={"output": "classes"})
    assert outcome_in_words(found) == (
        "Noticeable: on test.txt (1,234 predictions) the distribution over classes moves by 0.02 nats (KL "
        "divergence)."
    )


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_head_is_judged_by_its_hidden_states(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = triptych.load(bert_that_runs(tmp_path / "bert"))
    cut = model.rewrite("truncate(rank=2)")
    assert cut.certificate is not None
    found = cut.certificate.end_to_end
    assert found is not None
    assert (found.output, found.divergence_nats) == ("hidden states", None)
    one, other = model.reader, cut.reader
    moved = [(one.outputs(window), other.outputs(window)) for window in one.random_windows(2017)]
    before, after = (torch.cat(side).double() for side in zip(*moved, strict=True))
    assert found.relative == pytest.approx(float((after - before).norm() / before.norm()))
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(before, after).mean()))
    cut.save(tmp_path / "cut")
    record = json.loads((tmp_path / "cut" / "certificate.json").read_text())["end_to_end"]
    assert record["divergence_nats"] is None
    checks = triptych.verify(tmp_path / "cut", against=tmp_path / "bert")
    assert all(check.held is not False for check in checks)
    assert "hidden states moved by" in "".join(str(check) for check in checks)
    exact = model.rewrite("exact").certificate
    assert exact is not None
    assert exact.outcome.startswith("No change: on random tokens")
    assert "whole models: hidden states within" in repr(cut.certificate)


@pytest.mark.filterwarnings("ignore")
def test_a_classifier_is_judged_by_its_classes_and_one_number_by_its_size(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    classifier("Bert", tmp_path / "classes")
    found = triptych.load(tmp_path / "classes").rewrite("truncate(rank=2)").certificate
    assert found is not None
    assert found.end_to_end is not None
    assert found.end_to_end.output == "classes"
    assert "the distribution over classes moves by" in found.outcome
    classifier("Bert", tmp_path / "number", id2label={0: "score"})
    found = triptych.load(tmp_path / "number").rewrite("truncate(rank=2)").certificate
    assert found is not None
    assert found.end_to_end is not None
    assert (found.end_to_end.output, found.end_to_end.divergence_nats) == ("numbers", None)
    assert "the outputs move by" in found.outcome
    assert not found.outcome.startswith("No change")


def test_an_outcome_that_was_not_measured_is_said_to_be_unknown() -> None:
    assert outcome_in_words(None, "there is no tokenizer") == (
        "Outcome unknown: whole models were not compared (there is no tokenizer)."
    )
