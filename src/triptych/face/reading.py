"""What a model is, and what its weights say: layers, heads and their measures, before anything runs."""

from abc import ABC
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, overload

from triptych.converting.capabilities import capabilities
from triptych.core.checkpoints.stored_layers import AttentionSource
from triptych.core.heads import Head, Layer, Layers, Stack
from triptych.core.places import PlaceNames
from triptych.core.storage.copying import CERTIFICATE
from triptych.errors import UsageError
from triptych.literals import Into, check_choices
from triptych.printable import table_html
from triptych.progress import Progress, untold
from triptych.rewriting.certificate import Certificate, read_certificate
from triptych.running.changes import Change
from triptych.running.opened_source import ChangedSource, Opened, stack_of, summary_of
from triptych.seeing.composition import Composition, compose
from triptych.seeing.inspection import Inspection, inspect
from triptych.seeing.model_cost import ModelCost, cost_of


class ReadableModel(ABC):
    """A source whose weights can be read, with changes; nothing is run."""

    _opened: Opened
    _changes: tuple[Change, ...]

    def __init__(self, opened: Opened, changes: Sequence[Change] = ()) -> None:
        """Use `load`."""
        self._opened, self._changes = opened, tuple(changes)

    @property
    def name(self) -> str:
        """The path or name that was given."""
        return self._opened.name

    @property
    def can(self) -> tuple[str, ...]:
        """What works: read, run, rewrite, translate, generate, fill, convert."""
        return capabilities(self._opened, self._changes)

    @property
    def why_not_run(self) -> str:
        """Why the model can be read and not run; "" if it runs."""
        return self._opened.why_not_run

    @property
    def changes(self) -> tuple[str, ...]:
        """What was changed, in order: `ablate(3.2)`."""
        return tuple(change.words for change in self._changes)

    @property
    def num_parameters(self) -> int:
        """The number of parameters in all tensors of the files."""
        return self._opened.num_parameters

    @cached_property
    def certificate(self) -> Certificate | None:
        """What is claimed of a rewritten model; None for others."""
        if self._opened.module is not None or self._changes:
            return None
        path = self._opened.files.file(CERTIFICATE)
        return None if path is None else read_certificate(path)

    @cached_property
    def layers(self) -> Layers:
        """All attention layers, in order; their weights are read when they are first used."""
        source, names = self._attention, self._places.names
        own = {
            place.site: name for place, name in zip(source.layers, names, strict=True) if not place.is_shared
        }
        found = []
        for place, name in zip(source.layers, names, strict=True):
            lender = source.lender(place.site)
            borrows = None if lender is None else own[lender]
            shares = own[place.site] if place.is_shared else None
            found.append(Layer(name, source, place.site, borrows, shares))
        return Layers(found)

    @property
    def encoder(self) -> Stack:
        """The layers of the encoder, as `decoder` and `cross` are the others.

        Raises:
            UsageError: there is none.
        """
        return self._stack("encoder")

    @property
    def decoder(self) -> Stack:
        """The self-attention layers of the decoder."""
        return self._stack("decoder")

    @property
    def cross(self) -> Stack:
        """The layers that attend to the encoder's output."""
        return self._stack("cross")

    @overload
    def __getitem__(self, place: int) -> Layer: ...

    @overload
    def __getitem__(self, place: str) -> Any: ...

    @overload
    def __getitem__(self, place: tuple[int | str, int]) -> Head: ...

    def __getitem__(self, place: int | str | tuple[int | str, int]) -> Layer | Head:
        """A layer by its name (`3`, `"decoder.3"`), a head by both (`model[3, 2]`, `model["3.2"]`).

        Raises:
            UsageError: there is no such place, or several; the message lists them.
        """
        number, head = self._places.find(place)
        return self.layers[number] if head is None else self.layers[number][head]

    def __iter__(self) -> Iterator[Layer]:
        """The layers, in order."""
        return iter(self.layers)

    @check_choices
    def composition(self, into: Into, stack: Literal["encoder", "decoder"] | None = None) -> Composition:
        """How much each head reads of what earlier heads of its stack wrote, with the chance level.

        Args:
            into: "Q", "K" or "V" of the later head.
            stack: of an encoder-decoder, which.

        Raises:
            UsageError: positions or norms, which the message names, make the scores wrong; or several stacks.
        """
        stacks = self._places.stacks
        chosen = stack or stacks[0]
        if len(stacks) > 1 and stack is None:
            raise UsageError(f"{self.name} has {', '.join(stacks)}: composition({into!r}, stack=…) is of one")
        return compose(self._stack(chosen).layers, into)

    def inspect(
        self,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        ignore_rotary: bool = False,
        progress: Progress = untold,
    ) -> Inspection:
        """Measure every head from its weights: spectra, ranks, similarities and chance, symmetry, copying.

        Args:
            layers: numbers of layers, in every stack; all if None.
            heads: numbers of heads; all if None.
            ignore_rotary: measure W_Q W_Kᵀ of rotary heads without the rotation.
            progress: told the layer, the bytes read, and the bytes of all.

        Raises:
            UsageError: no layer or head is chosen.
            DataError: tensors do not fit the configuration.
        """
        return inspect(
            self._attention, layers=layers, heads=heads, ignore_rotary=ignore_rotary, progress=progress
        )

    def cost(self) -> ModelCost:
        """Parameters, FLOPs per token and cache bytes of the attention, layer by layer."""
        return cost_of(self.name, self.layers, self._attention)

    @cached_property
    def _places(self) -> PlaceNames:
        layers = self._opened.attention.layers
        return PlaceNames([(stack_of(place.site), place.number) for place in layers], self.name)

    @cached_property
    def _attention(self) -> AttentionSource:
        """The attention layers, changes made."""
        source = self._opened.attention
        return ChangedSource(source, self._changes) if self._changes else source

    def _stack(self, name: str) -> Stack:
        found = [
            layer
            for layer, place in zip(self.layers, self._opened.attention.layers, strict=True)
            if stack_of(place.site) == name
        ]
        if not found:
            raise UsageError(f"{self.name} has no {name}: it has {', '.join(self._places.stacks)}")
        return Stack(name, self.name, Layers(found))

    @property
    def _summary(self) -> str:
        return summary_of(self._opened, self.layers, self._places)

    def __repr__(self) -> str:
        source = self._opened.attention
        rows = [f"Model {self.name}: {self._summary}"]
        rows += [f"  changed: {', '.join(self.changes)}"] if self._changes else []
        rows += [f"  {note}" for note in (source.others, *source.warnings[:2]) if note]
        if source.absent:
            rows.append(f"  absent from the files: {', '.join(source.absent)}")
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        rows = [("model", self._summary), ("found at", self._opened.where)]
        rows += [("changed", ", ".join(self.changes))] if self._changes else []
        return table_html(self.name, rows)
