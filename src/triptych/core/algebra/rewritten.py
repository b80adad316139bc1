"""The result and the refusal of a rewrite."""

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
    """Refusal of a rewrite that would change the function or cannot be stored; the message has the reason."""

    code = "refused"

    def __init__(self, name: str, reason: str, advice: str = "") -> None:
        super().__init__(
            f"{name} refused: {reason}" + (f"; {advice}" if advice else "")
        )
        self.name = name
        self.reason = reason
        self.advice = advice

    def at(self, site: str) -> "RewriteRefusedError":
        """Return the refusal with the name of the layer."""
        return RewriteRefusedError(f"{self.name} at {site}", self.reason, self.advice)


@final
@dataclass(frozen=True)
class Cut:
    """A truncation of one form of all heads.

    Attributes:
        words: template of the description, with {ranks} ("rank 4"), {each} ("4"), {most} and {worst}.
        ranks: rank of each group of heads.
        most: number of channels before the truncation, or the largest rank.
        worst: largest loss of a head, by the measure named in `words`.
        lost: lost share of the energy of each head. The energy is the squared norm of its form, or the mean
            square of its scores or outputs on a calibration text.
    """

    words: str
    ranks: tuple[int, ...]
    most: int
    worst: float
    lost: tuple[float, ...] = ()

    @classmethod
    def shares(
        cls, lost: Float[Tensor, "*heads"], whole: Float[Tensor, "*heads"]
    ) -> tuple[float, ...]:
        """Return `lost / whole` of every head, 0 where `whole` is 0."""
        return tuple(
            (lost / torch.where(whole > 0, whole, 1.0))
            .clamp(min=0.0)
            .flatten()
            .tolist()
        )

    def __str__(self) -> str:
        several = len(set(self.ranks)) > 1
        each = ", ".join(map(str, self.ranks if several else self.ranks[:1]))
        ranks = f"ranks {each}" if several else f"rank {each}"
        return self.words.format(
            each=each, ranks=ranks, most=self.most, worst=self.worst
        )


@final
@dataclass(frozen=True)
class RewriteRecord:
    """Record of a rewrite of one layer."""

    name: str  # name of the rewrite
    tier: Tier  # "bit-exact", "rounding-exact" (equal in exact arithmetic) or "bounded"
    checked: tuple[str, ...]  # checked preconditions, in words
    before: WritingCost  # cost of the layer before the rewrite
    after: WritingCost
    choice: str = (
        ""  # choices of the rewrite with reasons and figures; "" without choices
    )
    notes: tuple[str, ...] = ()  # further notes, such as maps untied beforehand
    bound: float = (
        0.0  # largest Frobenius norm of the change of a head's form; 0 if exact
    )
    error: float | None = (
        None  # largest mean square error of a form's scores or outputs
    )
    cuts: tuple[Cut, ...] = ()  # truncations described by `choice`
    kept: tuple[int, ...] | None = (
        None  # remaining heads in order, if heads may have changed
    )


class Rewritten(NamedTuple):
    """New weights and the record of the rewrite."""

    weights: AttentionWeights
    record: RewriteRecord

    def with_kept(self, kept: tuple[int, ...]) -> "Rewritten":
        """Return the result with the remaining heads in its record."""
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
    """Build the result of a rewrite, with the cost of the layer before and after.

    Refuse a rewrite that changed the maps of queries or keys of a layer with scores other than products.
    """
    # Such scores depend on W_Q and W_K, not on W_QK alone.
    if before.semantics.scores is not None and not _same_queries_and_keys(
        before, after
    ):
        raise RewriteRefusedError(
            name,
            "queries and keys are compared by scores that are no product, and W_QK says nothing of them",
        )
    costs = writing_cost(before), writing_cost(after)
    cuts = () if isinstance(choice, str) else tuple(choice)
    words = choice if isinstance(choice, str) else "; ".join(map(str, cuts))
    return Rewritten(
        after,
        RewriteRecord(name, tier, checked, *costs, words, notes, bound, error, cuts),
    )


def _same_queries_and_keys(one: AttentionWeights, other: AttentionWeights) -> bool:
    links = [(*weights.q, *weights.k) for weights in (one, other)]
    if len(links[0]) != len(links[1]):
        return False
    return all(
        _are_equal(mine.weight, theirs.weight) and _are_equal(mine.bias, theirs.bias)
        for mine, theirs in zip(*links, strict=True)
    )


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)
