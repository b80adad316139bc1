"""Decoding step by step: a model made ready, and what is kept of the hypotheses of a batch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.attention import AttentionCache, DecoderCache, LayerCache, PositionIds
from triptych.decoding.fused import FusedAttention, call_directly, even_length, fused, hidden_score
from triptych.decoding.maps import Maps, Precision, has_room_for_another, unsupported_precision
from triptych.models import EncoderDecoder
from triptych.models.blocks import Block, NewTokens

# The vocabulary is looked through in groups of so many tokens: first the best of each group, then
# only the groups that can hold one of the best.
GROUP = 64
# Tokens that a cache has room for at first.
_FIRST_ROOM = 16


@runtime_checkable
class Kept(Protocol):
    """What an engine keeps of the hypotheses of a batch."""

    def reorder(self, parents: Int[Tensor, "batch beam_size"]) -> None:
        """Row i goes on from the history of row `parents[i]` of its sentence."""

    def select(self, sentences: Tensor) -> None:
        """Keep these sentences only."""


class DecodingEngine(ABC):
    """A model that is decoded step by step."""

    device: torch.device  # where it runs
    pad_id: int  # the token that is read nowhere
    # longest target that the model has positions for; None if there is no limit
    max_target_tokens: int | None

    @abstractmethod
    def start(self, src: Int[Tensor, "batch src_len"], beam_size: int, fixed: bool = False) -> Kept:
        """Read sentences: what decoding them needs, with room for `beam_size` hypotheses of each."""

    @abstractmethod
    def step(self, tokens: Int[Tensor, " rows"], cache: Any) -> Float[Tensor, "rows vocab"]:
        """Logits of the token after each of `tokens`, one a row, in whole groups of `GROUP` columns."""

    def columns(self, cache: Any) -> Int[Tensor, "batch columns"] | None:
        """The token of each column of a sentence's logits, the end first; None if column i is token i."""
        return None


@final
class Engine(DecodingEngine):
    """A model as decoding wants it: `fused`, its tables scaled, its output layer filled up."""

    @torch.no_grad()
    def __init__(
        self,
        model: EncoderDecoder,
        precision: Precision = "fp32",
        never: Sequence[int] = (),
        direct: bool = True,
    ) -> None:
        """Prepare a model."""
        table = model.tgt_embedding.weight
        self.device = table.device
        if reason := unsupported_precision(precision, self.device):
            raise ValueError(reason)
        self.precision, self.pad_id, self.max_target_tokens = precision, model.pad_id, model.max_target_tokens
        # A traced model keeps maps that every runtime knows.
        maps = Maps.of(precision, table.dtype, packed=direct and has_room_for_another(model))
        self.dtype = maps.dtype
        self.model = cast(EncoderDecoder, fused(model, maps))
        self._fill_up(model, maps, never)
        cross = [cast(FusedAttention, cast(Block, block).cross_attention) for block in self.model.decoder]
        weights, biases = zip(*(layer.memory_rows for layer in cross), strict=True)
        self.memory_map = maps.linear(torch.cat(weights), torch.cat(biases))
        self._memory_shapes = [(layer.groups, layer.width) for layer in cross]
        for layer in cross:
            del layer.memory_rows
        if direct:
            call_directly(self.model)

    def _fill_up(self, model: EncoderDecoder, maps: Maps, never: Sequence[int]) -> None:
        """The tables scaled, and the vocabulary in whole groups, tokens that are never wanted at −inf."""
        architecture, scale = model.architecture, model.architecture.target.scale

        def scaled(table: nn.Embedding, missing: int) -> nn.Embedding:
            rows = F.pad(table.weight.detach() * scale, (0, 0, 0, missing)).to(maps.dtype)
            return nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows, _freeze=True)

        missing = -model.tgt_vocab_size % GROUP
        self.vocab_size, self.vocab = model.tgt_vocab_size, model.tgt_vocab_size + missing
        own = self.model
        own.architecture = replace(
            architecture,
            source=replace(architecture.source, scale=1.0),
            target=replace(architecture.target, scale=1.0),
        )
        own.tgt_embedding = scaled(model.tgt_embedding, missing)
        shared = model.src_embedding is model.tgt_embedding
        own.src_embedding = own.tgt_embedding if shared else scaled(model.src_embedding, 0)
        weight = model.output.weight.detach()
        given = weight.new_zeros(len(weight)) if model.output.bias is None else model.output.bias.detach()
        bias = F.pad(given, (0, missing), value=-math.inf)
        bias[list(never)] = -math.inf
        own.output = maps.linear(F.pad(weight, (0, 0, 0, missing)), bias)  # type: ignore[assignment]

    def start(self, src: Int[Tensor, "batch src_len"], beam_size: int, fixed: bool = False) -> "BeamCache":
        """Read sentences: what decoding them needs, with room for `beam_size` hypotheses of each."""
        missing = even_length(src.shape[1]) - src.shape[1]
        real = F.pad(src != self.pad_id, (0, missing))
        mask = None
        if not bool(real.all()):
            mask = torch.zeros(len(src), 1, 1, real.shape[1], dtype=self.dtype, device=self.device)
            mask.masked_fill_(~real[:, None, None, :], hidden_score(self.dtype))
        cache = (FixedBeamCache if fixed else GrowingBeamCache)(self, len(src), beam_size, mask)
        for own, entries in zip(cache.layers.memory, self.read(self.model.encode(src)), strict=True):
            own.append((F.pad(entries[0], (0, 0, 0, missing)), F.pad(entries[1], (0, 0, 0, missing))))
        return cache

    def read(
        self, memory: Float[Tensor, "batch src_len d_model"]
    ) -> list[
        tuple[Float[Tensor, "batch groups src_len width"], Float[Tensor, "batch groups src_len width"]]
    ]:
        """The keys and values that each layer of the decoder reads of the encoder's output."""
        batch, length, _ = memory.shape
        joined, found, start = self.memory_map(memory), [], 0
        for groups, width in self._memory_shapes:
            part = joined.narrow(2, start, 2 * groups * width).view(batch, length, 2, groups, width)
            keys_values = part.permute(2, 0, 3, 1, 4).contiguous()
            found.append((keys_values[0], keys_values[1]))
            start += 2 * groups * width
        return found

    def step(self, tokens: Int[Tensor, " rows"], cache: "BeamCache") -> Float[Tensor, "rows vocab"]:
        """Logits of the token after each of `tokens`, one a row; the cache takes the tokens in.

        Columns past the vocabulary, and those of the tokens never wanted, are −inf.
        """
        logits = self.model.logits(self.decode(tokens, cache)).flatten(0, 1)
        return logits.float() if self.dtype == torch.bfloat16 else logits

    def decode(
        self, tokens: Int[Tensor, " rows"], cache: "BeamCache"
    ) -> Float[Tensor, "batch beam_size d_model"]:
        """What the output layer reads; the cache takes the tokens in."""
        new = tokens.view(-1, cache.beam_size)
        x = self.model.decode(new, None, cache.memory_mask, cache.layers, cache.next_tokens())
        cache.advance()
        return x


