"""Decoding step by step: a model made ready, and what is kept of the hypotheses of a batch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.decoding.cache import TextCache, even_length
from triptych.decoding.fused import FusedAttention, call_directly, fused
from triptych.decoding.maps import Maps, Precision, has_room_for_another, unsupported_precision
from triptych.models import EncoderDecoder
from triptych.models.blocks import Block

# The vocabulary is looked through in groups of so many tokens: first the best of each group, then
# only the groups that can hold one of the best.
GROUP = 64


class DecodingEngine(ABC):
    """An encoder-decoder that is decoded step by step."""

    device: torch.device  # where it runs
    pad_id: int  # the token that is read nowhere
    # longest target that the model has positions for; None if there is no limit
    max_target_tokens: int | None
    # whether the steps of a batch are always the same work (`FixedSteps`)
    fixed: bool = False
    # whether texts join a batch that has taken steps
    joins: bool = True
    num_choices: int | None = None  # number of tokens, from the first, that may be chosen; None for all

    @abstractmethod
    def start(self, src: Int[Tensor, "batch src_len"], beam_size: int) -> Any:
        """Read sentences: a cache, as `TextCache`, with room for `beam_size` hypotheses of each."""

    @abstractmethod
    def step(self, tokens: Int[Tensor, " rows"], cache: Any) -> Float[Tensor, "rows vocab"]:
        """Logits of the token after each of `tokens`, one a row, in whole groups of `GROUP` columns."""


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
        self.fixed = self.device.type == "cuda"
        self.joins = not self.fixed
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

    def start(self, src: Int[Tensor, "batch src_len"], beam_size: int) -> TextCache:
        """Read sentences: what decoding them needs, with room for `beam_size` hypotheses of each."""
        missing = even_length(src.shape[1]) - src.shape[1]
        begun = torch.zeros(len(src), dtype=torch.long, device=self.device)
        cache = TextCache(
            len(self.model.decoder),
            begun,
            beam_size,
            self.dtype,
            most=self.max_target_tokens,
            fixed=self.fixed,
        )
        entries = self.read(self.model.encode(src))
        padded = [[F.pad(entry, (0, 0, 0, missing)) for entry in of_layer] for of_layer in entries]
        cache.remember(padded, (src != self.pad_id).sum(dim=1))
        if self.fixed:
            cache.steps = FixedSteps(self, cache)
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

    def step(self, tokens: Int[Tensor, " rows"], cache: TextCache) -> Float[Tensor, "rows vocab"]:
        """Logits of the token after each of `tokens`, one a row; the cache takes the tokens in.

        Columns past the vocabulary, and of tokens never wanted, are −inf. Logits of a `fixed`
        cache are overwritten by the next step.
        """
        return self.computed(tokens, cache) if cache.steps is None else cache.steps(tokens)

    def computed(self, tokens: Int[Tensor, " rows"], cache: TextCache) -> Float[Tensor, "rows vocab"]:
        """A step, computed anew."""
        logits = self.model.logits(self.decode(tokens, cache)).flatten(0, 1)
        return logits.float() if self.dtype == torch.bfloat16 else logits

    def decode(self, tokens: Int[Tensor, " rows"], cache: TextCache) -> Float[Tensor, "texts width d_model"]:
        """What the output layer reads; the cache takes the tokens in."""
        new = tokens.view(-1, cache.width)
        x = self.model.decode(new, None, cache.memory_mask, cache.layers, cache.next_tokens())
        cache.advance()
        return x


# Runs before a recording, in which libraries set themselves up.
_WARM_UPS = 2


@final
class FixedSteps:
    """The steps of one batch, always the same work on the same memory: a GPU replays a recorded one."""

    def __init__(self, engine: Engine, cache: TextCache) -> None:
        self._engine, self._cache = engine, cache
        self._tokens: Tensor | None = None
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """As `Engine.step`."""
        cache = self._cache
        if cache.longest == cache.room:
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
        cache.longest += 1
        return cast(Tensor, self._logits)

    def _run(self) -> None:
        self._logits = self._engine.computed(cast(Tensor, self._tokens), self._cache)

    def _record(self) -> None:
        """Record a step; it is not taken by that."""
        before = self._cache.lengths.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._run()  # writes the slot that the step itself will write again
                self._cache.lengths.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()
