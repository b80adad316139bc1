"""What a rewrite gives back, and how it refuses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.cost import WritingCost, writing_cost
from triptych.core.algebra.weights import AttentionWeights
from triptych.errors import TriptychError

Tier = Literal["bit-exact", "rounding-exact", "bounded"]
TIERS: tuple[Tier, ...] = ("bit-exact", "rounding-exact", "bounded")


@final
class RewriteRefusedError(TriptychError, ValueError):
    """A rewrite would change what the layer computes, or cannot be written; the message says why."""

    section = "a-rewrite-is-refused"

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
class Cut:
    """What was left of one form of every head, as a choice says it.

    Attributes:
        words: with {ranks} ("rank 4"), {each} ("4"), {most} and {worst} in their places.
        ranks: of each group of heads.
        most: channels that there were, or the largest rank.
        worst: the largest loss of a head, by the measure that the words name.
        lost: of every head, the share of the energy that was left out: of the squares of its form, or of the
            mean square of what it does on a text.
    """

    words: str
    ranks: tuple[int, ...]
    most: int
    worst: float
    lost: tuple[float, ...] = ()

    @classmethod
    def shares(cls, lost: Float[Tensor, "*heads"], whole: Float[Tensor, "*heads"]) -> tuple[float, ...]:
        """`lost / whole` of every head, 0 where there is nothing."""
        return tuple((lost / torch.where(whole > 0, whole, 1.0)).clamp(min=0.0).flatten().tolist())

    def __str__(self) -> str:
        several = len(set(self.ranks)) > 1
        each = ", ".join(map(str, self.ranks if several else self.ranks[:1]))
        ranks = f"ranks {each}" if several else f"rank {each}"
        return self.words.format(each=each, ranks=ranks, most=self.most, worst=self.worst)


@final
@dataclass(frozen=True)
class RewriteRecord:
    """What a rewrite did to one layer."""

    name: str  # of the rewrite
    tier: Tier  # "bit-exact", "rounding-exact" (equal in exact arithmetic) or "bounded"
    checked: tuple[str, ...]  # the preconditions that were looked at, in words
    before: WritingCost  # the writing's cost
    after: WritingCost
    choice: str = ""  # what it decided by itself and why, with the numbers; "" if nothing
    notes: tuple[str, ...] = ()  # what else a reader must know (maps that were untied first, say)
    bound: float = 0.0  # largest Frobenius norm by which a form of a head moves; 0 if exact
    error: float | None = None  # largest mean square error of a form's scores or outputs
    cuts: tuple[Cut, ...] = ()  # what `choice` says, where forms were cut group by group
    kept: tuple[int, ...] | None = None  # the heads that are left, in order, if that may have changed


class Rewritten(NamedTuple):
    """New weights and the record."""

    weights: AttentionWeights
    record: RewriteRecord

    def with_kept(self, kept: tuple[int, ...]) -> "Rewritten":
        """The same, with the heads that are left."""
        return self._replace(record=replace(self.record, kept=kept))


def rewritten(
    name: str,
    tier: Tier,
    before: AttentionWeights,
    after: AttentionWeights,
    *,
    checked: tuple[str, ...] = (),
    choice: str | Sequence[Cut] = "",
    notes: tuple[str, ...] = (),
    bound: float = 0.0,
    error: float | None = None,
) -> Rewritten:
    """The result of a rewrite, with the cost of both writings."""
    if before.semantics.scores is not None and not _same_queries_and_keys(before, after):
        raise RewriteRefusedError(
            name, "queries and keys are compared by scores that are no product, and W_QK says nothing of them"
        )
    costs = writing_cost(before), writing_cost(after)
    cuts = () if isinstance(choice, str) else tuple(choice)
    words = choice if isinstance(choice, str) else "; ".join(map(str, cuts))
    return Rewritten(after, RewriteRecord(name, tier, checked, *costs, words, notes, bound, error, cuts))


def _same_queries_and_keys(one: AttentionWeights, other: AttentionWeights) -> bool:
    links = [(*weights.q, *weights.k) for weights in (one, other)]
    if len(links[0]) != len(links[1]):
        return False
    return all(
        _same_numbers(mine.weight, theirs.weight) and _same_numbers(mine.bias, theirs.bias)
        for mine, theirs in zip(*links, strict=True)
    )


def _same_numbers(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)
