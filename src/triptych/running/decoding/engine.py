"""Engines: models prepared for step-by-step decoding."""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triptych import thresholds
from triptych.core.attention import MultiHeadAttention
from triptych.core.models import (
    EncoderDecoder,
    Experts,
    LanguageModel,
    NumbersOverflowError,
    blocks_of,
    overflow_again,
)
from triptych.literals import Precision
from triptych.running.decoding.cache import TextCache, even_length
from triptych.running.decoding.fused import (
    FusedAttention,
    call_directly,
    cast_parameters,
    evaluating_copy,
    fuse,
)
from triptych.running.decoding.linear_maps import Maps, unsupported_precision
from triptych.running.decoding.neighbours import why_batches_matter
from triptych.running.decoding.token_loop import Read
from triptych.running.memory import MappedFiles, has_room_for_another, own_memory

# The top tokens are searched in groups of this size: first the maximum of each group, then only groups
# with the largest maxima.
GROUP = 64


class DecodingEngine(ABC):
    """Base class of engines that decode an encoder-decoder step by step."""

    device: torch.device  # device of the model
    pad_id: int  # padding token, masked everywhere
    # the decoder's number of positions; None if unlimited
    max_tokens: int | None
    # True if every step of a batch repeats the same operations on the same memory (`FixedSteps`)
    fixed: bool = False
    # True if new texts can join a running batch
    joins: bool = True
    num_choices: int | None = (
        None  # only the first `num_choices` tokens may be chosen; None for all
    )

    @property
    def why_batches_matter(self) -> str:
        """Reasons why bits may depend on the batch, at the current number of threads; "" if they do not."""
        return ""

    @abstractmethod
    def start(self, src: Int[Tensor, "batch src_len"], beam_size: int) -> Any:
        """Encode sentences; return a cache like `TextCache` for `beam_size` hypotheses of each sentence."""

    @abstractmethod
    def step(
        self, tokens: Int[Tensor, " rows"], cache: Any
    ) -> Float[Tensor, "rows vocab"]:
        """Append `tokens`, a token for each row, to the cache; return the logits of the next token."""

    def overflow(self, read: Read) -> NumbersOverflowError:
        """Build the error for non-finite values after these tokens were read."""
        del read
        return NumbersOverflowError(
            "the model computed numbers that are not finite (NaN or infinite) from weights that are: they "
            "overflow; try another dtype or precision"
        )


