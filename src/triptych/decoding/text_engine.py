"""A language model made ready to continue texts, and what is kept of the texts of a batch."""

from collections.abc import Callable, Sequence
from typing import cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from triptych.algebra.semantics import Semantics
from triptych.attention import DecoderCache, LayerCache, MultiHeadAttention, PositionIds
from triptych.decoding.fused import (
    EVEN_KEYS,
    call_directly,
    cast_parameters,
    evaluating_copy,
    fuse,
    hidden_score,
)
from triptych.decoding.maps import MappedFiles, Maps, Precision, has_room_for_another, unsupported_precision
from triptych.models import LanguageModel
from triptych.models.blocks import Block
from triptych.models.experts import Experts


@final
class OpenTexts:
    """The texts of a batch: the cache of their tokens, aligned on the right."""

    def __init__(self, cache: DecoderCache, padding: Tensor | None, hidden: Tensor | None) -> None:
        self.cache, self.padding, self.hidden, self.length = cache, padding, hidden, cache.length
        self.ids: Int[Tensor, "rows slots"] | None = None

    def mask(self, slots: int, queries: int) -> Tensor | None:
        """Which slots the last tokens see, `[rows, 1, queries, slots]`; None for all.

        A slot without token sees itself: a row of scores with nothing to see would have no softmax.
        """
        if self.hidden is not None:
            if slots > self.hidden.shape[3]:
                self.hidden = F.pad(self.hidden, (0, EVEN_KEYS), value=hidden_score(self.hidden.dtype))
            if queries == 1:
                self.hidden[..., slots - 1] = 0
            return self.hidden
        if self.padding is None:
            return None
        places = torch.arange(slots, device=self.padding.device)
        real = (places >= self.padding[:, None])[:, None, None, :]
        if queries == 1:
            return real
        return real | (places[:, None] == places)[None, None, slots - queries :]

    def positions(self, slots: int, queries: int, most: int | None) -> PositionIds | None:
        """Of the last tokens, `most` at most; None if they are those of the slots.

        The tokens of a text that has ended and is still in the batch may stand at any.
        """
        if self.padding is None:
            return None
        end = slots if most is None else min(slots, most)
        places = torch.arange(slots - queries, slots, device=self.padding.device)
        return PositionIds((places - self.padding[:, None]).clamp(0, end - 1), end)

    def select(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        self.cache.select(rows)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows)
        if self.hidden is not None:
            self.hidden = self.hidden.index_select(0, rows)
        if self.ids is not None:
            self.ids = self.ids.index_select(0, rows)


