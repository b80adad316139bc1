"""Keys and values of texts that grow side by side, each from a slot of its own on."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import cast, final

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from triptych.core.attention import AttentionCache, DecoderCache, LayerCache, PositionIds
from triptych.core.models.blocks import NewTokens

# On CPUs, sizes of products of which the bits of a row do not depend: these few keys, or a multiple of
# `EVEN_KEYS` (48 keys give other bits than 32 and 64 in bfloat16); of rows that differ in number, a multiple
# of `EVEN_ROWS`. `neighbours` compares them on the machine.
FEW_KEYS = (16, 32)
EVEN_KEYS = 64
EVEN_ROWS = 16


def even_length(keys: int) -> int:
    """The number of keys that are read, of which the last may be empty; see `EVEN_KEYS`."""
    return next((few for few in FEW_KEYS if keys <= few), -(-keys // EVEN_KEYS) * EVEN_KEYS)


def hidden_score(dtype: torch.dtype) -> float:
    """What is added to the scores of keys that a query may not see.

    It is finite, also where it is added twice: a query that sees no key still has a softmax.
    """
    return max(-1e30, torch.finfo(dtype).min / 4)


def hidden_past(lengths: Int[Tensor, " texts"], slots: int, dtype: torch.dtype) -> Tensor:
    """0 for the first slots of every text and `hidden_score` for the rest, `[texts, 1, slots]`."""
    places = torch.arange(slots, device=lengths.device)
    mask = torch.zeros(len(lengths), 1, slots, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(places >= lengths[:, None, None], hidden_score(dtype))


@final
class TextCache:
    """What is kept of a batch of texts, which may have unlike lengths, join and leave.

    A text has `width` rows, the hypotheses of a beam. Their tokens at position p take the slots from
    `p · width` on, and are never moved. Which slots belong to the history of a row is kept in a mask: when
    hypotheses change places, only the mask is rearranged, and the slots of a text are read once for all its
    rows. As many slots are read as the longest text needs, in an even number (`even_length`).

    A `fixed` cache is the same memory at every step and all of it is read, so that a GPU can replay the step.
    With no room for another token, `double` makes some, in another place.

    Logits have a column for each token, or for each of `columns`: of each text its own, the end first.
    """

    columns: Int[Tensor, "texts columns"] | None = None

    def __init__(
        self,
        num_layers: int,
        lengths: Int[Tensor, " texts"],
        width: int,
        dtype: torch.dtype,
        *,
        most: int | None = None,
        fixed: bool = False,
    ) -> None:
        """Start without entries; `lengths` are of what is read first, `most` is the number of positions."""
        self.width = width
        self.dtype = dtype
        self.most = most
        self.fixed = fixed
        self.copies = 1  # entries of the cache that a text has
        self.steps: Callable[[Tensor], Tensor] | None = None  # what takes the steps of a fixed cache
        self._num_layers = num_layers
        own = torch.full((width, width), hidden_score(dtype), dtype=dtype, device=lengths.device)
        self._own = own.fill_diagonal_(0.0)
        self._places: dict[int, Tensor] = {}
        self.memory_lengths: Int[Tensor, " texts"] | None = None
        self.memory_mask: Tensor | None = None
        self.restart(lengths)

    def restart(self, lengths: Int[Tensor, " texts"]) -> None:
        """Forget the entries, to read as many tokens of each text."""
        self.lengths, self.ids = lengths, cast(Int[Tensor, "texts longest"] | None, None)
        self._measure()
        self.layers = DecoderCache(self._num_layers, lambda: SlotCache(self))
        self.mask = hidden_past(lengths * self.width, self.slots, self.dtype).repeat(1, self.width, 1)
        self.is_reading = self.longest > 0

    def of_copies(self, copies: int) -> "TextCache":
        """The same cache, with this number of entries of each text, one for each hypothesis."""
        if copies > 1:
            self.select(torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(copies))
        self.copies = copies
        return self

    def _measure(self) -> None:
        """After lengths came or went."""
        self.longest = int(self.lengths.max())
        self.is_level = not self.fixed and bool((self.lengths == self.longest).all())
        self.room = self._room_needed()

    def _room_needed(self) -> int:
        """Positions for the longest text and a token more: as many as `seen` reads, or somewhat more."""
        even = EVEN_KEYS if self.fixed else min(EVEN_KEYS, even_length((self.longest + 1) * self.width))
        unit = even // math.gcd(even, self.width)
        return (self.longest // unit + 1) * unit

    @property
    def slots(self) -> int:
        return self.room * self.width

    @property
    def seen(self) -> int:
        return self.slots if self.fixed else even_length((self.longest + 1) * self.width)

    def set_memory(self, entries: Sequence[Sequence[Tensor]], lengths: Int[Tensor, " texts"]) -> None:
        """The keys and values that each layer reads of the memory, and how many of them each text has."""
        self.memory_lengths, self.layers.memory = lengths, [LayerCache() for _ in entries]
        for layer, of_layer in zip(self.layers.memory, entries, strict=True):
            layer.append(tuple(of_layer))
        held = self.layers.memory[0].length
        is_whole = bool((lengths == held).all())
        self.memory_mask = None if is_whole else hidden_past(lengths, held, self.dtype)[:, None]

    def next_tokens(self) -> NewTokens:
        """The position of every row's next token, and what it sees; there is room for it afterwards."""
        self.is_reading = False
        width = self.width
        if not self.fixed and self.seen > self.slots:
            self._make_room(self._room_needed())
        self._places.clear()
        if self.is_level:
            ids = self.lengths[:1]
            self.mask.narrow(2, self.longest * width, width).copy_(self._own)
        else:
            ids = self.lengths[:, None]
            texts = torch.arange(len(self.lengths), device=self.lengths.device)
            self.mask.view(len(texts), width, -1, width)[texts, :, self.lengths] = self._own
        end = self.room if self.fixed else self.longest + 1
        if self.most is not None and end > self.most:  # of texts that have ended and are still in the batch
            end = self.most
            ids = ids.clamp(max=self.most - 1)
        return NewTokens(PositionIds(ids, end, width), self.mask[:, None, :, : self.seen])

    def advance(self) -> None:
        self.lengths += 1
        self.longest += not self.fixed

    def places(self, heads: int) -> Int[Tensor, " texts_heads"]:
        """Places of the next tokens of every text and head, in a store without its first two dimensions."""
        if heads not in self._places:
            rows = torch.arange(len(self.lengths) * heads, device=self.lengths.device).view(-1, heads)
            self._places[heads] = (rows * self.room + self.lengths[:, None]).flatten()
        return self._places[heads]

    def reorder(self, parents: Int[Tensor, "texts width"]) -> None:
        """Row i goes on from the history of row `parents[i]` of its text."""
        if self.copies > 1:
            self._select(rows_of_texts(torch.arange(len(parents), device=parents.device), parents))
            return
        past = self.mask[:, :, : self.longest * self.width]
        past.copy_(past.gather(1, parents[:, :, None].expand_as(past)))

    def select(self, texts: Int[Tensor, " kept"]) -> None:
        """Keep these texts, in this order; one may be named more than once."""
        rows = torch.arange(self.copies, device=texts.device).expand(len(texts), -1)
        self._select(rows_of_texts(texts, rows))

    def _select(self, texts: Int[Tensor, " kept"]) -> None:
        self.ids = None if self.ids is None else self.ids[texts]
        self.lengths = self.lengths[texts]
        self.mask = self.mask[texts]
        self._measure()
        self.mask = _with_slots(self.mask, self.slots, hidden_score(self.dtype))
        for own in self.layers.own:
            own.select(texts)
        if self.memory_lengths is not None:
            kept = self.memory_lengths[texts]
            length = even_length(int(kept.max()))
            held = (layer.entries for layer in self.layers.memory)
            self.set_memory([[e[:, :, :length].index_select(0, texts) for e in of] for of in held], kept)

    def join(self, other: "TextCache") -> None:
        """Take in the texts of another cache, after the own ones."""
        self.lengths = torch.cat([self.lengths, other.lengths])
        self._measure()
        masks = [_with_slots(of.mask, self.slots, hidden_score(self.dtype)) for of in (self, other)]
        self.mask = torch.cat(masks)
        for own, new in zip(self.layers.own, other.layers.own, strict=True):
            cast(SlotCache, own).join(cast(SlotCache, new))
        if self.memory_lengths is not None and other.memory_lengths is not None:
            length = max(of.layers.memory[0].length for of in (self, other))
            both = zip(self.layers.memory, other.layers.memory, strict=True)
            held = [
                [
                    torch.cat([_with_slots(e, length) for e in pair])
                    for pair in zip(a.entries, b.entries, strict=True)
                ]
                for a, b in both
            ]
            self.set_memory(held, torch.cat([self.memory_lengths, other.memory_lengths]))

    def double(self) -> None:
        self._make_room(2 * self.room)
        for layer in self.layers.own:
            cast(SlotCache, layer).grow()

    def _make_room(self, room: int) -> None:
        self.room = room
        self.mask = _with_slots(self.mask, self.slots, hidden_score(self.dtype))


