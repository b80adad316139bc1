"""A model made ready for decoding: fused maps, preallocated caches, a step of a few tensor operations.

The modules of `models` serve training, inspection and rewriting; run token by token they spend their
time between the operations. The engine takes their numbers once, multiplies every parameterisation
out to one map each for queries, keys, values and output (`AttentionWeights.multiplied`), and then
calls torch directly. `search` with `SearchOptions(engine=False)` is the slow reference.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triptych import thresholds
from triptych.algebra.weights import AttentionWeights, Link
from triptych.attention import LearnedPositions, MultiHeadAttention
from triptych.models import EncoderDecoder
from triptych.models.blocks import DecoderBlock, EncoderBlock, FeedForward, Residual

Precision = Literal["fp32", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")

# The vocabulary is looked through in groups of so many tokens: first the best of each group, then
# only the groups that can hold one of the best.
GROUP = 64
# Tokens that a cache has room for at first.
_FIRST_ROOM = 16

_Map = Callable[[Tensor], Tensor]


def unsupported(model: EncoderDecoder) -> str:
    """Why a model has no engine; "" if it has one."""
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    for stack, blocks in stacks.items():
        for block in blocks:
            positions = block.self_attention.positions  # type: ignore[union-attr]
            if positions is None:
                continue
            if not positions.turns:  # type: ignore[union-attr]
                return f"its {stack} has {positions.scheme} positions, a bias on the scores"  # type: ignore[union-attr]
            weights = block.self_attention.weights()  # type: ignore[union-attr, operator]
            if weights.multiplied("v").d_out > weights.multiplied("q").d_out:
                return f"its {stack} turns queries and keys that are narrower than the values"
    return ""


def unsupported_precision(precision: Precision, device: torch.device) -> str:
    """Why maps cannot be held in a precision on a device; "" if they can."""
    if precision != "int8":
        return ""
    if device.type != "cpu":
        return f"int8 is for CPUs, and the model is on {device}"
    engines = {"x86", "fbgemm"} & set(torch.backends.quantized.supported_engines)
    if not engines or not hasattr(torch, "quantize_per_channel"):
        return "this build of torch has no int8 products for this CPU"
    return ""


@final
class Engine:
    """The numbers of a model in the form in which a decoding step wants them.

    It shares memory with the model where it can: after the model changes, make another.

    Attributes:
        precision: of the maps: "fp32"; "bf16", activations too; or "int8": weights with a scale per
            output channel, activations with a scale found anew at every product, sums exact. The
            model's own float64 stays float64.
        vocab: number of columns of the logits: the target vocabulary, filled up to whole groups.
    """

    def __init__(
        self, model: EncoderDecoder, precision: Precision = "fp32", never: Sequence[int] = ()
    ) -> None:
        """Prepare a model.

        Args:
            model: left as it is.
            precision: of the maps.
            never: tokens whose logits are to be −inf.

        Raises:
            ValueError: `unsupported` or `unsupported_precision` has a reason.
        """
        table = model.tgt_embedding.weight
        self.device = table.device
        if reason := unsupported(model) or unsupported_precision(precision, self.device):
            raise ValueError(reason)
        self.precision = precision
        self.pad_id = model.pad_id
        self.dtype = torch.bfloat16 if precision == "bf16" else table.dtype
        self._scale = math.sqrt(model.config.d_model)
        self._src_positions, self._tgt_positions = model.src_positions, model.tgt_positions
        self._width = model.config.d_model
        with torch.no_grad():
            self._tgt_table = _grouped_rows(table.detach() * self._scale).to(self.dtype)
            self._src_table = (
                self._tgt_table
                if model.src_embedding is model.tgt_embedding
                else (model.src_embedding.weight.detach() * self._scale).to(self.dtype)
            )
            self._encoder = [_EncoderLayer(cast(EncoderBlock, block), self) for block in model.encoder]
            self._decoder = [_DecoderLayer(cast(DecoderBlock, block), self) for block in model.decoder]
            self._encoder_norm = self.norm(model.encoder_norm)
            self._decoder_norm = self.norm(model.decoder_norm)
            self._memory_map = self.map(
                torch.cat([layer.memory_weight for layer in self._decoder]),
                torch.cat([layer.memory_bias for layer in self._decoder]),
            )
            output = model.output
            bias = table.new_zeros(model.tgt_vocab_size) if output.bias is None else output.bias.detach()
            rows = _grouped_rows(output.weight.detach())
            self.vocab = rows.shape[0]
            bias = F.pad(bias, (0, self.vocab - bias.shape[0]), value=-math.inf)
            bias[list(never)] = -math.inf
            self._logits = self.map(rows, bias)

    def map(self, weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None) -> _Map:
        """The affine map of rows `[rows, d_in]`, in the engine's precision."""
        if self.precision == "int8":
            return _int8_map(weight, bias)
        own_weight = weight.to(self.dtype).contiguous()
        own_bias = None if bias is None else bias.to(self.dtype)
        return lambda x: F.linear(x, own_weight, own_bias)

    def relu_map(self, weight: Tensor, bias: Tensor | None) -> _Map:
        """`map`, then max(0, ·), in one operation of int8."""
        return _int8_map(weight, bias, torch.ops.quantized.linear_relu_dynamic)

    def norm(self, norm: nn.Module) -> _Map | None:
        """The norm of rows; None for an `Identity`."""
        if not isinstance(norm, nn.LayerNorm):
            return None
        gain, shift = norm.weight.detach().to(self.dtype), norm.bias.detach().to(self.dtype)
        shape, eps = norm.normalized_shape, norm.eps
        return lambda x: F.layer_norm(x, shape, gain, shift, eps)

    def encode(self, src: Int[Tensor, "batch src_len"]) -> "Memory":
        """What the decoder reads of these sentences: keys and values of every layer, made once."""
        batch, length = src.shape
        x = self._embed(self._src_table, src.flatten(), self._src_positions, length, 0)
        real = src != self.pad_id
        mask = None
        if not bool(real.all()):
            mask = torch.zeros(batch, 1, 1, length, dtype=self.dtype, device=self.device)
            mask.masked_fill_(~real[:, None, None, :], -math.inf)
        for layer in self._encoder:
            x = layer(x, batch, mask)
        if self._encoder_norm is not None:
            x = self._encoder_norm(x)
        keys_values = self._memory_map(x)
        own, start = [], 0
        for reader in self._decoder:
            width = reader.memory_weight.shape[0]
            part = keys_values[:, start : start + width].reshape(batch, length, 2, reader.cross.groups, -1)
            own.append(part.permute(2, 0, 3, 1, 4).contiguous())
            start += width
        return Memory(own, mask)

    def step(
        self, tokens: Int[Tensor, " rows"], memory: "Memory", cache: "EngineCache"
    ) -> Float[Tensor, "rows vocab"]:
        """Logits of the token after each of `tokens`, one a row; the cache takes the tokens in.

        Columns past the vocabulary, and those of the tokens never wanted, are −inf.
        """
        cache.make_room()
        x = cache.placed(F.embedding(tokens, self._tgt_table), self._tgt_positions)
        for i, layer in enumerate(self._decoder):
            x = layer(x, memory.keys_values[i], memory.mask, cache, cache.stores[i])
        cache.advance()
        if self._decoder_norm is not None:
            x = self._decoder_norm(x)
        logits = self._logits(x)
        return logits.float() if self.dtype == torch.bfloat16 else logits

    def new_cache(self, batch: int, beam_size: int) -> "EngineCache":
        """An empty cache for `batch` sentences with `beam_size` rows each."""
        return EngineCache(self, batch, beam_size)

    @property
    def cache_shapes(self) -> list[tuple[int, int]]:
        """Of each decoder layer, groups and width of what a cache holds a token."""
        return [layer.own.shape for layer in self._decoder]

    @property
    def rotates(self) -> bool:
        """Whether the decoder turns its queries and keys."""
        return any(layer.own.attention.positions is not None for layer in self._decoder)

    def _embed(self, table: Tensor, ids: Tensor, positions: nn.Module, length: int, start: int) -> Tensor:
        found = F.embedding(ids, table)
        placed = positions(found.view(-1, length, self._width), start)
        return placed.view(-1, self._width)  # type: ignore[no-any-return]