@final
class TextEngine:
    """A decoder-only model as generation wants it. It may share memory with the model.

    Of a small model it holds packed weights, a copy (`thresholds.SHARE_PACKED`).

    Attributes:
        device: where it runs.
        max_tokens: longest text that the model has positions for; None if there is no limit.
        context: tokens that are read at once (`LanguageModel.context`); None if there is no limit.
        reads_again: whether a text goes on past them, when its last tokens are read again.
        rotary_limit: see `LanguageModel.rotary_limit`.
        vocab_size: number of tokens.
        num_choices: so many of them, from the first, may be chosen.
    """

    @torch.no_grad()
    def __init__(
        self, model: LanguageModel, precision: Precision = "fp32", num_choices: int | None = None
    ) -> None:
        """Prepare a model."""
        table = model.embeddings.table.weight
        self.device, self.precision = table.device, precision
        if not model.causal:
            raise ValueError("an encoder predicts masked tokens and continues no text")
        if model.head is None:
            raise ValueError("the model has no output table: it predicts no tokens")
        if reason := unsupported_precision(precision, self.device):
            raise ValueError(reason)
        self.max_tokens, self.vocab_size = model.max_tokens, model.head.output.out_features
        self.context, self.reads_again = model.context, model.config is not None
        self.num_choices = min(num_choices or self.vocab_size, self.vocab_size)
        self.rotary_limit = model.rotary_limit
        # Angles of rotary positions are rounded, so that not only distances count.
        within = model.architecture.embeddings.positions == "none"
        self._absolute = not within or any(
            of.rotary is not None or of.chunk is not None or of.temperature is not None
            for of in _semantics(model)
        )
        again = any(of.rotary is not None and of.rotary.reads_again for of in _semantics(model))
        # A text that grows past so many tokens is read again from its first.
        self._starts_anew = self.rotary_limit if again else None
        self._num_layers = len(model.new_cache().own)
        # Products of int8 give float32 alone.
        dtype = torch.float32 if precision == "int8" else table.dtype
        maps = Maps.of(precision, dtype, packed=has_room_for_another(model))
        self._model, self._head = _prepared(model, maps)
        # A layer left as it is takes no even cache.
        self._is_even = not any(isinstance(module, MultiHeadAttention) for module in self._model.modules())
        self._dtype = maps.dtype

    @torch.inference_mode()
    def read(
        self, texts: Sequence[Sequence[int]], room: int = 0
    ) -> tuple[OpenTexts, Float[Tensor, "rows vocab"]]:
        """Read texts whole: what continuing them needs, and the logits of the token after each."""
        longest = max(map(len, texts))
        padding = torch.tensor([longest - len(ids) for ids in texts], device=self.device)
        ids = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in texts], device=self.device)
        opened = self._opened(padding, longest, room)
        if self._starts_anew is not None and longest <= self._starts_anew:
            opened.ids = ids
        return opened, self._logits(ids, opened)

    def _opened(self, padding: Tensor, longest: int, room: int) -> OpenTexts:
        """For texts that are not read yet; the last slots of them are the last of an even number."""
        if not self._is_even:
            cache = DecoderCache(self._num_layers, lambda: LayerCache(longest + room))
            return OpenTexts(cache, padding if bool(padding.any()) else None, None)
        skipped = -longest % EVEN_KEYS
        cache = DecoderCache(self._num_layers, lambda: LayerCache(even=EVEN_KEYS, skipped=skipped))
        padding = padding + skipped
        slots = torch.arange(skipped + longest, device=self.device)
        hidden = torch.zeros(len(padding), 1, 1, len(slots), dtype=self._dtype, device=self.device)
        hidden.masked_fill_(slots < padding[:, None, None, None], hidden_score(self._dtype))
        return OpenTexts(cache, padding, hidden)

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, " rows"], opened: OpenTexts) -> Float[Tensor, "rows vocab"]:
        """Logits of the token after each of `tokens`, one a row; the texts take the tokens in."""
        if opened.ids is None or self._starts_anew is None:
            return self._logits(tokens[:, None], opened)
        ids = opened.ids = torch.cat([opened.ids, tokens[:, None]], dim=1)
        length = ids.shape[1]
        if length <= self._starts_anew:
            return self._logits(tokens[:, None], opened)
        padding = torch.zeros_like(ids[:, 0]) if opened.padding is None else opened.padding
        before = opened.length - length + 1  # slots that were skipped
        anew = self._opened(padding - before, length, length)
        opened.cache, opened.padding, opened.hidden = anew.cache, anew.padding, anew.hidden
        opened.length, opened.ids = anew.length, None
        return self._logits(ids, opened)

    def _logits(self, ids: Tensor, opened: OpenTexts) -> Tensor:
        queries = ids.shape[1]
        slots = opened.length + queries
        mask = opened.mask(slots, queries)
        hidden = self._model.hidden(
            ids,
            mask=mask,
            # Other positions inside attention compare places, whose distances padding leaves alone.
            positions=opened.positions(slots, queries, self.max_tokens) if self._absolute else None,
            cache=opened.cache,
        )
        opened.length = slots
        logits: Tensor = self._head(hidden[:, -1])
        return logits.float() if logits.dtype == torch.bfloat16 else logits


def _semantics(model: LanguageModel) -> list[Semantics]:
    return [cast(Block, block).self_attention.semantics for block in model.blocks]


def _prepared(model: LanguageModel, maps: Maps) -> tuple[LanguageModel, Callable[[Tensor], Tensor]]:
    """A model with fused layers and maps of a precision, and its head."""
    own, files = evaluating_copy(model), MappedFiles()
    own.embeddings.stream_dtype = None
    head = own.head
    assert head is not None
    table = own.embeddings.table
    cast_parameters(table, maps.dtype)
    if head.config.tied:
        head.output.weight = table.weight
    # The largest map first: beside the fewest others, for it is there twice for a moment.
    for parent, name in ((head, "output"), (head, "map"), (own.embeddings, "map")):
        layer = getattr(parent, name)
        if layer is not None:
            setattr(parent, name, maps.linear(layer.weight, layer.bias))
            files.let_go(layer.parameters())
    fuse(own, maps, small_cache=True, files=files)
    for module in own.modules():
        cast_parameters(module, maps.dtype)
    # A layer that was left as it is reads parameters of its parts, which calling directly hides.
    if not any(isinstance(module, MultiHeadAttention | Experts) for module in own.modules()):
        call_directly(own)
    return own, head.forward
