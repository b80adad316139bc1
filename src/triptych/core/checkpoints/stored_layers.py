"""Attention layers of a checkpoint: their names, locations, settings and contents."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
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

_Conditional = TypeVar(
    "_Conditional",
    Choice,
    NormSpec,
    PositionSpec,
    EmbeddedPositionsSpec,
    FeedForwardSpec,
)

# Context length in tokens of models without a limit.
CONTEXT = 2048


@final
@dataclass(frozen=True)
class Site:
    """The weights of an attention layer of a checkpoint, perhaps shared by several layers of the model.

    A layer of the model is a use of these weights, and layers are numbered by their uses. Shared weights have
    the number of their first layer.
    """

    stack: str  # "encoder", "decoder", "vision", …
    layer: int  # layer number within the stack, from 0
    kind: Literal["self", "causal", "cross"]  # source of queries and keys, and mask
    module: str  # name of the module in the checkpoint
    also: tuple[int, ...] = ()  # numbers of later layers with the same weights

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all layers with these weights."""
        return (self.layer, *self.also)

    @property
    def named_stack(self) -> str:
        """The stack in the name of a layer: "cross" for cross-attention."""
        return "cross" if self.kind == "cross" else self.stack

    @property
    def shared(self) -> str:
        """A sentence on the layers with these weights; "" for a single layer."""
        return (
            f"layers {in_ranges(self.numbers)} share these weights" if self.also else ""
        )

    @property
    def name(self) -> str:
        """Stack, layer, and "cross" for cross-attention, for reports."""
        return f"{self.stack} {self.layer}" + (" cross" if self.kind == "cross" else "")


@final
@dataclass(frozen=True, eq=False)
class InputNorms:
    """The norms before an attention layer; they bound the length of its inputs."""

    # norm of the input of queries (also of keys and values, except in cross-attention); None if absent or
    # unknown
    x: Norm | None = None
    memory: Norm | None = (
        None  # norm of the memory in cross-attention; None if absent or unknown
    )


@final
@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The contents of one layer."""

    site: Site
    weights: (
        AttentionWeights  # maps in the checkpoint's dtype, and the layer's semantics
    )
    tensors: tuple[str, ...]  # names of all tensors read for it
    # norms before the layer, also those missing in `weights` because `fold_norm` must not fold them
    # (post-norm, sandwich)
    inputs: InputNorms = InputNorms()
    embedded_positions: Literal["none", "sinusoidal", "learned"] = (
        "none"  # positions in the embeddings
    )
    fixed: str = ""  # reason why it cannot be rewritten; "" if it can
    # source of a KV-sharing layer's keys and values, made of the source's input; None if it makes them itself
    borrows: Site | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes per cached value while decoding; 0 for layers without a cache."""
        cached = (
            self.site.stack == "decoder"
            and self.site.kind != "self"
            and self.borrows is None
        )
        return self.weights.dtype.itemsize if cached else 0


@final
class LayerPlace(NamedTuple):
    """A layer of a model: its weights, and its number within its stack."""

    site: Site
    number: int

    @property
    def is_shared(self) -> bool:
        """True if an earlier layer has the same weights."""
        return self.number != self.site.layer


def in_ranges(numbers: Sequence[int]) -> str:
    """Format sorted integers as words: "0 to 3, 6 and 9"."""
    found = list[list[int]]()
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    # Two consecutive integers are listed: "6 and 7" is shorter than "6 to 7".
    words: list[str] = []
    for own in found:
        words += [f"{own[0]} to {own[-1]}"] if len(own) > 2 else map(str, own)
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def in_order(sites: Sequence[Site]) -> tuple[LayerPlace, ...]:
    """Return the layers of the model with these weights, ordered by stack and number."""
    if not any(site.also for site in sites):
        return tuple(LayerPlace(site, site.layer) for site in sites)

    def stack_of(site: Site) -> tuple[str, bool]:
        return site.stack, site.kind == "cross"

    stacks = [*dict.fromkeys(map(stack_of, sites))]
    found = [LayerPlace(site, number) for site in sites for number in site.numbers]
    return tuple(
        sorted(
            found, key=lambda place: (stacks.index(stack_of(place.site)), place.number)
        )
    )


