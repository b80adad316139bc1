"""A model of ours as two graphs for ONNX: the encoder, and a step of the decoder over a cache.

Every head is multiplied out, so that all parameterisations are the same graph; positions of every scheme are
in it.
"""

import math
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.algebra.positions import apply_rotary
from triptych.algebra.rewrites.legality import INPUT_SIDES
from triptych.algebra.weights import AttentionWeights, Side
from triptych.attention import MultiHeadAttention
from triptych.models import EncoderDecoder
from triptych.models.blocks import DecoderBlock, EncoderBlock, FeedForward, Residual


class Keys(NamedTuple):
    """Keys and values of every head, `[rows, num_heads, length, width]` each."""

    k: Tensor
    v: Tensor


@final
class _Attention(nn.Module):
    """Equation 1 of the paper over multiplied-out maps."""

    def __init__(self, layer: MultiHeadAttention, max_tokens: int) -> None:
        super().__init__()
        weights = layer.weights()
        if foreign := weights.semantics.beyond(("scale", "kind", "dropout", "rotary", "bias")):
            raise ValueError(f"a layer with {', '.join(foreign)} has no graph")
        self.num_heads, self.scale = weights.num_heads, weights.scale
        self.q_proj, self.k_proj, self.v_proj = (_to_heads(weights, side) for side in INPUT_SIDES)
        self.o_proj = _from_heads(weights)
        self.rotary, self.bias = layer.semantics.rotary, layer.semantics.bias
        if self.rotary is not None:
            cos, sin = self.rotary.cos_sin(max_tokens, torch.device("cpu"), torch.float32)
            self.register_buffer("cos", cos[:max_tokens])
            self.register_buffer("sin", sin[:max_tokens])

    cos: Tensor
    sin: Tensor

    def kept_sizes(self) -> list[tuple[int, int]]:
        """Heads and width of keys, and of values."""
        joined = self.k_proj.out_features, self.v_proj.out_features
        return [(self.num_heads, size // self.num_heads) for size in joined]

    def keys(self, y: Tensor, places: Tensor) -> Keys:
        """Of the tokens of a sequence, which stand at these places."""
        return Keys(self._turn(self._split(self.k_proj(y)), places), self._split(self.v_proj(y)))

    def forward(self, x: Tensor, places: Tensor, keys: Keys, allowed: Tensor) -> Tensor:
        """`[rows, length, d_model]`; `allowed` is True where a query may look."""
        q = self._turn(self._split(self.q_proj(x)), places)
        scores = q @ keys.k.transpose(2, 3) * self.scale
        if self.bias is not None:
            scores = scores + self.bias(q, keys.k, places, torch.arange(keys.k.shape[2]))
        weights = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1)
        return self.o_proj((weights @ keys.v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def _turn(self, heads: Tensor, places: Tensor) -> Tensor:
        if self.rotary is None:
            return heads
        cos, sin = F.embedding(places, self.cos), F.embedding(places, self.sin)
        return apply_rotary(heads, cos, sin, self.rotary.pairing, self.rotary.start)


@torch.no_grad()
def _to_heads(weights: AttentionWeights, side: Side) -> nn.Linear:
    """The maps of all heads below each other."""
    link = weights.to(torch.float64).multiplied(side).of_heads(weights.num_heads)
    linear = nn.Linear(weights.d_model, weights.num_heads * link.d_out, bias=link.bias is not None)
    linear.weight.copy_(link.weight.mT.flatten(0, 1))
    if link.bias is not None:
        linear.bias.copy_(link.bias.flatten())
    return linear


@torch.no_grad()
def _from_heads(weights: AttentionWeights) -> nn.Linear:
    W_O = weights.to(torch.float64).multiplied("o").of_heads(weights.num_heads).weight
    linear = nn.Linear(W_O.shape[0] * W_O.shape[1], weights.d_model, bias=weights.o_bias is not None)
    linear.weight.copy_(W_O.flatten(0, 1).mT)
    if weights.o_bias is not None:
        linear.bias.copy_(weights.o_bias)
    return linear


@final
class _Embedding(nn.Module):
    """Scaled embeddings with the positions that are added to them."""

    table: Tensor
    places: Tensor | None

    def __init__(self, table: Tensor, places: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.register_buffer("places", places)
        self.scale = math.sqrt(table.shape[1])

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """`[rows, length, d_model]`."""
        x = F.embedding(ids, self.table) * self.scale
        return x if self.places is None else x + F.embedding(places, self.places)


@final
class EncoderGraph(nn.Module):
    """From source tokens to what the decoder reads of them: keys and values of every layer, and a mask."""

    def __init__(self, model: EncoderDecoder, places: Tensor | None, max_tokens: int) -> None:
        """Multiply out.

        Args:
            model: in float32, in evaluation mode.
            places: `[max_tokens, d_model]`, what is added to the embeddings.
            max_tokens: the longest source.
        """
        super().__init__()
        self.pad_id = model.pad_id
        self.embedding = _Embedding(model.src_embedding.weight.detach(), places)
        self.blocks = nn.ModuleList()
        for block in model.encoder:
            assert isinstance(block, EncoderBlock)  # a ModuleList does not tell
            self.blocks.append(_EncoderBlock(block, max_tokens))
        self.norm = model.encoder_norm
        self.readers = nn.ModuleList()
        for block in model.decoder:
            assert isinstance(block, DecoderBlock)
            self.readers.append(_Attention(block.cross_attention, max_tokens))

    def forward(self, src_ids: Tensor) -> tuple[Tensor, ...]:
        """`[batch, src_len]` → mask `[batch, src_len]`, then keys and values of each decoder layer."""
        mask = src_ids != self.pad_id
        places = torch.arange(src_ids.shape[1])
        x = self.embedding(src_ids, places)
        for block in self.blocks:
            x = block(x, places, mask[:, None, None, :])
        memory = self.norm(x)
        states = [reader.keys(memory, places) for reader in self.readers]  # type: ignore[operator]
        return (mask, *(tensor for keys in states for tensor in keys))


@final
class _EncoderBlock(nn.Module):
    def __init__(self, block: EncoderBlock, max_tokens: int) -> None:
        super().__init__()
        self.attention = _Attention(block.self_attention, max_tokens)
        self.residual: Residual = block.self_residual
        self.feed_forward: FeedForward = block.feed_forward
        self.feed_forward_residual: Residual = block.feed_forward_residual

    def forward(self, x: Tensor, places: Tensor, allowed: Tensor) -> Tensor:
        read = self.residual.enter(x)
        attended = self.attention(read, places, self.attention.keys(read, places), allowed)
        x = self.residual.leave(x, attended)
        change = self.feed_forward(self.feed_forward_residual.enter(x))
        return self.feed_forward_residual.leave(x, change)


@final
class DecoderGraph(nn.Module):
    """From the next target tokens and what is kept of those before them to logits, and what to keep."""

    def __init__(self, model: EncoderDecoder, places: Tensor | None, max_tokens: int) -> None:
        """Multiply out; see `EncoderGraph`."""
        super().__init__()
        self.embedding = _Embedding(model.tgt_embedding.weight.detach(), places)
        self.blocks = nn.ModuleList()
        for block in model.decoder:
            assert isinstance(block, DecoderBlock)  # a ModuleList does not tell
            self.blocks.append(_DecoderBlock(block, max_tokens))
        self.norm, self.output = model.decoder_norm, model.output

    def kept_sizes(self) -> list[tuple[int, int]]:
        """Heads and width of the keys and values of each layer, in the order of `own`."""
        found = list[tuple[int, int]]()
        for block in self.blocks:
            assert isinstance(block, _DecoderBlock)
            found += block.attention.kept_sizes()
        return found

    def forward(
        self, tgt_ids: Tensor, mask: Tensor, own: list[Tensor], memory: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """One step, of one token a row or of several.

        Args:
            tgt_ids: `[rows, length]`, the tokens after those kept.
            mask: the encoder's.
            own: keys and values of each layer for the tokens before; of length 0 at first.
            memory: the encoder's keys and values.

        Returns:
            Logits `[rows, length, tgt_vocab_size]`, then `own` with the new tokens.
        """
        before, length = own[0].shape[2], tgt_ids.shape[1]
        places = torch.arange(length) + before
        x = self.embedding(tgt_ids, places)
        allowed = torch.arange(before + length)[None, :] <= places[:, None]
        kept = list[Tensor]()
        for i, block in enumerate(self.blocks):
            here = slice(2 * i, 2 * i + 2)
            x, now = block(x, places, allowed, mask[:, None, None, :], Keys(*own[here]), Keys(*memory[here]))
            kept += now
        return (self.output(self.norm(x)), *kept)


@final
class _DecoderBlock(nn.Module):
    def __init__(self, block: DecoderBlock, max_tokens: int) -> None:
        super().__init__()
        self.attention = _Attention(block.self_attention, max_tokens)
        self.residual: Residual = block.self_residual
        self.cross = _Attention(block.cross_attention, max_tokens)
        self.cross_residual: Residual = block.cross_residual
        self.feed_forward: FeedForward = block.feed_forward
        self.feed_forward_residual: Residual = block.feed_forward_residual

    def forward(
        self, x: Tensor, places: Tensor, allowed: Tensor, mask: Tensor, own: Keys, memory: Keys
    ) -> tuple[Tensor, Keys]:
        read = self.residual.enter(x)
        new = self.attention.keys(read, places)
        keys = Keys(torch.cat([own.k, new.k], dim=2), torch.cat([own.v, new.v], dim=2))
        x = self.residual.leave(x, self.attention(read, places, keys, allowed))
        x = self.cross_residual.leave(x, self.cross(self.cross_residual.enter(x), places, memory, mask))
        change = self.feed_forward(self.feed_forward_residual.enter(x))
        return self.feed_forward_residual.leave(x, change), keys
