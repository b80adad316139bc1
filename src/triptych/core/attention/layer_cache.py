"""Caches of decoded tokens.

A parameterisation decides about the contents (`Projections.project_kv`); the cache only stores the tensors, a
tuple of `[batch, heads, tokens, width]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

from torch import Tensor


class AttentionCache(ABC):
    """The cache of one attention layer."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of cached tokens."""

    @property
    @abstractmethod
    def entries(self) -> tuple[Tensor, ...]:
        """Cached tensors `[batch, heads, length, width]`."""

    @abstractmethod
    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Append the entries of new tokens and return all entries for attention."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep these batch rows in the given order; rows may repeat."""


@final
class LayerCache(AttentionCache):
    """A growing cache.

    A full cache doubles its capacity, so that a token is copied O(1) times on average.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
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
            self._stores = tuple(
                _with_room(store, start, room) for store in self._stores
            )
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
    """The caches of a whole decoder: every layer has a cache of target tokens and a cache of the memory."""

    def __init__(
        self, num_layers: int, new: Callable[[], AttentionCache] = LayerCache
    ) -> None:
        """Create empty caches; `new` makes a cache of target tokens."""
        self.own = [
            new() for _ in range(num_layers)
        ]  # keys and values of the tokens before
        self.memory = [
            LayerCache() for _ in range(num_layers)
        ]  # caches of the encoder's output

    @property
    def length(self) -> int:
        """Number of cached target tokens."""
        return self.own[0].length

    def select(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Keep these rows of hypotheses and, if given, these sentences of the memory."""
        for cache in self.own:
            cache.select(rows)
        if sentences is not None:
            for cache in self.memory:
                cache.select(sentences)


# In a traced graph the lengths are symbols, not ints.
def _with_room(entry: Tensor, length: Any, room: Any) -> Tensor:
    """Copy the first `length` tokens of an entry into a tensor of the new length."""
    if length == room == entry.shape[2]:
        return entry
    batch, heads, _, width = entry.shape
    grown = entry.new_zeros(batch, heads, room, width)
    grown[:, :, :length] = entry[:, :, :length]
    return grown