def rows_of_texts(texts: Int[Tensor, " texts"], rows: Int[Tensor, "texts width"]) -> Int[Tensor, " rows"]:
    """The rows of a batch that are these rows of its texts."""
    return (texts[:, None] * rows.shape[1] + rows).flatten()


@final
class SlotCache(AttentionCache):
    """Keys and values of a layer, in the slots of its `TextCache`."""

    def __init__(self, owner: TextCache) -> None:
        # In a circle they would wait for Python's collector, which does not see how large they are.
        self._owner: TextCache = weakref.proxy(owner)
        self._stores: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        return 0 if self._owner.is_reading else self._owner.longest

    @property
    def entries(self) -> tuple[Tensor, ...]:
        return self._stores

    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        owner = self._owner
        width = self._owner.width
        if owner.is_reading:
            self._stores = tuple(_with_slots(entry, owner.slots).contiguous() for entry in entries)
            return entries
        if not self._stores:
            # Hidden is not enough for slots not yet written: 0 times whatever lies there must be 0.
            self._stores = tuple(
                entry.new_zeros(*entry.shape[:2], owner.slots, entry.shape[3]) for entry in entries
            )
        self.grow()
        for store, entry in zip(self._stores, entries, strict=True):
            if owner.is_level:
                store.narrow(2, owner.longest * width, width).copy_(entry)
            else:
                rows = store.view(-1, width * store.shape[3])
                rows.index_copy_(0, owner.places(store.shape[1]), entry.reshape(-1, rows.shape[1]))
        return tuple([store.narrow(2, 0, owner.seen) for store in self._stores])

    def select(self, rows: Tensor) -> None:
        slots = self._owner.slots
        kept = (store[:, :, :slots].index_select(0, rows) for store in self._stores)
        self._stores = tuple(_with_slots(store, slots) for store in kept)

    def join(self, other: "SlotCache") -> None:
        pairs = zip(self._stores, other._stores, strict=True)
        slots = self._owner.slots
        self._stores = tuple(torch.cat([_with_slots(store, slots) for store in pair]) for pair in pairs)

    def grow(self) -> None:
        """As many slots as the owner has, in another place if they are more."""
        self._stores = tuple(_with_slots(store, self._owner.slots) for store in self._stores)


def _with_slots(x: Tensor, slots: int, value: float = 0.0) -> Tensor:
    """Entries `[texts, heads, slots, width]` or a mask `[texts, rows, slots]` with this number of slots."""
    missing = slots - x.shape[2]
    return F.pad(x, (0, 0, 0, missing) if x.ndim == 4 else (0, missing), value=value) if missing else x
