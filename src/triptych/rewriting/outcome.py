"""The outcome of a rewrite for the whole model: a word for its size, and the figures that decide it."""

import math
from collections.abc import Callable
from typing import Any, Literal, final

from pydantic import BaseModel, ConfigDict, model_serializer

from triptych.running.opening import Output

Outcome = Literal["no change", "below 0.01 nats", "below 1 %", "noticeable", "ruined"]

# Upper limits of the sizes, in nats a token or text. 1 nat more of loss is 2.7 times the perplexity.
NO_CHANGE_NATS = 1e-4
SMALL_NATS = 0.01
RUINED_NATS = 1.0
# The same for the relative change of outputs without a distribution. At 1 the change of hidden states is as
# large as the states themselves: their cosine is about 0.5.
NO_CHANGE_RELATIVE = 1e-4
SMALL_RELATIVE = 0.01
RUINED_RELATIVE = 1.0


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
        tokens: number of predicted tokens, or of texts for classes of whole texts.
        worst_logit: largest difference of a logit, or of an entry of a hidden state.
        divergence_nats: mean KL divergence of the rewritten model's next token, or class, from the
            original's; None for outputs without a distribution.
        loss_before_nats: loss of the original per token; None for random tokens.
        loss_after_nats: loss of the rewritten model per token.
        output: kind of the compared outputs, of type `Output`; left out of the file for tokens.
        relative: norm of the change of the outputs, divided by their norm; left out of the file
            for distributions.
        cosine: mean cosine of the hidden states of a token before and after; left out of the file for
            distributions.
    """

    by: str
    text: str
    text_sha256: str | None = None
    tokens: int
    worst_logit: float
    divergence_nats: float | None
    loss_before_nats: float | None = None
    loss_after_nats: float | None = None
    output: Output = "tokens"
    relative: float | None = None
    cosine: float | None = None

    @model_serializer(mode="wrap")
    def _leave_out_empty(
        self, write: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Omit entries missing in older certificates, so that these are read and written unchanged."""
        record = write(self)
        if self.output == "tokens":
            record.pop("output", None)
        for name in ("relative", "cosine"):
            if getattr(self, name) is None:
                record.pop(name, None)
        return record


def outcome(found: EndToEnd) -> Outcome:
    """Return the size of a change, in loss or KL divergence if known, otherwise in the outputs."""
    if found.divergence_nats is None:
        size = math.nan if found.relative is None else found.relative
        if size < NO_CHANGE_RELATIVE:
            return "no change"
        if size < SMALL_RELATIVE:
            return "below 1 %"
        return "noticeable" if size < RUINED_RELATIVE else "ruined"
    size = found.divergence_nats
    if found.loss_before_nats is not None and found.loss_after_nats is not None:
        size = max(size, found.loss_after_nats - found.loss_before_nats)
    if size < NO_CHANGE_NATS:
        return "no change"
    if size < SMALL_NATS:
        return "below 0.01 nats"
    # NaN counts as large.
    return "noticeable" if size < RUINED_NATS else "ruined"


def moved_in_words(found: EndToEnd) -> str:
    """Return the figure of the change, to follow "logits differ by at most x" or "on a text"."""
    if found.divergence_nats is None:
        relative = math.nan if found.relative is None else found.relative
        cosine = math.nan if found.cosine is None else found.cosine
        what = "hidden states" if found.output == "hidden states" else "outputs"
        return f"the {what} by {relative:.3g} of their size (mean cosine {cosine:.4f})"
    if found.output == "classes":
        return f"the distribution over classes by {found.divergence_nats:.3g} nats"
    return f"the next token's distribution by {found.divergence_nats:.3g} nats a token"


def outcome_in_words(found: EndToEnd | None, why_not: str = "") -> str:
    """Return a sentence on the outcome; `why_not` is the reason for a missing comparison."""
    if found is None:
        return f"Outcome unknown: whole models were not compared ({why_not})."
    rows = "tokens" if found.output != "classes" else "predictions"
    where = f"on {found.text} ({found.tokens:,} {rows})"
    before = found.loss_before_nats
    after = found.loss_after_nats
    # "the next token's distribution moves by", "the hidden states move by"
    what, _, size = moved_in_words(found).partition(" by ")
    verb = "move" if found.divergence_nats is None else "moves"
    moved = f"{what} {verb} by {size}"
    if found.divergence_nats is not None:
        moved += " (KL divergence)"
    if before is None or after is None:
        return f"{outcome(found).capitalize()}: {where} {moved}."
    return (
        f"{outcome(found).capitalize()}: {where} the loss goes from {before:.4f} to {after:.4f} nats a token "
        f"(perplexity {_perplexity(before)} to {_perplexity(after)}), and {moved}."
    )


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.4g}" if loss < 9 else f"{math.exp(min(loss, 700)):,.0f}"
