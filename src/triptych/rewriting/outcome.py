"""The outcome of a rewrite for the whole model: a word for its size, and the figures that decide it."""

import math
from typing import Literal, final

from pydantic import BaseModel, ConfigDict

Outcome = Literal["no change", "below 0.01 nats", "noticeable", "ruined"]

# Upper limits of the sizes, in nats a token. 1 nat more of loss is 2.7 times the perplexity.
NO_CHANGE_NATS = 1e-4
SMALL_NATS = 0.01
RUINED_NATS = 1.0


class FrozenRecord(BaseModel):
    """A record of a certificate: its fields are fixed, and other fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@final
class EndToEnd(FrozenRecord):
    """Comparison of the whole models.

    Attributes:
        by: the library that ran them.
        text: the name of the text file, or "random tokens", drawn with the seed of the probes.
        text_sha256: hash of the file; None for random tokens, and in older certificates.
        tokens: number of predicted tokens.
        worst_logit: largest difference of a logit.
        divergence_nats: mean KL divergence of the rewritten model's next token from the original's.
        loss_before_nats: loss of the original per token; None for random tokens.
        loss_after_nats: loss of the rewritten model per token.
    """

    by: str
    text: str
    text_sha256: str | None = None
    tokens: int
    worst_logit: float
    divergence_nats: float
    loss_before_nats: float | None = None
    loss_after_nats: float | None = None


def outcome(found: EndToEnd) -> Outcome:
    """Return the size of a change: the rise of the loss or the KL divergence, whichever is larger."""
    size = found.divergence_nats
    if found.loss_before_nats is not None and found.loss_after_nats is not None:
        size = max(size, found.loss_after_nats - found.loss_before_nats)
    if size < NO_CHANGE_NATS:
        return "no change"
    if size < SMALL_NATS:
        return "below 0.01 nats"
    # NaN counts as large.
    return "noticeable" if size < RUINED_NATS else "ruined"


def outcome_in_words(found: EndToEnd | None, why_not: str = "") -> str:
    """Return a sentence on the outcome; `why_not` is the reason for a missing comparison."""
    if found is None:
        return f"Outcome unknown: whole models were not compared ({why_not})."
    where = f"on {found.text} ({found.tokens:,} tokens)"
    before = found.loss_before_nats
    after = found.loss_after_nats
    moved = f"the next token's distribution moves by {found.divergence_nats:.3g} nats a token (KL divergence)"
    if before is None or after is None:
        return f"{outcome(found).capitalize()}: {where} {moved}."
    return (
        f"{outcome(found).capitalize()}: {where} the loss goes from {before:.4f} to {after:.4f} nats a token "
        f"(perplexity {_perplexity(before)} to {_perplexity(after)}), and {moved}."
    )


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.4g}" if loss < 9 else f"{math.exp(min(loss, 700)):,.0f}"
