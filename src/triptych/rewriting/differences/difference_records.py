"""Results of the comparison of two models, A and B."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

# Verdicts in descending order of strength.
Verdict = Literal["same bytes", "same numbers", "same function", "near", "different"]
VERDICTS: tuple[Verdict, ...] = (
    "same bytes",
    "same numbers",
    "same function",
    "near",
    "different",
)
PartKind = Literal["embeddings", "attention", "feed-forward", "head", "other"]


def weakest(verdicts: "tuple[Verdict, ...] | list[Verdict]") -> Verdict:
    """Return the weakest of some verdicts; "same bytes" if `verdicts` is empty."""
    return max(verdicts, key=VERDICTS.index, default="same bytes")


def holds(verdict: Verdict, required: Verdict) -> bool:
    """Return True if a verdict is at least as strong as the required verdict."""
    return VERDICTS.index(verdict) <= VERDICTS.index(required)


@final
@dataclass(frozen=True)
class ChainStep:
    """One exact rewrite on the way from A to B.

    Attributes:
        words: description of the step.
        recipe: the step of a recipe of `triptych rewrite`; None if no rewrite does it.
        layers: names of the changed layers; empty for the whole model.
        inverse: True if the rewrite leads from B to A.
    """

    words: str
    recipe: Mapping[str, Any] | None = None
    layers: tuple[str, ...] = ()
    inverse: bool = False


@final
@dataclass(frozen=True)
class HeadDifference:
    """A head of A and its counterpart in B.

    Attributes:
        head: number in A.
        other: number in B; None without a counterpart.
        verdict: verdict on this head.
        qk: size of the difference of W_QK relative to that of A's; None if not measured.
        ov: likewise of W_OV.
    """

    head: int
    other: int | None
    verdict: Verdict
    qk: float | None = None
    ov: float | None = None


@final
@dataclass(frozen=True)
class PartDifference:
    """The findings in one part of the models.

    Attributes:
        name: the part, such as "embeddings", "3 attention", "encoder.3 feed-forward", "cross.3 attention" or
            "head".
        kind: kind of the part.
        verdict: verdict on the function of this part.
        layer: name of the layer, such as "3" or "encoder.3"; "" outside layers.
        steps: words for the rewrites that lead from A to B.
        reasons: reasons why the part is not the same; empty if it is.
        relative: norm of the difference relative to A's norm, after the best match; None if not measured.
        heads: heads of an attention layer, in A's order.
        bounds: bounds of the effect of the difference, by name ("scores", "output").
    """

    name: str
    kind: PartKind
    verdict: Verdict
    layer: str = ""
    steps: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    relative: float | None = None
    heads: tuple[HeadDifference, ...] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class SettingDifference:
    """A differing field with an effect on the computation, such as "blocks.3.attention.norm.eps".

    Attributes:
        name: field of the architecture or of a layer's semantics.
        a: value in A, as text.
        b: value in B, as text.
    """

    name: str
    a: str
    b: str


@final
@dataclass(frozen=True)
class Change:
    """A named kind of change with its evidence.

    Attributes:
        kind: short name of the kind, such as "merged LoRA".
        evidence: a sentence with figures.
        where: names of parts, tensors or settings; empty for the whole model.
        heads: relative effect on W_QK and W_OV of each head, keyed by head name such as "3.2".
    """

    kind: str
    evidence: str
    where: tuple[str, ...] = ()
    heads: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class TextDifference:
    """Differences of the predictions of two models on a text.

    Attributes:
        tokens: number of predicted tokens.
        kl: mean KL divergence of B's predictions from A's in nats, with a 95 % interval.
        loss_a: mean loss of A in nats per token.
        loss_change: mean loss of B minus that of A, with a 95 % interval.
        worst_logit: largest difference of a logit.
        first_layer: first layer whose output differs by more than rounding; "" if all agree.
        first_head: first head of it, such as "3.2"; "" if unknown.
    """

    tokens: int
    kl: tuple[float, float, float]
    loss_a: float
    loss_change: tuple[float, float, float]
    worst_logit: float
    first_layer: str = ""
    first_head: str = ""


@final
@dataclass(frozen=True)
class Difference:
    """The comparison of two models A and B.

    Attributes:
        a: name of A.
        b: name of B.
        verdict: "same bytes", "same numbers", "same function", "near" or "different".
        parts: findings in every part, in order of the model.
        chain: exact rewrites that lead from A to B; empty unless the verdict is "same function".
        reasons: sentences on why the verdict is not stronger.
        settings: fields of the configurations that change the computation and differ.
        changes: named kinds of change.
        text: the difference on a text; None without a text or for models of one function.
        texts: differences of tokenizers, chat templates and generation settings, which change no verdict.
        notes: sentences on the scope of the comparison.
    """

    a: str
    b: str
    verdict: Verdict
    parts: tuple[PartDifference, ...] = ()
    chain: tuple[ChainStep, ...] = ()
    reasons: tuple[str, ...] = ()
    settings: tuple[SettingDifference, ...] = ()
    changes: tuple[Change, ...] = ()
    text: TextDifference | None = None
    texts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """Name of the first differing part; "" if all parts are the same."""
        return next(
            (part.name for part in self.parts if part.verdict in ("near", "different")),
            "",
        )
