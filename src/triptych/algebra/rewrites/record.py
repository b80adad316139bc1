"""What a rewrite gives back, and how it refuses."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from triptych.algebra.cost import WritingCost, writing_cost
from triptych.algebra.weights import AttentionWeights
from triptych.errors import TriptychError

Tier = Literal["bit-exact", "rounding-exact", "bounded"]


@final
class RewriteRefusedError(TriptychError, ValueError):
    """A rewrite would change what the layer computes, or cannot be written; the message says why."""

    def __init__(self, name: str, reason: str, advice: str = "") -> None:
        super().__init__(f"{name} refused: {reason}" + (f"; {advice}" if advice else ""))
        self.name = name
        self.reason = reason
        self.advice = advice

    def at(self, site: str) -> "RewriteRefusedError":
        """The same refusal, saying at which layer of a model."""
        return RewriteRefusedError(f"{self.name} at {site}", self.reason, self.advice)


@final
@dataclass(frozen=True)
class RewriteRecord:
    """What a rewrite did to one layer.

    Attributes:
        name: of the rewrite.
        tier: "bit-exact", "rounding-exact" (equal in exact arithmetic) or "bounded".
        checked: the preconditions that were looked at, in words.
        before: the writing's cost; likewise `after`.
        choice: what it decided by itself and why, with the numbers; "" if nothing.
        notes: what else a reader must know (maps that were untied first, say).
        bound: largest Frobenius norm by which a form of a head moves; 0 if exact.
        error: largest mean square error of a form's scores or outputs, relative to their mean square, on
            the text whose moments the rewrite went by; None if it went by none.
    """

    name: str
    tier: Tier
    checked: tuple[str, ...]
    before: WritingCost
    after: WritingCost
    choice: str = ""
    notes: tuple[str, ...] = ()
    bound: float = 0.0
    error: float | None = None


class Rewritten(NamedTuple):
    """New weights and the record."""

    weights: AttentionWeights
    record: RewriteRecord


def rewritten(
    name: str,
    tier: Tier,
    before: AttentionWeights,
    after: AttentionWeights,
    *,
    checked: tuple[str, ...] = (),
    choice: str = "",
    notes: tuple[str, ...] = (),
    bound: float = 0.0,
    error: float | None = None,
) -> Rewritten:
    """The result of a rewrite, with the cost of both writings."""
    costs = writing_cost(before), writing_cost(after)
    return Rewritten(after, RewriteRecord(name, tier, checked, *costs, choice, notes, bound, error))
