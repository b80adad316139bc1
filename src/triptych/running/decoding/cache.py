"""Key-value cache of a batch of texts that grow from different lengths."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import cast, final

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from triptych.core.attention import (
    AttentionCache,
    DecoderCache,
    LayerCache,
    PositionIds,
)
from triptych.core.models import NewTokens

# Shapes of products on CPUs for which a row has the same bits whatever the other rows: `FEW_KEYS` keys or a
# multiple of `EVEN_KEYS` (48 keys give different bits from 32 and 64 in bfloat16), and, where the number of
# rows varies, a multiple of `EVEN_ROWS`. `neighbours` checks these sizes on the machine.
FEW_KEYS = (16, 32)
EVEN_KEYS = 64
EVEN_ROWS = 16


def even_length(keys: int) -> int:
    """Round a number of keys up to a size with reproducible bits (see `EVEN_KEYS`)."""
    return next(
        (few for few in FEW_KEYS if keys <= few), -(-keys // EVEN_KEYS) * EVEN_KEYS
    )


def hidden_score(dtype: torch.dtype) -> float:
    """Return the additive mask value of hidden keys.

    The value stays finite even if it is added twice, so that a query without visible keys has a softmax.
    """
    return max(-1e30, torch.finfo(dtype).min / 4)


def hidden_past(
    lengths: Int[Tensor, " texts"], slots: int, dtype: torch.dtype
) -> Tensor:
    """Build an additive mask `[texts, 1, slots]`: `hidden_score` from the length of a text on, 0 before."""
    places = torch.arange(slots, device=lengths.device)
    mask = torch.zeros(len(lengths), 1, slots, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(places >= lengths[:, None, None], hidden_score(dtype))


@final
class TextCache:
    """Key-value cache of a batch of texts, which may differ in length, join and leave.

    A text has `width` rows, the hypotheses of a beam. Their tokens at position p are stored in slots
    `p · width` to `(p + 1) · width − 1` and never move. A mask marks the slots that belong to the history of
    a row: reordering hypotheses permutes only the mask, and all rows of a text attend to the same slots.
    A step reads the slots up to the longest text, rounded up by `even_length`.

    A `fixed` cache keeps its memory, and every step reads all slots, so that a GPU can replay a recorded
    step. When it is full, `double` allocates a cache twice as large.

    Logits have a column for each token of the vocabulary, or for the tokens in `columns`, which differ
    between texts; the first of them is the end of sentence.
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
        """Start empty; `lengths` are the prompts' lengths, `most` is the model's number of positions."""
        self.width = width
        self.dtype = dtype
        self.most = most
        self.fixed = fixed
        self.copies = 1  # entries of the cache for each text
        self.steps: Callable[[Tensor], Tensor] | None = (
            None  # computes the steps of a fixed cache
        )
        self._num_layers = num_layers
        own = torch.full(
            (width, width), hidden_score(dtype), dtype=dtype, device=lengths.device
        )
        self._own = own.fill_diagonal_(0.0)
        self._places: dict[int, Tensor] = {}
        self.memory_lengths: Int[Tensor, " texts"] | None = None
        self.memory_mask: Tensor | None = None
        self.restart(lengths)

    def restart(self, lengths: Int[Tensor, " texts"]) -> None:
        """Clear the cache before texts of these lengths are read."""
        self.lengths, self.ids = (
            lengths,
            cast(Int[Tensor, "texts longest"] | None, None),
        )
        self._measure()
        self.layers = DecoderCache(self._num_layers, lambda: SlotCache(self))
        self.mask = hidden_past(lengths * self.width, self.slots, self.dtype).repeat(
            1, self.width, 1
        )
        self.is_reading = self.longest > 0

    def of_copies(self, copies: int) -> "TextCache":
        """Repeat each text's entry, once for each hypothesis; return this cache."""
        if copies > 1:
            self.select(
                torch.arange(
                    len(self.lengths), device=self.lengths.device
                ).repeat_interleave(copies)
            )
        self.copies = copies
        return self

    def _measure(self) -> None:
        """Recompute sizes derived from `lengths`."""
        self.longest = int(self.lengths.max())
        self.is_level = not self.fixed and bool((self.lengths == self.longest).all())
        self.room = self._room_needed()

    def _room_needed(self) -> int:
        """Return positions for the longest text and one more token, rounded up so that `slots` ≥ `seen`."""
        even = (
            EVEN_KEYS
            if self.fixed
            else min(EVEN_KEYS, even_length((self.longest + 1) * self.width))
        )
        unit = even // math.gcd(even, self.width)
        return (self.longest // unit + 1) * unit

    @property
    def slots(self) -> int:
        return self.room * self.width

    @property
    def seen(self) -> int:
        return (
            self.slots if self.fixed else even_length((self.longest + 1) * self.width)
        )

    def set_memory(
        self, entries: Sequence[Sequence[Tensor]], lengths: Int[Tensor, " texts"]
    ) -> None:
        """Set keys and values of the memory for each layer, and the memory length of each text."""
        self.memory_lengths, self.layers.memory = (
            lengths,
            [LayerCache() for _ in entries],
        )
        for layer, of_layer in zip(self.layers.memory, entries, strict=True):
            layer.append(tuple(of_layer))
        held = self.layers.memory[0].length
        is_whole = bool((lengths == held).all())
        self.memory_mask = (
            None if is_whole else hidden_past(lengths, held, self.dtype)[:, None]
        )

    def next_tokens(self) -> NewTokens:
        """Return positions and mask of the next token of every row; allocate its slots."""
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
            self.mask.view(len(texts), width, -1, width)[texts, :, self.lengths] = (
                self._own
            )
        end = self.room if self.fixed else self.longest + 1
        # Finished texts stay in the batch for a while and may grow past the last position.
        if self.most is not None and end > self.most:
            end = self.most
            ids = ids.clamp(max=self.most - 1)
        return NewTokens(
            PositionIds(ids, end, width), self.mask[:, None, :, : self.seen]
        )

    def advance(self) -> None:
        self.lengths += 1
        self.longest += not self.fixed

    def places(self, heads: int) -> Int[Tensor, " texts_heads"]:
        """Return the row of the next position of each text and head in stores `[texts · heads · room, …]`."""
        if heads not in self._places:
            rows = torch.arange(
                len(self.lengths) * heads, device=self.lengths.device
            ).view(-1, heads)
            self._places[heads] = (rows * self.room + self.lengths[:, None]).flatten()
        return self._places[heads]

    def reorder(self, parents: Int[Tensor, "texts width"]) -> None:
        """Let row i of each text continue row `parents[i]` of that text."""
        if self.copies > 1:
            self._select(
                rows_of_texts(
                    torch.arange(len(parents), device=parents.device), parents
                )
            )
            return
        past = self.mask[:, :, : self.longest * self.width]
        past.copy_(past.gather(1, parents[:, :, None].expand_as(past)))

    def select(self, texts: Int[Tensor, " kept"]) -> None:
        """Keep these texts, in this order; an index may be repeated."""
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
            self.set_memory(
                [[e[:, :, :length].index_select(0, texts) for e in of] for of in held],
                kept,
            )

    def join(self, other: "TextCache") -> None:
        """Append the texts of another cache."""
        # Both caches are padded to the slots of the longer text; unused slots stay hidden.
        self.lengths = torch.cat([self.lengths, other.lengths])
        self._measure()
        masks = [
            _with_slots(of.mask, self.slots, hidden_score(self.dtype))
            for of in (self, other)
        ]
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
            self.set_memory(
                held, torch.cat([self.memory_lengths, other.memory_lengths])
            )

    def double(self) -> None:
        self._make_room(2 * self.room)
        for layer in self.layers.own:
            cast(SlotCache, layer).grow()

    def _make_room(self, room: int) -> None:
        self.room = room
        self.mask = _with_slots(self.mask, self.slots, hidden_score(self.dtype))


def rows_of_texts(
    texts: Int[Tensor, " texts"], rows: Int[Tensor, "texts width"]
) -> Int[Tensor, " rows"]:
    """Return the batch rows of the given rows of each text, for texts of `rows.shape[1]` rows."""
    return (texts[:, None] * rows.shape[1] + rows).flatten()


@final
class SlotCache(AttentionCache):
    """Keys and values of a layer, in the slots of its `TextCache`."""

    def __init__(self, owner: TextCache) -> None:
        # A strong reference would be a cycle, and Python's collector frees cycles late: it does not know
        # how large the tensors are.
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
            self._stores = tuple(
                _with_slots(entry, owner.slots).contiguous() for entry in entries
            )
            return entries
        if not self._stores:
            # A mask alone is not enough for unwritten slots: their weight 0 times NaN would be NaN.
            self._stores = tuple(
                entry.new_zeros(*entry.shape[:2], owner.slots, entry.shape[3])
                for entry in entries
            )
        self.grow()
        for store, entry in zip(self._stores, entries, strict=True):
            # Texts of equal length write one slice; otherwise each text writes at its own length.
            if owner.is_level:
                store.narrow(2, owner.longest * width, width).copy_(entry)
            else:
                rows = store.view(-1, width * store.shape[3])
                rows.index_copy_(
                    0, owner.places(store.shape[1]), entry.reshape(-1, rows.shape[1])
                )
        return tuple([store.narrow(2, 0, owner.seen) for store in self._stores])

    def select(self, rows: Tensor) -> None:
        slots = self._owner.slots
        kept = (store[:, :, :slots].index_select(0, rows) for store in self._stores)
        self._stores = tuple(_with_slots(store, slots) for store in kept)

    def join(self, other: "SlotCache") -> None:
        pairs = zip(self._stores, other._stores, strict=True)
        slots = self._owner.slots
        self._stores = tuple(
            torch.cat([_with_slots(store, slots) for store in pair]) for pair in pairs
        )

    def grow(self) -> None:
        """Grow the stores, by copying, to the owner's number of slots."""
        self._stores = tuple(
            _with_slots(store, self._owner.slots) for store in self._stores
        )


def _with_slots(x: Tensor, slots: int, value: float = 0.0) -> Tensor:
    """Pad entries `[texts, heads, slots, width]` or a mask `[texts, rows, slots]` to a number of slots."""
    missing = slots - x.shape[2]
    return (
        F.pad(x, (0, 0, 0, missing) if x.ndim == 4 else (0, missing), value=value)
        if missing
        else x
    )