class BeamCache(ABC):
    """What is kept of a batch: the memory, and keys and values of all tokens, written once and never moved.

    The rows of a sentence are tokens of one sequence, `beam_size` at each position: at step t, row i writes
    slot `t · beam_size + i`. Which slots belong to the history of a row is kept in a mask, so that when
    hypotheses change places only the mask is rearranged, and the slots of a sentence are read once for all
    its rows.
    """

    def __init__(self, engine: Engine, batch: int, beam_size: int, memory_mask: Tensor | None) -> None:
        self.length, self.beam_size, self.memory_mask = 0, beam_size, memory_mask
        self._room = _FIRST_ROOM
        self._dtype, self._device = engine.dtype, engine.device
        self.layers = DecoderCache(len(engine.model.decoder), self._new_layer)
        self.mask = self._own_slots(batch) if beam_size > 1 else None

    @abstractmethod
    def _new_layer(self) -> AttentionCache:
        """The cache of a layer's own tokens."""

    @abstractmethod
    def next_tokens(self) -> NewTokens:
        """Where the next token of every row stands, and what it sees; there is room for it afterwards."""

    @abstractmethod
    def advance(self) -> None:
        """On to the next step."""

    def reorder(self, parents: Int[Tensor, "batch beam_size"]) -> None:
        """Row i goes on from the history of row `parents[i]` of its sentence."""
        if self.mask is None:
            return
        past = self.mask[:, :, : self.length * self.beam_size]
        past.copy_(past.gather(1, parents[:, :, None].expand_as(past)))

    def select(self, sentences: Tensor) -> None:
        """Keep these sentences only."""
        self.layers.select(sentences, sentences)
        if self.mask is not None:
            self.mask = self.mask.index_select(0, sentences)
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask.index_select(0, sentences)

    def _double(self) -> None:
        """Twice the room."""
        self._room *= 2
        if self.mask is not None:
            old = self.mask
            self.mask = self._own_slots(old.shape[0])
            self.mask[:, :, : old.shape[2]] = old

    def _own_slots(self, batch: int) -> Tensor:
        """At every step a row sees the slot that it writes itself."""
        eye = torch.eye(self.beam_size, dtype=torch.bool, device=self._device)
        own = torch.zeros(self.beam_size, self.beam_size, dtype=self._dtype, device=self._device)
        own.masked_fill_(~eye, -math.inf)
        return own.repeat(1, self._room).expand(batch, -1, -1).contiguous()


