"""The word for the size of a rewrite's outcome, and the sentence that a card begins with."""

import math

import pytest

from triptych.rewriting.certificate import EndToEnd
from triptych.rewriting.outcome import outcome, outcome_in_words


def compared(divergence: float, before: float | None = None, after: float | None = None) -> EndToEnd:
    return EndToEnd(
        by="triptych",
        text="test.txt",
        tokens=1234,
        worst_logit=0.5,
        divergence_nats=divergence,
        loss_before_nats=before,
        loss_after_nats=after,
    )


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


def test_an_outcome_that_was_not_measured_is_said_to_be_unknown() -> None:
    assert outcome_in_words(None, "there is no tokenizer") == (
        "Outcome unknown: whole models were not compared (there is no tokenizer)."
    )
