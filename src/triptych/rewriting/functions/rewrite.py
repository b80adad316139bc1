"""What every rewrite is: a record of its options. A `LayerRewrite` can be applied to a layer."""

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
    """A layer on its way through rewrites.

    Attributes:
        name: for messages.
        weights: as they are now, float64.
        longest_text: positions that the model is made for.
        moments: of the layer as it is now over the calibration text; None without one.
        others: what else reads its norm; None if nothing does that is known.
        numbers: of the layers of its stack that have these weights.
    """

    name: str
    weights: AttentionWeights
    longest_text: int = 2048
    moments: Moments | None = None
    others: OtherReaders | None = None
    numbers: tuple[int, ...] = (0,)


class Rewrite(BaseModel, ABC):
    """One rewrite with its options.

    The first line of a subclass's docstring says what it does; its fields are the options. Recipes, the
    command line, `triptych.rewrite` and the documentation are derived from the list of them (`registry`).

    Attributes:
        name: in recipes, on the command line and in certificates.
        tier: how exact it is, in words.
        requires: what it needs of a layer, or of one that its options name.
        besides: where else it is refused, in words: what its options or other layers decide.
        place: rewrites are done in this order.
        why_here: why rewrites of a later place cannot come before it.
        resizes: whether tensors may come out with other shapes.
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
        """Where it is refused, in words."""
        return "; ".join([*(need.where for need in cls.requires), cls.besides]).removesuffix("; ") or "–"

    @property
    def needs_text(self) -> bool:
        """Whether it looks at what layers do on a text."""
        return False

    @property
    def needs_losses(self) -> bool:
        """Whether it looks at the loss of the model on a text without each head."""
        return False

    def with_losses(self, losses: Mapping[str, tuple[float, ...]]) -> "Rewrite":
        """The rewrite that knows by which the loss rises without each head, by name of the layer."""
        return self

    def prepare(self, layers: Iterable[LayerToRewrite], *, skip_refused: bool = False) -> "Rewrite":
        """The rewrite with what only all layers together can tell."""
        return self

    def options(self) -> dict[str, Any]:
        """Name and options as JSON has them, to be read by `registry.read_rewrite`."""
        return {"rewrite": self.name, **self.model_dump(mode="json", exclude_none=True)}


class LayerRewrite(Rewrite):
    """A rewrite of attention layers, each by itself."""

    @abstractmethod
    def apply(self, layer: LayerToRewrite) -> Rewritten: ...


APART = "shared maps would come apart"
BETWEEN = "a norm is between the maps"


def require_still_tied(layer: LayerToRewrite, done: Rewritten) -> Rewritten:
    """The result, if maps that were one still are."""
    if apart := untied(layer.weights, done.weights):
        name = done.record.name
        raise RewriteRefusedError(name, f"it takes shared maps apart: {apart[0]}", "expand the layer first")
    return done
