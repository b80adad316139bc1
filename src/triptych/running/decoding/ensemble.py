"""Ensembles of encoder-decoders, which average their token probabilities."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.running.decoding.engine import DecodingEngine


@final
class EnsembleEngine(DecodingEngine):
    """Average of the probabilities of engines with the same vocabulary."""

    def __init__(self, engines: Sequence[DecodingEngine]) -> None:
        self._engines = engines
        for engine in engines:
            engine.fixed = False
        self.device = engines[0].device
        self.pad_id = engines[0].pad_id
        self.max_tokens = min(
            (e.max_tokens for e in engines if e.max_tokens is not None), default=None
        )
        self.joins = all(engine.joins for engine in engines)

    @property
    def why_batches_matter(self) -> str:
        reasons = (engine.why_batches_matter for engine in self._engines)
        return ", ".join(dict.fromkeys(reason for reason in reasons if reason))

    def start(
        self, src: Int[Tensor, "batch src_len"], beam_size: int
    ) -> "EnsembleCache":
        """Encode sentences with each model."""
        return EnsembleCache([engine.start(src, beam_size) for engine in self._engines])

    def step(
        self, tokens: Int[Tensor, " rows"], cache: "EnsembleCache"
    ) -> Float[Tensor, "rows vocab"]:
        """Append `tokens` to the caches; return log-probabilities: the log of the mean probability."""
        pairs = zip(self._engines, cache.parts, strict=True)
        log_probs = [
            engine.step(tokens, part).log_softmax(dim=-1) for engine, part in pairs
        ]
        return torch.stack(log_probs).logsumexp(dim=0) - math.log(len(log_probs))


@final
class EnsembleCache:
    """Caches of a batch for each model."""

    columns = None  # logits have a column for each token of the vocabulary

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def reorder(self, parents: Int[Tensor, "texts width"]) -> None:
        for part in self.parts:
            part.reorder(parents)

    def select(self, texts: Int[Tensor, " kept"]) -> None:
        for part in self.parts:
            part.select(texts)

    def join(self, other: "EnsembleCache") -> None:
        for own, new in zip(self.parts, other.parts, strict=True):
            own.join(new)
