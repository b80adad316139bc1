"""Decoding with a model's unchanged layers: slower than `Engine`, and its reference in tests.

Every hypothesis is a row with separate keys, values and memory, without empty slots, so that a tap of a layer
(`attention.steps`) reads the same positions as in a forward pass.
"""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from triptych.core.algebra.forms import at_least_float32
from triptych.core.attention import DecoderCache
from triptych.core.models import (
    EncoderDecoder,
    attention_sites,
    require_lengths,
)
from triptych.running.decoding.cache import rows_of_texts
from triptych.running.decoding.engine import GROUP, DecodingEngine
from triptych.running.decoding.fused import beyond_fusing


def needs_plain(model: EncoderDecoder) -> bool:
    """Return True if a layer has a tap or a feature that `FusedAttention` lacks."""
    layers = [(site.layer, site.stack == "cross") for site in attention_sites(model)]
    return any(
        layer.tap is not None or beyond_fusing(layer.weights(), cross)
        for layer, cross in layers
    )


@final
class PlainEngine(DecodingEngine):
    """Token-by-token decoding with an encoder-decoder's unchanged layers, in the model's dtype."""

    def __init__(self, model: EncoderDecoder, never: Sequence[int] = ()) -> None:
        """Decode with a model; logits of the tokens in `never` are −inf."""
        self.model = model.eval()
        self.device = model.decoder.embeddings.table.weight.device
        self.pad_id = model.pad_id
        self.max_tokens = model.max_target_tokens
        self._never = torch.tensor([*never], dtype=torch.long, device=self.device)
        # Taps of cross-attention get the position of the query from `step`.
        taps: list[Any] = [
            site.layer.tap for site in attention_sites(model) if site.stack == "cross"
        ]
        self._taps = [tap for tap in taps if hasattr(tap, "first")]

    joins = False  # taps have one position for all texts
    why_batches_matter = "attention that is not fused"

    def start(self, src: Int[Tensor, "batch src_len"], beam_size: int) -> "Hypotheses":
        """Encode sentences; return a cache for `beam_size` hypotheses of each sentence."""
        for length in (src != self.pad_id).sum(dim=1).tolist():
            require_lengths(
                self.model, {"encoder": (length, length), "cross": (None, length)}
            )
        memory = self.model.encode(src)
        mask = self.model.memory_mask(src)
        return Hypotheses(
            DecoderCache(len(self.model.decoder.blocks)),
            memory.repeat_interleave(beam_size, dim=0),
            mask.repeat_interleave(beam_size, dim=0),
            beam_size,
        )

    def step(
        self, tokens: Int[Tensor, " rows"], cache: "Hypotheses"
    ) -> Float[Tensor, "rows vocab"]:
        """Append `tokens`, a token for each row, to the cache; return the logits of the next token."""
        self._tell(cache.layers.length)
        x = self.model.decode(tokens[:, None], cache.memory, cache.mask, cache.layers)
        self._tell(0)  # a later forward pass starts at position 0
        logits = self.model.head(x[:, 0]).index_fill(1, self._never, -math.inf)
        return F.pad(
            at_least_float32(logits), (0, -logits.shape[1] % GROUP), value=-math.inf
        )

    def _tell(self, first: int) -> None:
        for tap in self._taps:
            tap.first = first


@final
class Hypotheses:
    """Cache, memory and memory mask of a batch, a row for each hypothesis."""

    columns = None  # logits have a column for each token of the vocabulary

    def __init__(
        self,
        layers: DecoderCache,
        memory: Float[Tensor, "rows src_len d_model"],
        mask: Bool[Tensor, "rows 1 1 src_len"],
        beam_size: int,
    ) -> None:
        self.layers = layers
        self.memory = memory
        self.mask = mask
        self._beam_size = beam_size

    def reorder(self, parents: Int[Tensor, "texts width"]) -> None:
        self.layers.select(
            rows_of_texts(torch.arange(len(parents), device=parents.device), parents)
        )

    def select(self, texts: Int[Tensor, " kept"]) -> None:
        each = torch.arange(self._beam_size, device=texts.device).expand(len(texts), -1)
        rows = rows_of_texts(texts, each)
        self.layers.select(rows, rows)
        self.memory = self.memory[rows]
        self.mask = self.mask[rows]
