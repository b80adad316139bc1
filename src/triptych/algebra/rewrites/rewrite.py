"""The base classes of rewrites: records of options that can be applied to a layer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from triptych.algebra.moments import Moments
from triptych.algebra.rewrites.channels import newly_apart
from triptych.algebra.rewrites.record import RewriteRefusedError, Rewritten
from triptych.algebra.weights import AttentionWeights


@final
@dataclass(frozen=True)
class OtherReaders:
    """The maps outside a layer that read its norm.

    Attributes:
        maps: their names.
        refused: why they cannot take up the norm; "" if they can.
    """

    maps: tuple[str, ...]
    refused: str = ""


@final
@dataclass(frozen=True, eq=False)
class Layer:
    """A layer between two rewrites, or a few groups of its heads.

    Attributes:
        name: for messages.
        weights: the current weights, float64.
        longest_text: the number of positions that the model is made for.
        moments: of the current layer over the calibration text; None without one.
        others: other maps that read its norm; None if none are known.
        first_head: the number of the first of these heads in the whole current layer.
    """

    name: str
    weights: AttentionWeights
    longest_text: int = 2048
    moments: Moments | None = None
    others: OtherReaders | None = None
    first_head: int = 0


class Selected(NamedTuple):
    """A layer with some of its heads, or with all of them in another order.

    Attributes:
        done: the result, and the record.
        kept: which heads are left, in order.
    """

    done: Rewritten
    kept: tuple[int, ...]


class Rewrite(BaseModel, ABC):
    """One rewrite with its options.

    The first line of a subclass's docstring says what it does; its fields are the options. Recipes, the
    command line, `triptych.rewrite` and the documentation are derived from the list of them (`registry`).

    Attributes:
        name: in recipes, on the command line and in certificates.
        tier: how exact it is, in words.
        refused: where it is refused, in words.
        place: rewrites are done in this order.
        why_here: why those of a later place cannot come before it.
        resizes: whether tensors may come out with other shapes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    tier: ClassVar[str]
    refused: ClassVar[str] = "–"
    place: ClassVar[int]
    why_here: ClassVar[str] = "what it does would undo that, or be undone by it"
    resizes: ClassVar[bool] = False

    layers: tuple[int, ...] | None = Field(
        None, description="numbers of layers, in every stack; all by default"
    )

    @property
    def needs_text(self) -> bool:
        """Whether the rewrite needs a calibration text."""
        return False

    def prepare(self, layers: Iterable[Layer], *, skip_refused: bool = False) -> "Rewrite":
        """Prepare the rewrite with what depends on all layers together.

        Args:
            layers: the layers, whole or in consecutive parts.
            skip_refused: whether a layer that refuses the rewrite is left as it is.
        """
        return self

    def options(self) -> dict[str, Any]:
        """The name and options as JSON values, which `registry.read_rewrite` reads."""
        return {"rewrite": self.name, **self.model_dump(mode="json", exclude_none=True)}


class LayerRewrite(Rewrite, ABC):
    """A rewrite of attention layers.

    Attributes:
        by_groups: whether it treats each group of heads by itself, apart from `select`.
        selects: whether it removes or reorders heads (`select`).
        at_end: whether it only copies numbers, so that it can be applied to the stored weights if no other
            rewrite follows.
    """

    by_groups: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    at_end: ClassVar[bool] = False

    @abstractmethod
    def apply(self, layer: Layer) -> Rewritten:
        """Rewrite one layer.

        Raises:
            RewriteRefusedError: with the reason.
        """

    def look(self, layer: Layer) -> tuple[Tensor, ...]:
        """The numbers that `select` needs of some heads, one for each."""
        return ()

    def select(self, whole: AttentionWeights, seen: tuple[Tensor, ...]) -> Selected:
        """Remove or sort heads, if `selects`.

        Args:
            whole: the layer; it may be on the "meta" device.
            seen: the numbers of `look` for all heads.

        Raises:
            RewriteRefusedError: with the reason.
        """
        raise NotImplementedError(self.name)


def still_tied(layer: Layer, done: Rewritten) -> Rewritten:
    """Check that shared maps are still shared; returns the result.

    Raises:
        RewriteRefusedError: they are not, and the layer would become larger.
    """
    if apart := newly_apart(layer.weights, done.weights):
        name = done.record.name
        raise RewriteRefusedError(name, f"it takes shared maps apart: {apart[0]}", "expand the layer first")
    return done
