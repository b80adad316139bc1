"""Base classes of rewrites, as records of their options. A `LayerRewrite` applies to a layer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from pydantic import BaseModel, ConfigDict, Field

from triptych.core.algebra.legality import Need
from triptych.core.algebra.norm_folding import OtherReaders
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten
from triptych.core.algebra.weights import AttentionWeights
from triptych.rewriting.functions.channels import untied
from triptych.rewriting.functions.moments import Moments


@final
@dataclass(frozen=True, eq=False)
class LayerToRewrite:
    """A layer during a sequence of rewrites.

    Attributes:
        name: layer name for messages.
        weights: current weights, float64.
        longest_text: maximum positions of the model.
        moments: moments of the current layer over the calibration text; None without a text.
        others: other known readers of its norm, or None.
        numbers: layer number, within the stack, of every layer with these weights.
    """

    name: str
    weights: AttentionWeights
    longest_text: int = 2048
    moments: Moments | None = None
    others: OtherReaders | None = None
    numbers: tuple[int, ...] = (0,)


class Rewrite(BaseModel, ABC):
    """One rewrite with its options.

    The first line of a subclass's docstring states its purpose; its fields are the options. Recipes, the
    command line, `triptych.rewrite` and the documentation are derived from the list of rewrites (`registry`).

    Attributes:
        name: name in recipes, on the command line and in certificates.
        tier: exactness, in words.
        requires: requirements on the layer, or on a layer named by the options. A rewrite without
            requirements keeps the layer's input and the queries, keys and values of every head.
        besides: further refusals, in words: depending on its options or on other layers.
        place: position in the order of rewrites.
        why_here: reason why rewrites later in this order cannot precede it.
        resizes: True if tensors may change shape.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    tier: ClassVar[str]
    requires: ClassVar[tuple[Need, ...]] = ()
    besides: ClassVar[str] = ""
    place: ClassVar[int]
    why_here: ClassVar[str] = "what it does would undo that, or be undone by it"
    resizes: ClassVar[bool] = False

    layers: tuple[int, ...] | None = Field(
        None, description="numbers of layers, in every stack; all by default"
    )

    @classmethod
    def where_refused(cls) -> str:
        """Return the conditions of a refusal, in words."""
        conditions = [*(need.where for need in cls.requires), cls.besides]
        return "; ".join(filter(None, conditions)) or "–"

    @property
    def needs_text(self) -> bool:
        """Return True if it uses the behaviour of layers on a text."""
        return False

    @property
    def needs_losses(self) -> bool:
        """Return True if it uses the loss of the model on a text without each head."""
        return False

    def with_losses(self, losses: Mapping[str, tuple[float, ...]]) -> "Rewrite":
        """Return the rewrite with the increase of the loss without each head, by layer name."""
        return self

    def prepare(
        self, layers: Iterable[LayerToRewrite], *, skip_refused: bool = False
    ) -> "Rewrite":
        """Return the rewrite with values determined by all layers together."""
        return self

    def options(self) -> dict[str, Any]:
        """Return name and options in JSON form, as accepted by `registry.read_rewrite`."""
        return {"rewrite": self.name, **self.model_dump(mode="json", exclude_none=True)}


class LayerRewrite(Rewrite):
    """A rewrite of single attention layers."""

    @abstractmethod
    def apply(self, layer: LayerToRewrite) -> Rewritten: ...


APART = "shared maps would come apart"
BETWEEN = "a norm is between the maps"


def require_still_tied(layer: LayerToRewrite, done: Rewritten) -> Rewritten:
    """Return the result if tied maps are still tied; otherwise refuse."""
    if apart := untied(layer.weights, done.weights):
        name = done.record.name
        raise RewriteRefusedError(
            name, f"it takes shared maps apart: {apart[0]}", "expand the layer first"
        )
    return done