class AttentionSource(ABC):
    """A checkpoint or model with attention layers, read one at a time."""

    name: str  # path, or name on the Hub
    written_as: str  # family of its format
    known_by: str  # evidence for the family
    sites: tuple[
        Site, ...
    ]  # attention layers in order; layers with shared weights once
    num_tensors: int  # number of all tensors
    left_over: tuple[str, ...]  # tensors outside attention, judged by their names
    unread: dict[str, str]  # tensors of known, unread attention, with the reason
    others: str = ""  # sentence on attention layers and layers of other kinds; "" if all are attention
    absent: tuple[str, ...] = ()  # stacks in the configuration without tensors
    warnings: tuple[
        str, ...
    ] = ()  # sentences on fields without effect, and on layers left aside

    @abstractmethod
    def read(self, site: Site) -> AttentionLayer:
        """Read one attention layer."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """The number of parameters in all tensors."""

    @property
    def source(self) -> Source | None:
        """The source for reading weights on demand; None if all of them are in memory."""
        return None

    @cached_property
    def layers(self) -> tuple[LayerPlace, ...]:
        """The attention layers of the model in order, with an entry for every use of shared weights."""
        return in_order(self.sites)

    def require_layers(self, numbers: Collection[int]) -> None:
        """Raise UsageError for numbers of missing layers, or of layers without attention."""
        there = {*chain.from_iterable(site.numbers for site in self.sites)}
        for number in sorted({*numbers} - there):
            why = f"is no attention: {self.others}" if self.others else "does not exist"
            layers = "" if self.others else f"; layers are 0 to {max(there)}"
            raise UsageError(f"{self.name}: layer {number} {why}{layers}")

    def outline(self, site: Site) -> AttentionLayer:
        """Return a layer as `read` does, but with weights on the "meta" device if they are not in memory."""
        return self.read(site)

    def lender(self, site: Site) -> Site | None:
        """Return the source of a KV-sharing layer's keys and values; None for layers of other kinds."""
        return None

    def read_map(self, site: Site, side: Side, head: int) -> Link | None:
        """Read the map of one head; return None if the whole layer is required."""
        return None

    @abstractmethod
    def bytes_of(self, site: Site) -> int:
        """Return the size of a layer's tensors in bytes."""

    @abstractmethod
    def longest_text(self, site: Site) -> int:
        """Return the model's context length in tokens, or a default if the configuration has no limit."""

    @abstractmethod
    def input_modules(self, site: Site) -> tuple[str, str]:
        """Return the names of the modules that read the input of a layer's queries, and of its keys."""

    @abstractmethod
    def broken(self, layer: AttentionLayer) -> Mapping[str, int]:
        """Return the number of non-finite entries, for every tensor of a layer with such entries."""


@final
class MapSizes(NamedTuple):
    """Sizes of a layer's maps."""

    heads: int  # number of query heads
    groups: int  # number of key-value heads
    width: int  # width of queries and keys of a head
    value_width: int  # width of values of a head
    rank: int | None = (
        None  # width of the latent of keys and values; None without a latent
    )
    q_rank: int | None = None  # width of the latent of queries; None without a latent


