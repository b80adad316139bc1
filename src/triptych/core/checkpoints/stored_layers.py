"""Attention layers of a checkpoint: which there are, where each lies, and what is read of it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar, final

from triptych.core.algebra.weights import AttentionWeights, Link, Norm, Side
from triptych.core.checkpoints.source import Source
from triptych.core.checkpoints.specs import (
    AttentionSpec,
    Choice,
    EmbeddedPositionsSpec,
    FeedForwardSpec,
    HeadNormSpec,
    NormSpec,
    PositionSpec,
)
from triptych.core.storage.settings import Settings
from triptych.errors import DataError, UsageError
from triptych.untrusted import shown

_Conditional = TypeVar("_Conditional", Choice, NormSpec, PositionSpec, EmbeddedPositionsSpec, FeedForwardSpec)


@final
@dataclass(frozen=True)
class Site:
    """The weights of an attention layer of a checkpoint, which several layers of the model may have.

    A layer of the model is a use of these weights, and layers are numbered by their uses. Weights that
    several layers share have the number of the first.
    """

    stack: str  # "encoder", "decoder", "vision", …
    layer: int  # its number within the stack, from 0
    kind: Literal["self", "causal", "cross"]  # where queries and keys come from
    module: str  # the name of its module, in the checkpoint's own words
    also: tuple[int, ...] = ()  # numbers of the later layers that have the same weights

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all layers that have these weights."""
        return (self.layer, *self.also)

    @property
    def shared(self) -> str:
        """A sentence on the layers that share the weights; "" if one alone has them."""
        return f"layers {in_ranges(self.numbers)} share these weights" if self.also else ""

    @property
    def name(self) -> str:
        """For reports: stack, layer, and "cross" where it is that."""
        return f"{self.stack} {self.layer}" + (" cross" if self.kind == "cross" else "")


@final
@dataclass(frozen=True, eq=False)
class InputNorms:
    """The norms whose outputs an attention layer reads: they bound its inputs' length."""

    # of the norm that makes what queries read (and keys and values, but for cross-attention); None where
    # there is none, or none is known
    x: Norm | None = None
    memory: Norm | None = None  # the same for the keys and values of cross-attention


@final
@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """What was read of one layer."""

    site: Site
    weights: AttentionWeights  # its maps, in the checkpoint's dtype, and what it does besides
    tensors: tuple[str, ...]  # the names of all that was read for it
    # the norms whose outputs it reads, those included that `fold_norm` must leave alone (post-norm, sandwich)
    # and `weights` therefore does not have
    inputs: InputNorms = InputNorms()
    # how the embeddings, before all layers, tell positions apart
    embedded_positions: Literal["none", "sinusoidal", "learned"] = "none"
    fixed: str = ""  # why it cannot be rewritten; it can if empty
    # the earlier layer whose keys and values it uses, made of what that one reads; None if it has its own
    borrows: Site | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of a number that is kept of a token while decoding; 0 outside decoders, which keep none."""
        cached = self.site.stack == "decoder" and self.site.kind != "self" and self.borrows is None
        return self.weights.dtype.itemsize if cached else 0


@final
class LayerPlace(NamedTuple):
    """A layer of a model: the weights that it has, and its number within its stack."""

    site: Site
    number: int

    @property
    def is_shared(self) -> bool:
        """True if the weights belong to an earlier layer."""
        return self.number != self.site.layer


def in_ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as words: "0 to 3, 6 and 9"."""
    found = list[list[int]]()
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    words = [
        word
        for own in found
        for word in ([f"{own[0]} to {own[-1]}"] if len(own) > 2 else [str(number) for number in own])
    ]
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def in_order(sites: Sequence[Site]) -> tuple[LayerPlace, ...]:
    """Return the layers of the model that have these weights, by stack and number."""
    if not any(site.also for site in sites):
        return tuple(LayerPlace(site, site.layer) for site in sites)

    def stack_of(site: Site) -> tuple[str, bool]:
        return site.stack, site.kind == "cross"

    stacks = [*dict.fromkeys(map(stack_of, sites))]
    found = [LayerPlace(site, number) for site in sites for number in site.numbers]
    return tuple(sorted(found, key=lambda place: (stacks.index(stack_of(place.site)), place.number)))