@final
class GrowingBeamCache(BeamCache):
    """A step reads the slots written so far."""

    def __init__(self, engine: Engine, batch: int, beam_size: int, memory_mask: Tensor | None) -> None:
        super().__init__(engine, batch, beam_size, memory_mask)
        self._ids = torch.arange(self._room, device=engine.device)

    def _new_layer(self) -> LayerCache:
        return LayerCache(self._room * self.beam_size)

    def next_tokens(self) -> NewTokens:
        if self.length == self._room:
            self._double()
            self._ids = torch.arange(self._room, device=self._ids.device)
        end = self.length + 1
        mask = None if self.mask is None else self.mask[:, None, :, : end * self.beam_size]
        return NewTokens(PositionIds(self._ids.narrow(0, self.length, 1), end, self.beam_size), mask)

    def advance(self) -> None:
        self.length += 1


@final
class FixedBeamCache(BeamCache):
    """A step is the same work on the same memory every time, so that a GPU can replay it.

    Where the step stands is a number on the device; all slots are read, those not yet written hidden. With no
    room for another token, `double` makes some, in another place.
    """

    def __init__(self, engine: Engine, batch: int, beam_size: int, memory_mask: Tensor | None) -> None:
        self.position = torch.zeros(1, dtype=torch.long, device=engine.device)
        self._limit = engine.max_target_tokens
        super().__init__(engine, batch, beam_size, memory_mask)

    @property
    def is_full(self) -> bool:
        """Whether the next token finds no slot."""
        return self.length == self._room

    def double(self) -> None:
        """Twice the slots."""
        self._double()
        for layer in self.layers.own:
            cast(FixedSlots, layer).grow(self._room * self.beam_size)

    def _new_layer(self) -> "FixedSlots":
        return FixedSlots(self.position, self.beam_size, self._room * self.beam_size)

    def next_tokens(self) -> NewTokens:
        slots = torch.arange(self._room * self.beam_size, device=self._device)
        mask = torch.zeros(slots.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill(slots >= (self.position + 1) * self.beam_size, -math.inf)[None, None, None]
        if self.mask is not None:
            mask = mask + self.mask[:, None]
        end = self._room if self._limit is None else min(self._room, self._limit)
        return NewTokens(PositionIds(self.position, end, self.beam_size), mask)

    def advance(self) -> None:
        self.position += 1


@final
class FixedSlots(AttentionCache):
    """Keys and values of a layer in slots that are there from the start."""

    def __init__(self, position: Tensor, beam_size: int, room: int) -> None:
        self._position, self._room = position, room
        self._of_beam = torch.arange(beam_size, device=position.device)
        self._stores: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        return self._room

    @property
    def entries(self) -> tuple[Tensor, ...]:
        return self._stores

    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._stores:
            # Hidden is not enough for slots not yet written: 0 times whatever lies there must be 0.
            self._stores = tuple(
                entry.new_zeros(*entry.shape[:2], self._room, entry.shape[3]) for entry in entries
            )
        places = self._position * len(self._of_beam) + self._of_beam
        for store, entry in zip(self._stores, entries, strict=True):
            store.index_copy_(2, places, entry)
        return self._stores

    def select(self, rows: Tensor) -> None:
        self._stores = tuple(store.index_select(0, rows) for store in self._stores)

    def grow(self, room: int) -> None:
        """More slots, in another place."""
        added = room - self._room
        self._room, self._stores = room, tuple(F.pad(store, (0, 0, 0, added)) for store in self._stores)


# Runs before a recording, in which libraries set themselves up.
_WARM_UPS = 2


@final
class FixedSteps:
    """The steps of one batch."""

    def __init__(self, engine: Engine, cache: FixedBeamCache) -> None:
        self.cache = cache
        self._engine = engine
        self._tokens: Tensor | None = None
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """As `Engine.step`; the logits are overwritten by the next call."""
        cache = self.cache
        if cache.is_full:
            cache.double()
            self._graph = None
        if self._tokens is None:
            self._tokens = tokens.clone()
        else:
            self._tokens.copy_(tokens)
        if self._engine.device.type != "cuda":
            self._run()
        else:
            if self._graph is None:
                self._record()
            cast(torch.cuda.CUDAGraph, self._graph).replay()
        cache.length += 1
        return cast(Tensor, self._logits)

    def _run(self) -> None:
        self._logits = self._engine.step(cast(Tensor, self._tokens), self.cache)

    def _record(self) -> None:
        """Record a step; it is not taken by that."""
        before = self.cache.position.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._run()  # writes the slot that the step itself will write again
                self.cache.position.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()
