"""A language model made ready to continue texts."""

from collections.abc import Callable, Sequence
from typing import cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from triptych.algebra.semantics import Semantics
from triptych.attention import MultiHeadAttention
from triptych.decoding.cache import TextCache
from triptych.decoding.fused import call_directly, cast_parameters, evaluating_copy, fuse
from triptych.decoding.maps import MappedFiles, Maps, Precision, has_room_for_another, unsupported_precision
from triptych.models import LanguageModel
from triptych.models.blocks import Block
from triptych.models.experts import Experts


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

    fixed, joins = False, True

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
        again = any(of.rotary is not None and of.rotary.reads_again for of in _semantics(model))
        # A text that grows past so many tokens is read again from its first.
        self._starts_anew = self.rotary_limit if again else None
        self._num_layers = len(model.new_cache().own)
        # Products of int8 give float32 alone.
        dtype = torch.float32 if precision == "int8" else table.dtype
        maps = Maps.of(precision, dtype, packed=has_room_for_another(model))
        self._model, self._head = _prepared(model, maps)
        # A layer left as it is takes no mask of numbers.
        self._is_fused = not any(isinstance(module, MultiHeadAttention) for module in self._model.modules())
        self._dtype = maps.dtype

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> tuple[TextCache, Float[Tensor, "rows vocab"]]:
        """Read texts whole: what continuing them needs, and the logits of the token after each."""
        longest = max(map(len, texts))
        ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts], device=self.device)
        lengths = torch.tensor([len(ids) for ids in texts], device=self.device)
        cache = TextCache(self._num_layers, lengths, 1, self._dtype, most=self.max_tokens)
        if self._starts_anew is not None and longest <= self._starts_anew:
            cache.ids = ids
        return cache, self._read(ids, cache)

    def _read(self, ids: Int[Tensor, "rows longest"], cache: TextCache) -> Float[Tensor, "rows vocab"]:
        """What follows the texts is filling, which no token before it sees."""
        hidden = self._model.hidden(ids, cache=cache.layers)
        return self._logits(hidden[torch.arange(len(ids), device=self.device), cache.lengths - 1])

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, " rows"], cache: TextCache) -> Float[Tensor, "rows vocab"]:
        """Logits of the token after each of `tokens`, one a row; the cache takes the tokens in."""
        if cache.ids is not None and self._starts_anew is not None:
            cache.ids = ids = F.pad(cache.ids, (0, 1))
            ids[torch.arange(len(ids), device=self.device), cache.lengths] = tokens
            if ids.shape[1] > self._starts_anew:
                cache.restart(cache.lengths + 1)
                return self._read(ids, cache)
        new = cache.next_tokens()
        hidden = self._model.hidden(
            tokens[:, None],
            mask=new.mask if self._is_fused else cast(Tensor, new.mask) == 0,
            positions=new.positions,
            cache=cache.layers,
        )
        cache.advance()
        return self._logits(hidden[:, 0])

    def _logits(self, hidden: Float[Tensor, "rows d_model"]) -> Float[Tensor, "rows vocab"]:
        logits: Tensor = self._head(hidden)
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
