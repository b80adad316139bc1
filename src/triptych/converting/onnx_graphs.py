"""A model of ours as two graphs for ONNX: the encoder, and a step of the decoder over a cache.

Both are the model itself as decoding prepares it (`triptych.decoding.Engine`), traced: here is only what goes
in and what comes out.
"""

from typing import Any, cast, final

import torch
from torch import Tensor, nn

from triptych.attention import AttentionCache, DecoderCache, PositionIds
from triptych.decoding import Engine
from triptych.decoding.fused import FusedAttention, numbers_of
from triptych.models.blocks import Block, NewTokens


@final
class EncoderGraph(nn.Module):
    """From source tokens to what the decoder reads of them: keys and values of every layer, and a mask."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        """Take the encoder."""
        super().__init__()
        self.engine, self.max_tokens = engine, max_tokens
        self.model, self.memory_map = engine.model, engine.memory_map  # for the names of their tensors

    def forward(self, src_ids: Tensor) -> tuple[Tensor, ...]:
        """`[batch, src_len]` → mask `[batch, src_len]`, then keys and values of each decoder layer."""
        positions = PositionIds(torch.arange(src_ids.shape[1]), self.max_tokens, sharing=1)
        memory = self.engine.read(self.model.encode(src_ids, positions))
        return (src_ids != self.engine.pad_id, *(tensor for layer in memory for tensor in layer))


@final
class DecoderGraph(nn.Module):
    """From the next target tokens and what is kept of those before them to logits, and what to keep."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        """Take the decoder; see `EncoderGraph`."""
        super().__init__()
        self.max_tokens, self.model, self.vocab = max_tokens, engine.model, engine.vocab_size

    def kept_sizes(self) -> list[tuple[int, int]]:
        """Heads and width of the keys and values of each layer, in the order of `own`."""
        layers = [cast(FusedAttention, cast(Block, b).self_attention) for b in self.model.decoder]
        return [(layer.groups, layer.width) for layer in layers for _ in range(2)]

    def forward(
        self, tgt_ids: Tensor, mask: Tensor, own: list[Tensor], memory: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """One step, of one token a row or of several."""
        before, length = own[0].shape[2], tgt_ids.shape[1]
        ids = torch.arange(length) + before
        seen = torch.arange(before + length)[None, :] <= ids[:, None]
        new = NewTokens(PositionIds(ids, self.max_tokens, sharing=1), numbers_of(seen[None, None], own[0]))
        cache = DecoderCache(len(own) // 2, JoinedCache)
        for i, (of_own, of_memory) in enumerate(zip(cache.own, cache.memory, strict=True)):
            cast(JoinedCache, of_own).entries = (own[2 * i], own[2 * i + 1])
            of_memory.append((memory[2 * i], memory[2 * i + 1]))
        x = self.model.decode(tgt_ids, None, mask[:, None, None, :], cache, new)
        kept = [entry for layer in cache.own for entry in layer.entries]
        return (self.model.logits(x)[..., : self.vocab], *kept)


@final
class JoinedCache(AttentionCache):
    """Entries that are joined anew at every step, as a graph without state does it."""

    entries: tuple[Tensor, ...] = ()

    @property
    def length(self) -> Any:  # an int, or a symbol of one while it is traced
        return self.entries[0].shape[2]

    def append(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pairs = zip(self.entries, entries, strict=True)
        self.entries = tuple(torch.cat(pair, dim=2) for pair in pairs)
        return self.entries

    def select(self, rows: Tensor) -> None:
        self.entries = tuple(entry.index_select(0, rows) for entry in self.entries)
