"""Which validation is the best: by BLEU where it means something, by loss until then.

BLEU of a model that cannot translate yet is noise: a few n-grams that happen to match. It decides from the
first validation whose 95 % bootstrap interval lies above `LEAST_BLEU`; that one is better than all before it.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

# A model that says the same frequent words for every source stays below this; so does the lower end of the
# interval of any model on a handful of sentences.
LEAST_BLEU = 5.0


class Bleu(NamedTuple):
    """BLEU of the validation text, 0 to 100.

    Attributes:
        value: of the whole text.
        low: lower end of its 95 % bootstrap interval.
    """

    value: float
    low: float


class Score(NamedTuple):
    """How good a validation is. A later one must be greater to be better.

    Attributes:
        by: what decides; "bleu" is above "loss".
        score: BLEU, or minus the loss.
    """

    by: Literal["bleu", "loss"]
    score: float

    def better_than(self, other: "Score") -> bool:
        return (self.by == "bleu", self.score) > (other.by == "bleu", other.score)


def judge(figures: Mapping[str, float], metric: Literal["bleu", "loss"]) -> Score:
    """The judgement of a validation."""
    if metric == "bleu" and figures["valid_bleu_low"] > LEAST_BLEU:
        return Score("bleu", figures["valid_bleu"])
    return Score("loss", -figures["valid_loss"])
