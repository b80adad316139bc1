"""What a layer keeps of the tokens already decoded.

A parameterisation decides *what* is kept (`Projections.project_kv`); the cache only stores it: a
tuple of tensors `[batch, heads, tokens, width]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

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
    """

    def __init__(self) -> None:
        """Start empty."""
        self._stores: tuple[Tensor, ...] = ()
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def entries(self) -> tuple[Tensor, ...]:
        length = self._length
        if not self._stores or self._stores[0].shape[2] == length:
            return self._stores
        return tuple([store.narrow(2, 0, length) for store in self._stores])

    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        start = self._length
        added = entries[0].shape[2]
        self._length = start + added
        if not self._stores:
            self._stores = entries
            return entries
        if start + added > self._stores[0].shape[2]:
            room = max(2 * start, start + added, 16)
            self._stores = tuple(_with_room(store, start, room) for store in self._stores)
        for store, entry in zip(self._stores, entries, strict=True):
            store.narrow(2, start, added).copy_(entry)
        return self.entries

    def select(self, rows: Tensor) -> None:
        self._stores = tuple(
            _with_room(held.index_select(0, rows), held.shape[2], store.shape[2])
            for held, store in zip(self.entries, self._stores, strict=True)
        )


@final
class DecoderCache:
    """The caches of a whole decoder: its own tokens, and what each layer reads of the memory."""

    def __init__(self, num_layers: int, new: Callable[[], AttentionCache] = LayerCache) -> None:
        """Start empty."""
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


# A traced number of tokens is a symbol, which is no int.
def _with_room(entry: Tensor, length: Any, room: Any) -> Tensor:
    """The first `length` tokens of an entry, in a tensor with room for more."""
    if length == room == entry.shape[2]:
        return entry
    batch, heads, _, width = entry.shape
    grown = entry.new_zeros(batch, heads, room, width)
    grown[:, :, :length] = entry[:, :, :length]
    return grown