@final
class Engine(DecodingEngine):
    """A model with fused maps in a chosen precision. It may share memory with the original model.

    Weights in a mapped file are copied to memory, so that later changes of the file do not matter.

    A language model prefills its cache with prompts (`read`). An encoder-decoder encodes source sentences
    (`start`); its embedding tables are scaled in advance, and its output layer is padded to whole groups.
    Weights of a small model are also packed, and thereby copied (`thresholds.SHARE_PACKED`).

    Attributes:
        context: maximum number of tokens read at once (`LanguageModel.context`); None if unlimited.
        reads_again: True if a text may grow past `context`; its last tokens are then read again.
        rotary_limit: see `LanguageModel.rotary_limit`.
        vocab_size: size of the vocabulary.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        precision: Precision = "fp32",
        num_choices: int
        | None = None,  # only the first `num_choices` tokens may be chosen; None for all
        *,
        never: Sequence[
            int
        ] = (),  # tokens with logits of −inf, for encoder-decoders only
        direct: bool = True,  # call modules without hooks; False for tracing
    ) -> None:
        *_, decoder = model.stacks.values()
        table = decoder.embeddings.table.weight
        if not decoder.causal:
            raise ValueError("an encoder predicts masked tokens and continues no text")
        if decoder.head is None:
            raise ValueError("the model has no output table: it predicts no tokens")
        if reason := unsupported_precision(precision, table.device):
            raise ValueError(reason)
        # `overflow` inspects the layers of the original model, since modules of the copy bypass hooks.
        self._original = weakref.ref(model)
        self.device = table.device
        self.precision = precision
        self.num_choices = num_choices
        self.max_tokens = decoder.max_tokens
        self.context = decoder.context
        self.rotary_limit = decoder.rotary_limit
        self.reads_again = decoder.recipe_limit is not None
        self.vocab_size = decoder.head.output.out_features
        rotary = [
            block.self_attention.semantics.rotary
            for block in blocks_of(model, "decoder")
        ]
        # Past this length, rotations of all positions change and a text is read again from its first token.
        again = any(of is not None and of.reads_again for of in rotary)
        self._starts_anew = self.rotary_limit if again else None
        # int8 products return float32 only. A traced model keeps plain linear maps, for portability.
        dtype = torch.float32 if precision == "int8" else table.dtype
        maps = Maps(precision, dtype, packed=direct and has_room_for_another(model))
        self.dtype, self.model = maps.dtype, evaluating_copy(model)
        size = sum(parameter.nbytes for parameter in model.parameters())
        files = MappedFiles() if size >= thresholds.BYTES_GIVEN_BACK else None
        *_, self._decoder = self.model.stacks.values()
        self._num_layers = len(self._decoder.new_cache().own)
        if isinstance(model, EncoderDecoder):
            self.pad_id = model.pad_id
            self.fixed = self.device.type == "cuda"
            fuse(self.model, maps, files=files)
            self._fill_up(model, maps, never)
            self._join_memory_maps(maps)
        else:
            _map_tables(self._decoder, maps, files)
            fuse(self.model, maps, small_cache=True, files=files)
        self.joins = not self.fixed
        for module in self.model.modules():
            cast_parameters(module, maps.dtype)
        modules = [*self.model.modules()]
        # Unfused layers accept boolean masks only.
        self._is_fused = not any(
            isinstance(module, MultiHeadAttention) for module in modules
        )
        # Tables and norms, and the maps of a large model, still share memory with the model.
        own_memory([self.model])
        for stack in self.model.stacks.values():
            stack.embeddings.stream_dtype = None
            # Unfused layers read the parameters of their submodules; direct calls hide them.
            if (
                direct
                and self._is_fused
                and not any(isinstance(module, Experts) for module in modules)
            ):
                call_directly(stack)
        self._head = cast(Callable[[Tensor], Tensor], self._decoder.head)

    @property
    def why_batches_matter(self) -> str:
        return why_batches_matter(self.model.modules(), self.device, self.dtype)

    def _fill_up(self, model: EncoderDecoder, maps: Maps, never: Sequence[int]) -> None:
        """Scale the tables, pad the vocabulary to whole groups and set logits of `never` to −inf."""
        own = self.model
        missing = -self.vocab_size % GROUP
        tables = dict[nn.Module, nn.Embedding]()
        for stack, more in (
            (own.stacks["decoder"], missing),
            (own.stacks["encoder"], 0),
        ):
            table = stack.embeddings.table
            config = stack.embeddings.config
            if table not in tables:
                rows = F.pad(table.weight.detach() * config.scale, (0, 0, 0, more)).to(
                    maps.dtype
                )
                tables[table] = nn.Embedding(
                    rows.shape[0], rows.shape[1], _weight=rows, _freeze=True
                )
            stack.embeddings.table, stack.embeddings.config = (
                tables[table],
                replace(config, scale=1.0),
            )
        weight = model.head.output.weight.detach()
        given = model.head.output.bias
        bias = weight.new_zeros(len(weight)) if given is None else given.detach()
        bias = F.pad(bias, (0, missing), value=-math.inf)
        bias[list(never)] = -math.inf
        rows = F.pad(weight, (0, 0, 0, missing))
        cast(EncoderDecoder, own).head.output = maps.linear(rows, bias)  # type: ignore[assignment]

    def _join_memory_maps(self, maps: Maps) -> None:
        """Join the maps from memory to keys and values of all layers."""
        cross = [
            cast(FusedAttention, block.cross_attention)
            for block in blocks_of(self.model, "cross")
        ]
        weights, biases = zip(*(layer.memory_rows for layer in cross), strict=True)
        self.memory_map = maps.linear(torch.cat(weights), torch.cat(biases))
        self._memory_shapes = [(layer.groups, layer.width) for layer in cross]
        for layer in dict.fromkeys(cross):  # all uses of a layer are the same object
            del layer.memory_rows

    def start(self, src: Int[Tensor, "batch src_len"], beam_size: int) -> TextCache:
        """Encode sentences; return a cache for `beam_size` hypotheses of each sentence."""
        assert isinstance(self.model, EncoderDecoder)
        # Keys are padded to a size with reproducible bits; the cache masks the padding.
        missing = even_length(src.shape[1]) - src.shape[1]
        begun = torch.zeros(len(src), dtype=torch.long, device=self.device)
        cache = TextCache(
            self._num_layers,
            begun,
            beam_size,
            self.dtype,
            most=self.max_tokens,
            fixed=self.fixed,
        )
        entries = self.project_memory(self.model.encode(src))
        padded = [
            [F.pad(entry, (0, 0, 0, missing)) for entry in of_layer]
            for of_layer in entries
        ]
        cache.set_memory(padded, (src != self.pad_id).sum(dim=1))
        if self.fixed:
            cache.steps = FixedSteps(self, cache)
        return cache

    def project_memory(
        self, memory: Float[Tensor, "batch src_len d_model"]
    ) -> list[
        tuple[
            Float[Tensor, "batch groups src_len width"],
            Float[Tensor, "batch groups src_len width"],
        ]
    ]:
        """Project the encoder's output to the keys and values of each decoder layer."""
        batch, length, _ = memory.shape
        # All layers share one product; its output columns are split by layer, then into keys and values.
        joined = self.memory_map(memory)
        found = []
        start = 0
        for groups, width in self._memory_shapes:
            part = joined.narrow(2, start, 2 * groups * width).view(
                batch, length, 2, groups, width
            )
            keys_values = part.permute(2, 0, 3, 1, 4).contiguous()
            found.append((keys_values[0], keys_values[1]))
            start += 2 * groups * width
        return found

    def read(
        self, texts: Sequence[Sequence[int]]
    ) -> tuple[TextCache, Float[Tensor, "rows vocab"]]:
        """Prefill with texts; return the cache and the logits of the token after each text."""
        longest = max(map(len, texts))
        ids = torch.tensor(
            [[*ids, *[0] * (longest - len(ids))] for ids in texts], device=self.device
        )
        lengths = torch.tensor([len(ids) for ids in texts], device=self.device)
        cache = TextCache(
            self._num_layers, lengths, 1, self.dtype, most=self.max_tokens
        )
        if self._starts_anew is not None and longest <= self._starts_anew:
            cache.ids = ids
        return cache, self._read(ids, cache)

    def _read(
        self, ids: Int[Tensor, "rows longest"], cache: TextCache
    ) -> Float[Tensor, "rows vocab"]:
        # Right padding is masked by causality.
        hidden = self._decoder.hidden(ids, cache=cache.layers)
        return self._logits(
            hidden[torch.arange(len(ids), device=self.device), cache.lengths - 1]
        )

    def step(
        self, tokens: Int[Tensor, " rows"], cache: TextCache
    ) -> Float[Tensor, "rows vocab"]:
        """Append `tokens`, a token for each row, to the cache; return the logits of the next token.

        An encoder-decoder's logits of padding columns and of `never` are −inf. If the cache is `fixed`, the
        next step overwrites the returned tensor.
        """
        if cache.steps is not None:
            return cache.steps(tokens)
        # Tokens are recorded up to the rotary limit; past it, the keys must be rotated anew.
        if cache.ids is not None and self._starts_anew is not None:
            cache.ids = ids = F.pad(cache.ids, (0, 1))
            ids[torch.arange(len(ids), device=self.device), cache.lengths] = tokens
            if ids.shape[1] > self._starts_anew:
                cache.restart(cache.lengths + 1)
                return self._read(ids, cache)
        return self.computed(tokens, cache)

    def computed(
        self, tokens: Int[Tensor, " rows"], cache: TextCache
    ) -> Float[Tensor, "rows vocab"]:
        """Compute a step without a recorded graph."""
        return self._logits(self.decode(tokens, cache)).flatten(0, 1)

    def decode(
        self, tokens: Int[Tensor, " rows"], cache: TextCache
    ) -> Float[Tensor, "texts width d_model"]:
        """Append `tokens` to the cache; return the input of the output head."""
        new = cache.next_tokens()
        x = self._decoder.hidden(
            tokens.view(-1, cache.width),
            mask=new.mask if self._is_fused else cast(Tensor, new.mask) == 0,
            positions=new.positions,
            cache=cache.layers,
            causal=False,
            memory_mask=cache.memory_mask,
        )
        cache.advance()
        return x

    def overflow(self, read: Read) -> NumbersOverflowError:
        model = self._original()
        if model is None or not read:
            return super().overflow(read)
        rows = [torch.tensor(one, device=self.device) for one in read]
        return overflow_again(model, partial(model, *rows))

    def _logits(
        self, hidden: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows vocab"]:
        logits = self._head(hidden)
        return logits.float() if logits.dtype == torch.bfloat16 else logits


def _map_tables(own: LanguageModel, maps: Maps, files: MappedFiles | None) -> None:
    """Convert the embedding table and the maps around the blocks to a precision."""
    head = own.head
    table = own.embeddings.table
    assert head is not None
    cast_parameters(table, maps.dtype)
    if head.config.tied:
        head.output.weight = table.weight
    # Largest map first: a map and its conversion coexist for a moment, while memory is least used.
    for parent, name in ((head, "output"), (head, "map"), (own.embeddings, "map")):
        layer = getattr(parent, name)
        if layer is not None:
            setattr(parent, name, maps.linear(layer.weight, layer.bias))
            if files is not None:
                files.let_go(layer.parameters())


# Runs before a recording, in which libraries allocate workspaces.
_WARM_UPS = 2


@final
class FixedSteps:
    """Steps of one batch with fixed memory, which a GPU replays from a recorded CUDA graph."""

    def __init__(self, engine: Engine, cache: TextCache) -> None:
        self._engine = engine
        self._cache: TextCache = weakref.proxy(
            cache
        )  # weak: the cache references these steps
        self._tokens: Tensor | None = None
        self._logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """See `Engine.step`."""
        cache = self._cache
        # A larger cache has a new address, which a recorded graph would miss.
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
        """Record a step without advancing the cache."""
        before = self._cache.lengths.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._run()  # writes the slot that the replayed step overwrites
                self._cache.lengths.copy_(before)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()