class Memory(NamedTuple):
    """What the decoder reads of a batch of sentences.

    Attributes:
        keys_values: of each decoder layer, `[2, batch, groups, src_len, width]`.
        mask: 0 where there is a token and −inf where there is padding, `[batch, 1, 1, src_len]`;
            None without padding.
    """

    keys_values: list[Tensor]
    mask: Tensor | None

    def select(self, sentences: Tensor) -> "Memory":
        """Only these sentences."""
        mask = None if self.mask is None else self.mask.index_select(0, sentences)
        return Memory([entry.index_select(1, sentences) for entry in self.keys_values], mask)


class EngineCache:
    """Keys and values of all tokens decoded so far, written once and never moved.

    The rows of a sentence share its slots: at step t, row i writes slot `t · beam_size + i`. Which
    slots belong to the history of a row is kept in a mask, so that when hypotheses change places only
    the mask is rearranged, and the slots of a sentence are read once for all its rows.

    Attributes:
        length: tokens held a row.
        stores: of each layer, `[2, batch, groups, slots, width]`.
    """

    _allocate: ClassVar[Callable[..., Tensor]] = staticmethod(torch.empty)

    def __init__(self, engine: Engine, batch: int, beam_size: int) -> None:
        self.length = 0
        self.beam_size = beam_size
        self._room = _FIRST_ROOM
        slots, dtype, device = self._room * beam_size, engine.dtype, engine.device
        self.stores = [
            self._allocate(2, batch, groups, slots, width, dtype=dtype, device=device)
            for groups, width in engine.cache_shapes
        ]
        self.mask = self._own_slots(batch, self._room, dtype, device) if beam_size > 1 else None

    def placed(self, x: Float[Tensor, "rows d_model"], positions: nn.Module) -> Tensor:
        """Embeddings of this step's tokens with what tells their position."""
        return positions(x[:, None], self.length)[:, 0]  # type: ignore[no-any-return]

    def advance(self) -> None:
        """On to the next step."""
        self.length += 1

    def write(self, store: Tensor, entries: Float[Tensor, "rows two groups width"]) -> Tensor:
        """Put the keys and values of this step into their slots; returns all up to them."""
        first = self.length * self.beam_size
        end = first + self.beam_size
        batch = store.shape[1]
        store[:, :, :, first:end] = entries.view(batch, self.beam_size, *entries.shape[1:]).permute(
            2, 0, 3, 1, 4
        )
        return store[:, :, :, :end]

    def visible(self, rows_per_group: int) -> Tensor | None:
        """The mask of this step's queries, `[batch, 1, rows_per_group · beam_size, slots]`."""
        if self.mask is None:
            return None
        mask = self.mask[:, None, :, : (self.length + 1) * self.beam_size]
        return mask if rows_per_group == 1 else mask.repeat(1, 1, rows_per_group, 1)

    def reorder(self, parents: Int[Tensor, "batch beam_size"]) -> None:
        """Row i goes on from the history of row `parents[i]` of its sentence."""
        if self.mask is None:
            return
        past = self.mask[:, :, : self.length * self.beam_size]
        past.copy_(past.gather(1, parents[:, :, None].expand_as(past)))

    def select(self, sentences: Tensor) -> None:
        """Keep these sentences only."""
        used = self.length * self.beam_size
        for i, store in enumerate(self.stores):
            kept = store.new_empty(2, len(sentences), *store.shape[2:])
            kept[:, :, :, :used] = store[:, sentences, :, :used]
            self.stores[i] = kept
        if self.mask is not None:
            self.mask = self.mask.index_select(0, sentences)

    def make_room(self) -> None:
        """Double the slots when the next token finds none."""
        if self.length < self._room:
            return
        self._room *= 2
        for i, store in enumerate(self.stores):
            slots = 2 * store.shape[3]
            grown = self._allocate(
                *store.shape[:3], slots, store.shape[4], dtype=store.dtype, device=store.device
            )
            grown[:, :, :, : store.shape[3]] = store
            self.stores[i] = grown
        if self.mask is not None:
            old = self.mask
            self.mask = self._own_slots(old.shape[0], self._room, old.dtype, old.device)
            self.mask[:, :, : old.shape[2]] = old

    def _own_slots(self, batch: int, room: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """At every step a row sees the slot that it writes itself."""
        eye = torch.eye(self.beam_size, dtype=torch.bool, device=device)
        own = torch.zeros(self.beam_size, self.beam_size, dtype=dtype, device=device)
        own.masked_fill_(~eye, -math.inf)
        return own.repeat(1, room).expand(batch, -1, -1).contiguous()


@final
class FixedCache(EngineCache):
    """A cache whose step is the same work on the same memory every time, so that a GPU can replay it.

    Where the step stands is a number on the device; all slots are read, those not yet written hidden.
    """

    # Hidden is not enough: 0 times whatever lies there must be 0.
    _allocate: ClassVar[Callable[..., Tensor]] = staticmethod(torch.zeros)

    def __init__(self, engine: Engine, batch: int, beam_size: int) -> None:
        super().__init__(engine, batch, beam_size)
        self.position = torch.zeros(1, dtype=torch.long, device=engine.device)
        self._places: Tensor | None = None

    @property
    def is_full(self) -> bool:
        """Whether the next token finds no slot."""
        return self.length == self._room

    def make_room(self) -> None:
        """Double the slots when the next token finds none."""
        if self.is_full:
            self._places = None
        super().make_room()

    def placed(self, x: Float[Tensor, "rows d_model"], positions: nn.Module) -> Tensor:
        """Embeddings of this step's tokens with what tells their position."""
        if self._places is None:
            most = self._room
            if isinstance(positions, LearnedPositions):
                most = min(most, len(positions.weight))
            self._places = positions(x.new_zeros(1, most, x.shape[-1]), 0)[0]
        return x + self._places.index_select(0, self.position)

    def advance(self) -> None:
        """On to the next step, on the device."""
        self.position += 1

    def write(self, store: Tensor, entries: Float[Tensor, "rows two groups width"]) -> Tensor:
        """Put the keys and values of this step into their slots; returns all slots."""
        of_beam = torch.arange(self.beam_size, device=store.device)
        parts = entries.view(store.shape[1], self.beam_size, *entries.shape[1:]).permute(2, 0, 3, 1, 4)
        store.index_copy_(3, self.position * self.beam_size + of_beam, parts)
        return store

    def visible(self, rows_per_group: int) -> Tensor:
        """The mask of this step's queries over all slots, `[batch or 1, 1, rows, slots]`."""
        store = self.stores[0]
        slots = torch.arange(store.shape[3], device=store.device)
        mask = torch.zeros(store.shape[3], dtype=store.dtype, device=store.device)
        mask = mask.masked_fill(slots >= (self.position + 1) * self.beam_size, -math.inf)[None, None, None]
        if self.mask is not None:
            mask = mask + self.mask[:, None]
        return mask.repeat(1, 1, rows_per_group, 1) if rows_per_group > 1 else mask


@final
class _Attention:
    """One attention layer multiplied out: a map in, the operation, a map out.

    Keys and values come in `groups` heads; each serves `rows` query heads, whose queries lie below
    each other. Keys and values have one width: the narrower is filled up with zeros.
    """

    def __init__(self, layer: MultiHeadAttention, engine: Engine) -> None:
        weights = layer.weights()
        self.positions = layer.positions
        self.heads = weights.num_heads
        self.groups = math.lcm(weights.num_key_heads, weights.num_value_heads)
        self.rows = self.heads // self.groups
        q, k, v = (weights.multiplied(side) for side in ("q", "k", "v"))
        self.width = max(q.d_out, v.d_out)
        scaled = Link(q.weight * weights.scale, None if q.bias is None else q.bias * weights.scale)
        self.q_weight, self.q_bias = _stacked_rows(scaled.of_heads(self.heads), self.width)
        k_weight, k_bias = _stacked_rows(k.of_heads(self.groups), self.width)
        v_weight, v_bias = _stacked_rows(v.of_heads(self.groups), self.width)
        self.kv_weight, self.kv_bias = torch.cat([k_weight, v_weight]), torch.cat([k_bias, v_bias])
        self.out = engine.map(*_output_rows(weights, self.width))

    def turned(self, heads: Float[Tensor, "rows heads width"], start: int) -> Tensor:
        """The queries or keys of one token each, with the rotation of position `start`."""
        if self.positions is None:
            return heads
        return self.positions.turn(heads[:, :, None], start)[:, :, 0]

    def attend(
        self, q: Float[Tensor, "batch queries heads width"], keys_values: Tensor, mask: Tensor | None
    ) -> Float[Tensor, "rows d_model"]:
        """Attend and mix the heads."""
        batch, queries, _, _ = q.shape
        grouped = q.view(batch, queries, self.groups, self.rows, self.width)
        grouped = grouped.permute(0, 2, 3, 1, 4).reshape(batch, self.groups, -1, self.width)
        mixed = self._mixed(grouped, keys_values[0], keys_values[1], mask)
        mixed = mixed.view(batch, self.groups, self.rows, queries, self.width).permute(0, 3, 1, 2, 4)
        return self.out(mixed.reshape(batch * queries, -1))

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if not q.is_cpu or q.shape[2] > thresholds.FEW_QUERIES:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        if q.dtype == torch.bfloat16:
            k = k.contiguous()  # a product would copy a part of a cache itself, at a third of the speed
        scores = q @ k.mT
        if mask is not None:
            scores += mask
        return scores.softmax(dim=-1) @ v


@final
class _Frame:
    """A residual sub-layer's norm, before or after."""

    def __init__(self, residual: Residual, engine: Engine) -> None:
        self.norm = engine.norm(residual.norm)
        self.pre = residual.pre

    def enter(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.pre and self.norm is not None else x

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        total = x + change
        return total if self.pre or self.norm is None else self.norm(total)


@final
class _FeedForward:
    def __init__(self, feed_forward: FeedForward, engine: Engine) -> None:
        inner, outer = feed_forward.inner, feed_forward.outer
        fused = engine.precision == "int8" and feed_forward.activation is torch.relu
        inner_map = engine.relu_map if fused else engine.map
        self.inner = inner_map(inner.weight.detach(), inner.bias.detach())
        self.outer = engine.map(outer.weight.detach(), outer.bias.detach())
        self.activation = None if fused else feed_forward.activation

    def __call__(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.outer(x if self.activation is None else self.activation(x))


@final
class _EncoderLayer:
    def __init__(self, block: EncoderBlock, engine: Engine) -> None:
        self.own = _OwnAttention(block.self_attention, engine)
        self.own_frame = _Frame(block.self_residual, engine)
        self.feed_forward = _FeedForward(block.feed_forward, engine)
        self.feed_forward_frame = _Frame(block.feed_forward_residual, engine)

    def __call__(self, x: Tensor, batch: int, mask: Tensor | None) -> Tensor:
        x = self.own_frame.leave(x, self.own.of_sequences(self.own_frame.enter(x), batch, mask))
        return self.feed_forward_frame.leave(x, self.feed_forward(self.feed_forward_frame.enter(x)))


@final
class _OwnAttention:
    """Self-attention: queries, keys and values in one product."""

    def __init__(self, layer: MultiHeadAttention, engine: Engine) -> None:
        self.attention = inner = _Attention(layer, engine)
        self.inward = engine.map(
            torch.cat([inner.q_weight, inner.kv_weight]), torch.cat([inner.q_bias, inner.kv_bias])
        )
        self.split = inner.heads * inner.width
        self.shape = inner.groups, inner.width

    def of_sequences(self, x: Tensor, batch: int, mask: Tensor | None) -> Tensor:
        """Attention within whole sequences, `[batch · length, d_model]`."""
        inner = self.attention
        joined = self.inward(x).view(batch, -1, self.split + 2 * inner.groups * inner.width)
        length = joined.shape[1]
        q = joined[..., : self.split].view(batch, length, inner.heads, inner.width)
        kv = joined[..., self.split :].view(batch, length, 2, inner.groups, inner.width)
        kv = kv.permute(2, 0, 3, 1, 4)
        if inner.positions is not None:
            q = inner.positions.turn(q.transpose(1, 2), 0).transpose(1, 2).contiguous()
            kv = torch.stack([inner.positions.turn(kv[0], 0), kv[1]])
        return inner.attend(q, kv, mask)

    def of_a_step(self, x: Tensor, cache: EngineCache, store: Tensor) -> Tensor:
        """Attention of one token a row to those before it and itself."""
        inner = self.attention
        joined = self.inward(x)
        q = joined[:, : self.split].view(-1, inner.heads, inner.width)
        kv = joined[:, self.split :].view(-1, 2, inner.groups, inner.width)
        if inner.positions is not None:
            q = inner.turned(q, cache.length)
            kv = torch.stack([inner.turned(kv[:, 0], cache.length), kv[:, 1]], dim=1)
        held = cache.write(store, kv)
        q = q.view(-1, cache.beam_size, inner.heads, inner.width)
        return inner.attend(q, held, cache.visible(inner.rows))


@final
class _DecoderLayer:
    def __init__(self, block: DecoderBlock, engine: Engine) -> None:
        self.own = _OwnAttention(block.self_attention, engine)
        self.own_frame = _Frame(block.self_residual, engine)
        self.cross = _Attention(block.cross_attention, engine)
        self.cross_frame = _Frame(block.cross_residual, engine)
        self.queries = engine.map(self.cross.q_weight, self.cross.q_bias)
        self.memory_weight, self.memory_bias = self.cross.kv_weight, self.cross.kv_bias
        self.feed_forward = _FeedForward(block.feed_forward, engine)
        self.feed_forward_frame = _Frame(block.feed_forward_residual, engine)

    def __call__(
        self, x: Tensor, memory: Tensor, mask: Tensor | None, cache: EngineCache, store: Tensor
    ) -> Tensor:
        x = self.own_frame.leave(x, self.own.of_a_step(self.own_frame.enter(x), cache, store))
        q = self.queries(self.cross_frame.enter(x))
        q = q.view(memory.shape[1], -1, self.cross.heads, self.cross.width)
        x = self.cross_frame.leave(x, self.cross.attend(q, memory, mask))
        return self.feed_forward_frame.leave(x, self.feed_forward(self.feed_forward_frame.enter(x)))


def _int8_map(
    weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor] = torch.ops.quantized.linear_dynamic
) -> _Map:
    largest = weight.float().abs().amax(dim=1).clamp_min(1e-12)
    scales = (largest / 127).double()
    zeros = torch.zeros_like(scales, dtype=torch.long)
    with warnings.catch_warnings():
        # torch means to replace these tensors; nothing else of it multiplies int8 on CPUs as fast yet.
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch.quantize_per_channel(weight.float().contiguous(), scales, zeros, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, None if bias is None else bias.float())
    # Without VNNI the products of CPUs add pairs in 16 bits, which overflow at full range.
    narrow = not getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
    return lambda x: product(x, packed, narrow)


def _grouped_rows(table: Tensor) -> Tensor:
    """The rows of a table, filled up with zeros to a multiple of `GROUP`."""
    return F.pad(table, (0, 0, 0, -table.shape[0] % GROUP))


def _stacked_rows(link: Link, width: int) -> tuple[Tensor, Tensor]:
    """A link's copies below each other, `[copies · width, d_in]`, each filled up to `width`; and the bias."""
    missing = width - link.d_out
    weight = F.pad(link.weight.mT, (0, 0, 0, missing)).flatten(0, 1)
    bias = link.weight.new_zeros(link.copies, link.d_out) if link.bias is None else link.bias
    return weight, F.pad(bias, (0, missing)).flatten()


def _output_rows(weights: AttentionWeights, width: int) -> tuple[Tensor, Tensor | None]:
    """The output map as `[d_model, heads · width]`, and its bias."""
    per_head = weights.W_O
    filled = F.pad(per_head, (0, 0, 0, width - per_head.shape[1]))
    return filled.flatten(0, 1).mT, weights.o_bias