@final
@dataclass(frozen=True)
class Place:
    """An attention layer's location in a checkpoint, with its description and configuration.

    Expressions are in the language of `storage.settings`, and evaluated for this layer.
    """

    site: Site
    spec: AttentionSpec  # description by the family
    settings: Settings  # configuration of the layer's stack
    prefix: str  # prefix of the family's names in this checkpoint
    layer: int  # number of the layer, from 0
    inner: int  # number {inner} in names, of attention layers within a layer
    lender: "Place | None" = None  # source of a KV-sharing layer's keys and values
    is_run: bool = True  # true if the model uses these weights

    def holds(self, condition: str) -> bool:
        """Return True if a condition is empty, or true for this layer."""
        return self.settings.holds(condition, self.layer)

    def value(self, expression: str) -> Any:
        """Evaluate an expression; return None if the value is missing."""
        return self.settings.value(expression, self.layer)

    def count(self, expression: str) -> int:
        """Evaluate an expression to an integer above 0."""
        return self.settings.count(expression, self.layer)

    def number(self, expression: str) -> float:
        return self.settings.number(expression, self.layer)

    def positive(self, expression: str) -> float:
        """Evaluate an expression to a number above 0."""
        return self.settings.positive(expression, self.layer)

    def factor(self, expression: str) -> float:
        """Evaluate an expression to a number; return 1 for an empty expression."""
        return self.number(expression) if expression else 1.0

    def optional_number(self, expression: str) -> float | None:
        """Evaluate an expression to a number; return None if it is empty or has no value."""
        return (
            None
            if not expression or self.value(expression) is None
            else self.number(expression)
        )

    def first(self, choices: Sequence[_Conditional]) -> _Conditional | None:
        """Return the first entry with a true condition, or None."""
        return next((choice for choice in choices if self.holds(choice.when)), None)

    def chosen(self, choices: Sequence[Choice]) -> str:
        """Return the value of the first choice with a true condition, or ""."""
        choice = self.first(choices)
        return choice.value if choice else ""

    def within(self, name: str) -> str:
        """Return the full name of a module or tensor within the attention's module."""
        return f"{self.site.module}.{name}"

    def beside(self, name: str, **numbers: int) -> str:
        """Return the full name outside the attention's module; keywords fill further placeholders."""
        layer = self.layer + self.spec.first
        return self.prefix + name.format(layer=layer, inner=self.inner, **numbers)

    @property
    def is_further(self) -> bool:
        """True if the layer is after the model's layers and predicts further tokens."""
        return self.is_run and self.layer >= self.settings.count(self.spec.layers)

    @property
    def norm(self) -> NormSpec | None:
        return self.first(self.spec.norm)

    @property
    def norm_module(self) -> str:
        """The full name of the pre-norm, a candidate for folding; "" without a pre-norm."""
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
        """The record of RoPE scaling; empty without scaling."""
        records = {
            path: record
            for path in self.position.scaling
            if (record := self.value(path))
        }
        for path, record in records.items():
            if not isinstance(record, dict):
                raise DataError(
                    f"{self.settings.where}: {path} is {shown(record)}: a record is needed"
                )
        if not records:
            return {}
        used, *others = records
        first: dict[str, Any] = records[used]
        # In a record for one kind of layer, `transformers` ignores `truncate`: it reads the outer record's.
        if "." in used:
            first = {name: value for name, value in first.items() if name != "truncate"}
        # `transformers` uses one record as a whole and ignores fields of other records.
        for other, name in product(others, ("rope_theta", "partial_rotary_factor")):
            told = records[other].get(name)
            if (
                told is not None
                and first.get(name) is None
                and told != self.value(name)
            ):
                raise DataError(
                    f"{self.settings.where}: {used} and {other} are both there, and {name} is in {other} "
                    f"alone: write one record with all of it"
                )
        return first

    @property
    def width(self) -> str:
        """The expression for the width of queries and keys."""
        return (
            self.spec.width
            if isinstance(self.spec.width, str)
            else self.chosen(self.spec.width)
        )

    @property
    def sizes(self) -> MapSizes:
        spec = self.spec
        latent = self.spec.latent
        heads = self.count(spec.heads)
        # Through a latent, every head has separate keys and values, so groups are heads.
        if latent:
            width = self.settings.whole(latent.plain, self.layer) + self.count(
                latent.turned
            )
            q_rank = (
                None if self.value(latent.q_rank) is None else self.count(latent.q_rank)
            )
            return MapSizes(
                heads,
                heads,
                width,
                self.count(latent.value),
                self.count(latent.rank),
                q_rank,
            )
        width = self.count(self.width)
        groups = self.count(self.chosen(spec.groups) or spec.heads)
        value_width = self.count(spec.value_width) if spec.value_width else width
        if heads % groups:
            raise DataError(
                f"{self.settings.where}: {groups} key heads do not divide {heads} heads"
            )
        return MapSizes(heads, groups, width, value_width)
