"""Names of layers and heads: a layer `3`, `encoder.3` or `cross.3`, a head `3.2`, a pattern `*.2`."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from operator import index
from typing import Any, final

from triptych.errors import UsageError

# Heads of a change: a layer, a head or a pattern, or several separated by commas or in a list.
Heads = str | int | Sequence[str | int]
_PART = re.compile(r"encoder|decoder|cross|[0-9]+", re.ASCII)


@final
class NoSuchHeadError(UsageError, IndexError):
    """Error for a missing head; also an IndexError, so that loops by index end."""


def number_of(place: Any) -> int:
    """Return the number of a layer or a head."""
    try:
        return index(place)
    except TypeError:
        raise UsageError(
            f"{place!r} is not a place in a model: write a layer as 3, a head as 3.2; layers[:2] has several"
        ) from None


def head_of(head: Any, count: int, layer: str) -> int:
    """Return the number of a head within a layer; a negative number counts from the end."""
    number = number_of(head)
    if not -count <= number < count:
        raise NoSuchHeadError(
            f"{layer} has no head {number}: its heads are 0 to {count - 1}"
        )
    return number % count


def in_words(heads: Heads) -> str:
    """Write the heads of a change in one line."""
    if isinstance(heads, Sequence) and not isinstance(heads, str):
        return ", ".join(map(str, heads))
    if isinstance(heads, str | int):
        return str(heads)
    raise UsageError(
        f'a {type(heads).__name__} names no head: write a layer as 3 or "3", a head as "3.2"'
    )


@final
class PlaceNames:
    """The names of a model's attention layers, and the search for layers and heads by name.

    In a model with one stack the layers are `0`, `1`, …. In models with several stacks the name of the stack
    is put before the number: `encoder.0`, `decoder.0`, and `cross.0` for attention to the encoder's output.
    """

    def __init__(self, layers: Sequence[tuple[str, int]], model: str) -> None:
        """Build the names from the stack and number of each layer; `model` is for messages."""
        self._model = model
        self._stack_of_layer = [stack for stack, _ in layers]
        self.stacks = tuple(dict.fromkeys(self._stack_of_layer))
        self.names = tuple(
            f"{stack}.{number}" if len(self.stacks) > 1 else str(number)
            for stack, number in layers
        )

    def layer(self, place: int | str) -> int:
        """Return the index of a layer in order, by its name."""
        place = place if isinstance(place, str) else number_of(place)
        if (
            isinstance(place, int)
            and place < 0
            and len(self.stacks) == 1
            and -place <= len(self.names)
        ):
            return len(self.names) + place
        wanted = self._full(str(place))
        if wanted in self.names:
            return self.names.index(wanted)
        several = [name for name in self.names if name.endswith(f".{wanted}")]
        if several:
            raise UsageError(
                f"{self._model}: layer {place} could be {', '.join(several)}: give one of these"
            )
        raise UsageError(
            f"{self._model} has no layer {place}: its layers are {self._shown()}"
        )

    def find(self, place: int | str | tuple[int | str, int]) -> tuple[int, int | None]:
        """Return the index of a layer in order and the number of a head; None for the whole layer."""
        if isinstance(place, tuple) and len(place) == 2:
            return self.layer(place[0]), number_of(place[1])
        if not isinstance(place, str):
            return self.layer(place), None
        if "*" in place:
            raise UsageError(
                f'"{place}" may be several heads: changes take it, as in ablate("{place}")'
            )
        parts = place.split(".")
        if not all(_PART.fullmatch(part) for part in parts):
            raise UsageError(
                f'"{place}" is not a place in a model: write a layer as 3, a head as 3.2'
            )
        # `encoder.3` is a layer, `3.2` a head: a full name comes first, then a number of layer and head.
        if self._full(place) in self.names:
            return self.layer(place), None
        if len(parts) > 1 and parts[-1].isdecimal() and parts[-2].isdecimal():
            return self.layer(".".join(parts[:-1])), int(parts[-1])
        return self.layer(place), None

    def heads(
        self, places: str | Sequence[str], counts: Sequence[int]
    ) -> dict[int, tuple[int, ...]]:
        """Find the heads of names and patterns, by the index of their layer."""
        given = (
            re.split(r"[,\s]+", places.strip())
            if isinstance(places, str)
            else list(places)
        )
        found: dict[int, set[int]] = {}
        for place in given:
            for layer, head in self._matching(str(place), counts):
                found.setdefault(layer, set()).add(head)
        if not found:
            raise UsageError(
                "no head is chosen: write a layer as 3, a head as 3.2, a pattern as *.2"
            )
        return {layer: tuple(sorted(heads)) for layer, heads in sorted(found.items())}

    def residual(self, place: str) -> tuple[str, int]:
        """Return the stack and the block after `residual.3` or `residual.encoder.3` in the stream."""
        word, _, rest = place.partition(".")
        stack, _, number = rest.rpartition(".")
        stacks = [stack for stack in self.stacks if stack != "cross"]
        if word != "residual" or not number.isdecimal():
            raise UsageError(
                f'"{place}" is not a place in the residual stream: write residual.3, or residual.encoder.3'
            )
        if not stack and len(stacks) > 1:
            raise UsageError(
                f"{place} could be of {' or '.join(stacks)}: write residual.{stacks[0]}.{number}"
            )
        stack = stack or stacks[0]
        # `residual.0` is before the first block, and `residual.N` after the last of N blocks.
        count = self._stack_of_layer.count(stack)
        if stack not in stacks or int(number) > count:
            raise UsageError(
                f"{self._model} has no {place}: {stack} has residual.0 to residual.{count}"
            )
        return stack, int(number)

    def _matching(self, place: str, counts: Sequence[int]) -> list[tuple[int, int]]:
        if "*" not in place:
            layer, head = self.find(place)
            if head is None:
                return [(layer, one) for one in range(counts[layer])]
            return [
                (
                    layer,
                    head_of(
                        head, counts[layer], f"{self._model}: layer {self.names[layer]}"
                    ),
                )
            ]
        # A pattern matches names of heads (`*.2`) or of layers (`decoder.*`): then all heads of the layer.
        pattern = self._full(place)
        found = list[tuple[int, int]]()
        for layer, name in enumerate(self.names):
            whole = fnmatchcase(name, pattern)
            heads = range(counts[layer])
            found += [
                (layer, head)
                for head in heads
                if whole or fnmatchcase(f"{name}.{head}", pattern)
            ]
        if not found:
            raise UsageError(
                f"{self._model}: {place} matches no head; layers are {self._shown()}"
            )
        return found

    def _full(self, place: str) -> str:
        """Convert a name to the model's spelling: `decoder.3` of a model with one stack is its layer `3`."""
        first, dot, rest = place.partition(".")
        return (
            rest if dot and len(self.stacks) == 1 and first == self.stacks[0] else place
        )

    def _shown(self) -> str:
        ends: dict[str, list[str]] = {}
        for name in self.names:
            ends.setdefault(name.rpartition(".")[0], []).append(name)
        return ", ".join(_range_of_names(own) for own in ends.values())


def _range_of_names(names: Sequence[str]) -> str:
    """Write the names of one stack as "0 to 11", or as a list if the range has gaps."""
    first, last = (int(name.rpartition(".")[2]) for name in (names[0], names[-1]))
    if len(names) == 1 or last - first != len(names) - 1:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]}"
