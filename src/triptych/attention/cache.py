"""What a layer remembers of the tokens already decoded.

A parameterisation decides *what* is kept (`Projections.remember`); the cache only stores it: a
tuple of tensors whose dimension 2 runs over tokens.
"""

from typing import final

from torch import Tensor


@final
class LayerCache:
    """The remembered entries of one attention layer, growing token by token.

    Room is doubled when it runs out, so that appending a token costs O(1) copies of it.
    """

    def __init__(self) -> None:
        self._stores: tuple[Tensor, ...] = ()
        self._length = 0

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self._length

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """What is held, each `[batch, heads, length, width]`."""
        return tuple(store[:, :, : self._length] for store in self._stores)

    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add the entries of new tokens and return all that are held."""
        added = entries[0].shape[2]
        if not self._stores:
            self._stores = entries
        else:
            if self._length + added > self._stores[0].shape[2]:
                self._stores = tuple(_with_room(store, self._length, added) for store in self._stores)
            for store, entry in zip(self._stores, entries, strict=True):
                store[:, :, self._length : self._length + added] = entry
        self._length += added
        return self.entries

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order; a row may be named more than once."""
        self._stores = tuple(store.index_select(0, rows) for store in self._stores)


@final
class DecoderCache:
    """The caches of a whole decoder: its own tokens, and what each layer reads of the memory."""

    def __init__(self, num_layers: int) -> None:
        self.own = [LayerCache() for _ in range(num_layers)]
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


def _with_room(store: Tensor, length: int, added: int) -> Tensor:
    capacity = max(2 * length, length + added, 16)
    grown = store.new_empty(*store.shape[:2], capacity, store.shape[3])
    grown[:, :, :length] = store[:, :, :length]
    return grown
