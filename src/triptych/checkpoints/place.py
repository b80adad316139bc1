"""Where an attention layer lies in a checkpoint, and what the configuration says of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, final

from triptych.checkpoints.attention_spec import AttentionSpec, HeadNormSpec, PositionSpec
from triptych.checkpoints.layer import Site
from triptych.checkpoints.model_spec import EmbeddedPositionsSpec, FeedForwardSpec
from triptych.checkpoints.specs import Choice, NormSpec
from triptych.errors import DataError
from triptych.storage.settings import Settings

_Conditional = TypeVar("_Conditional", Choice, NormSpec, PositionSpec, EmbeddedPositionsSpec, FeedForwardSpec)


@final
class MapSizes(NamedTuple):
    """Those of a layer's maps."""

    heads: int
    groups: int  # key-value heads
    width: int  # of queries and keys
    value_width: int  # of values


@final
@dataclass(frozen=True)
class Place:
    """An attention layer and how it is written; `storage.settings` has the language of expressions."""

    site: Site
    spec: AttentionSpec  # how it is written
    settings: Settings  # what the configuration says of its stack
    prefix: str  # what stands before the names that the family gives
    layer: int  # the number that these names hold
    inner: int  # its place within that layer, where one holds several
    # the earlier layer whose keys and values it uses, where it has none of its own
    lender: "Place | None" = None

    def holds(self, condition: str) -> bool:
        """Whether a condition holds for this layer; an empty one does."""
        return self.settings.holds(condition, self.layer)

    def value(self, expression: str) -> Any:
        """What the configuration has for this layer; None if nothing."""
        return self.settings.value(expression, self.layer)

    def count(self, expression: str) -> int:
        """A whole number above 0."""
        return self.settings.count(expression, self.layer)

    def number(self, expression: str) -> float:
        """A number."""
        return self.settings.number(expression, self.layer)

    def positive(self, expression: str) -> float:
        """A number above 0."""
        return self.settings.positive(expression, self.layer)

    def factor(self, expression: str) -> float:
        """A number; 1 for an empty expression."""
        return self.number(expression) if expression else 1.0

    def optional_number(self, expression: str) -> float | None:
        """A number; None for an empty expression, or one that gives nothing."""
        return None if not expression or self.value(expression) is None else self.number(expression)

    def first(self, choices: Sequence[_Conditional]) -> _Conditional | None:
        """The first whose condition holds; None if none does."""
        return next((choice for choice in choices if self.holds(choice.when)), None)

    def chosen(self, choices: Sequence[Choice]) -> str:
        """The expression of the first whose condition holds; "" if none does."""
        choice = self.first(choices)
        return choice.value if choice else ""

    def within(self, name: str) -> str:
        """The full name of something in the attention's module."""
        return f"{self.site.module}.{name}"

    def beside(self, name: str, **numbers: int) -> str:
        """The full name of something outside it."""
        return self.prefix + name.format(layer=self.layer, inner=self.inner, **numbers)

    @property
    def norm(self) -> NormSpec | None:
        """The norm that the attention reads."""
        return self.first(self.spec.norm)

    @property
    def norm_module(self) -> str:
        """The full name of the pre-norm, which may be folded into the maps; "" without one."""
        norm = self.norm
        return self.beside(norm.at) if norm and norm.at and norm.place == "pre" else ""

    @property
    def head_norm(self) -> HeadNormSpec | None:
        """The norms of queries and keys."""
        norm = self.spec.head_norm
        return norm if norm and self.holds(norm.when) else None

    @property
    def position(self) -> PositionSpec:
        """How positions are told apart."""
        return self.first(self.spec.positions) or PositionSpec(kind="none")

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """The record that scales rotary positions; empty if there is none."""
        found = (self.value(path) for path in self.position.scaling)
        return next((record for record in found if record and isinstance(record, dict)), {})

    @property
    def sizes(self) -> MapSizes:
        """The sizes that the configuration gives."""
        spec, latent = self.spec, self.spec.latent
        heads = self.count(spec.heads)
        if latent:
            width = self.count(latent.plain) + self.count(latent.turned)
            return MapSizes(heads, heads, width, self.count(latent.value))
        width, groups = self.count(spec.width), self.count(self.chosen(spec.groups) or spec.heads)
        value_width = self.count(spec.value_width) if spec.value_width else width
        if heads % groups:
            raise DataError(f"{self.settings.where}: {groups} key heads do not divide {heads} heads")
        return MapSizes(heads, groups, width, value_width)