class AttentionSource(ABC):
    """Something with attention layers, of which one is read at a time."""

    name: str  # its path, or its id on the Hub
    written_as: str  # the family it is written as
    known_by: str  # what that is known by
    sites: tuple[Site, ...]  # its attention layers, in order; those that share their weights once
    num_tensors: int  # there are in all
    left_over: tuple[str, ...]  # tensors that are no attention, as far as their names tell
    unread: dict[str, str]  # tensors of attention that is known and not read, and why
    others: str = ""  # which layers are attention and what the others are, in a sentence; "" if all are
    absent: tuple[str, ...] = ()  # stacks that the configuration has and the tensors have not
    # sentences on fields of the configuration that are set and not followed, and on layers that are not run
    warnings: tuple[str, ...] = ()

    @abstractmethod
    def read(self, site: Site) -> AttentionLayer:
        """Read one attention layer."""

    @property
    def source(self) -> Source | None:
        """The source that weights are read from when needed; None if all of them are in memory."""
        return None

    @cached_property
    def layers(self) -> tuple[LayerPlace, ...]:
        """The attention layers of the model, in order: every use of weights by itself."""
        return in_order(self.sites)

    def require_layers(self, numbers: Collection[int]) -> None:
        """Raises UsageError for the number of a layer that is not there, or is no attention."""
        there = {number for site in self.sites for number in site.numbers}
        for number in sorted({*numbers} - there):
            why = f"is no attention: {self.others}" if self.others else "does not exist"
            layers = "" if self.others else f"; layers are 0 to {max(there)}"
            raise UsageError(f"{self.name}: layer {number} {why}{layers}")

    def outline(self, site: Site) -> AttentionLayer:
        """What `read` gives, with weights without numbers where these would have to be fetched."""
        return self.read(site)

    def lender(self, site: Site) -> Site | None:
        """The layer whose keys and values a layer uses, where these are not its own."""
        return None

    def read_map(self, site: Site, side: Side, head: int) -> Link | None:
        """The map of one head; None where all of the layer has to be read for it."""
        return None

    @abstractmethod
    def bytes_of(self, site: Site) -> int:
        """How many bytes the tensors of a layer take."""

    @abstractmethod
    def longest_text(self, site: Site) -> int:
        """Positions that the model is made for, as far as the configuration says."""

    @abstractmethod
    def input_modules(self, site: Site) -> tuple[str, str]:
        """Names of the modules that read what queries and what keys of a layer are made of."""

    @abstractmethod
    def broken(self, layer: AttentionLayer) -> Mapping[str, int]:
        """How many entries are not finite in each tensor read for a layer, where some are."""


@final
class MapSizes(NamedTuple):
    """Sizes of a layer's maps."""

    heads: int
    groups: int  # key-value heads
    width: int  # of queries and keys
    value_width: int  # of values
    rank: int | None = None  # of the latent of keys and values; None without one
    q_rank: int | None = None  # of that of queries


@final
@dataclass(frozen=True)
class Place:
    """An attention layer and how it is written; `storage.settings` has the language of expressions."""

    site: Site
    spec: AttentionSpec  # how it is written
    settings: Settings  # what the configuration says of its stack
    prefix: str  # of the names that the family gives
    layer: int  # the number that these names hold
    inner: int  # its place within that layer, where one holds several
    # the earlier layer whose keys and values it uses, where it has none of its own
    lender: "Place | None" = None
    is_run: bool = True  # whether a layer of the model has these weights

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
    def is_further(self) -> bool:
        """Whether it comes after the layers of the model, and predicts further tokens."""
        return self.is_run and self.layer >= self.settings.count(self.spec.layers)

    @property
    def norm(self) -> NormSpec | None:
        return self.first(self.spec.norm)

    @property
    def norm_module(self) -> str:
        """The full name of the pre-norm, which may be folded into the maps; "" without one."""
        norm = self.norm
        return self.beside(norm.at) if norm and norm.at and norm.place == "pre" else ""

    @property
    def head_norm(self) -> HeadNormSpec | None:
        norm = self.spec.head_norm
        return norm if norm and self.holds(norm.when) else None

    @property
    def position(self) -> PositionSpec:
        return self.first(self.spec.positions) or PositionSpec(kind="none")

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """The record that scales rotary positions; empty if there is none."""
        records = {path: record for path in self.position.scaling if (record := self.value(path))}
        for path, record in records.items():
            if not isinstance(record, dict):
                raise DataError(f"{self.settings.where}: {path} is {shown(record)}: a record is needed")
        if not records:
            return {}
        used, *others = records
        first: dict[str, Any] = records[used]
        if "." in used:  # of one kind of layer: `transformers` looks for this one in the outer record alone
            first = {name: value for name, value in first.items() if name != "truncate"}
        # `transformers` takes one record whole: what only another has is left out there.
        for other, name in product(others, ("rope_theta", "partial_rotary_factor")):
            told = records[other].get(name)
            if told is not None and first.get(name) is None and told != self.value(name):
                raise DataError(
                    f"{self.settings.where}: {used} and {other} are both there, and {name} is in {other} "
                    f"alone: write one record with all of it"
                )
        return first

    @property
    def width(self) -> str:
        """The expression of the width of queries and keys."""
        return self.spec.width if isinstance(self.spec.width, str) else self.chosen(self.spec.width)

    @property
    def sizes(self) -> MapSizes:
        spec = self.spec
        latent = self.spec.latent
        heads = self.count(spec.heads)
        if latent:
            width = self.settings.whole(latent.plain, self.layer) + self.count(latent.turned)
            q_rank = None if self.value(latent.q_rank) is None else self.count(latent.q_rank)
            return MapSizes(heads, heads, width, self.count(latent.value), self.count(latent.rank), q_rank)
        width = self.count(self.width)
        groups = self.count(self.chosen(spec.groups) or spec.heads)
        value_width = self.count(spec.value_width) if spec.value_width else width
        if heads % groups:
            raise DataError(f"{self.settings.where}: {groups} key heads do not divide {heads} heads")
        return MapSizes(heads, groups, width, value_width)
