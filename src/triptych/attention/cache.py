"""What a layer keeps of the tokens already decoded.

A parameterisation decides *what* is kept (`Projections.remember`); the cache only stores it: a
tuple of tensors `[batch, heads, tokens, width]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor


class AttentionCache(ABC):
    """What one attention layer keeps of the tokens it has read."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens held."""

    @property
    @abstractmethod
    def entries(self) -> tuple[Tensor, ...]:
        """What is held, each `[batch, heads, length, width]`."""

    @abstractmethod
    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add the entries of new tokens and return all that are to be read."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order; a row may be named more than once."""


@final
class LayerCache(AttentionCache):
    """Entries that grow token by token.

    Room is doubled when it runs out, so that appending a token costs O(1) copies of it.

    Attributes:
        columns: see `__init__`.
    """

    def __init__(self, room: int = 0, columns: bool = False) -> None:
        """Start empty.

        Args:
            room: tokens to make room for at the first `append`.
            columns: whether the first entry, the keys, lies in memory with a column for each token, as its
                product with one query reads it fastest. Shapes are the same, and `padded` may be asked for.
        """
        self._stores: tuple[Tensor, ...] = ()
        self._length = 0
        self._room = room
        self.columns = columns

    @property
    def length(self) -> int:
        return self._length

    @property
    def entries(self) -> tuple[Tensor, ...]:
        length = self._length
        if not self._stores or self._stores[0].shape[2] == length:
            return self._stores
        return tuple([store.narrow(2, 0, length) for store in self._stores])

    def padded(self, multiple: int) -> tuple[Tensor, ...]:
        """The entries, with zeros after them up to a multiple of so many tokens.

        Raises:
            ValueError: the cache has no columns.
        """
        if not self.columns:
            raise ValueError("only a cache of columns can be read past its tokens")
        length = -(-self._length // multiple) * multiple
        if length > self._stores[0].shape[2]:
            self._stores = self._with_room(self._stores, self._length, length)
        return tuple([store.narrow(2, 0, length) for store in self._stores])

    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        start, added = self._length, entries[0].shape[2]
        if not self._stores and added >= self._room and not self.columns:
            self._stores = entries
        else:
            if not self._stores:
                self._stores = self._with_room(entries, 0, max(self._room, added))
            elif start + added > self._stores[0].shape[2]:
                self._stores = self._with_room(self._stores, start, max(2 * start, start + added, 16))
            for store, entry in zip(self._stores, entries, strict=True):
                store.narrow(2, start, added).copy_(entry)
        self._length = start + added
        return self.entries

    def select(self, rows: Tensor) -> None:
        if self._stores:
            room = self._stores[0].shape[2]
            held = [entry.index_select(0, rows) for entry in self.entries]
            self._stores = self._with_room(held, self._length, room)

    def _with_room(self, held: Sequence[Tensor], length: int, room: int) -> tuple[Tensor, ...]:
        """The first `length` tokens of every entry, in tensors with room for more."""
        return tuple(
            _with_room(entry, length, room, columns=self.columns and number == 0)
            for number, entry in enumerate(held)
        )


@final
class DecoderCache:
    """The caches of a whole decoder: its own tokens, and what each layer reads of the memory."""

    def __init__(self, num_layers: int, new: Callable[[], AttentionCache] = LayerCache) -> None:
        """Start empty.

        Args:
            num_layers: of the decoder.
            new: makes the cache of a layer's own tokens.
        """
        self.own = [new() for _ in range(num_layers)]
        self.memory = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Number of target tokens held."""
        return self.own[0].length

    def select(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Keep these hypothesis rows, and these sentences of the memory if given."""
        for cache in self.own:
            cache.select(rows)
        if sentences is not None:
            for cache in self.memory:
                cache.select(sentences)


def _with_room(held: Tensor, length: int, room: int, *, columns: bool) -> Tensor:
    """The first `length` tokens of a tensor, in one with room for more."""
    if length == room == held.shape[2] and not columns:
        return held
    batch, heads, _, width = held.shape
    if columns:
        grown = held.new_zeros(batch, heads, width, room).mT
    else:
        grown = held.new_zeros(batch, heads, room, width)
    grown[:, :, :length] = held[:, :, :length]
    return grown
