"""A model reads texts: token ids in, everything that its layers were given and computed out."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from triptych.core.algebra.forms import are_finite
from triptych.core.attention import Kept, LayerSteps, MultiHeadAttention, PositionIds, QueriesAndKeys
from triptych.core.checkpoints.stored_layers import AttentionSource, Site
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.core.models.overflow import require_finite_logits, require_finite_values
from triptych.core.models.sites import AnyModel, AttentionSite, attention_sites, require_lengths
from triptych.core.places import PlaceNames
from triptych.errors import UsageError
from triptych.literals import SpecialTokens
from triptych.running.decoding import GenerationOptions
from triptych.running.decoding.batches import (
    LONGEST_SHOWN,
    EvaluationMode,
    batches_of_like_length,
    check_length,
    padded_alike,
)
from triptych.running.decoding.text_generator import check_vocabulary
from triptych.running.opening.opened import OpenedModel
from triptych.running.opening.text_model import (
    RANDOM_TOKENS,
    RANDOM_WINDOWS,
    WINDOW_TOKENS,
    Seen,
    TextKind,
    TextModel,
    Window,
)
from triptych.running.text import Text, Tokenizer, encode_texts
from triptych.running.text.given import which_of

AttentionKind = Literal["encoder", "decoder", "cross"]
# Padded tokens that a model reads at a time.
BATCH_TOKENS = 8192
_RANDOM_PAIR = 24  # tokens on each side


@final
@dataclass(frozen=True)
class TextIds:
    """What a model reads of one text."""

    # what its stack reads; of an encoder-decoder what its decoder produces, the end of sentence last
    ids: tuple[int, ...]
    # what the encoder of an encoder-decoder reads, its end included; None for other models
    source: tuple[int, ...] | None = None
    num_generated: int = 0  # how many of `ids`, the last ones, the model produced itself


@final
@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of an attention layer."""

    site: AttentionSite  # the layer and its place in the model
    x: Float[Tensor, "batch query_len d_model"]  # what queries are made of, after the norm before the layer
    # what keys and values are made of; None in self-attention, where that is `x`
    memory: Float[Tensor, "batch key_len d_memory"] | None
    mask: Bool[Tensor, "..."] | None  # True = may attend
    causal: bool  # a query sees only its own position and earlier ones
    positions: PositionIds | None  # of the tokens; None if they follow each other
    lent: Kept | None = None  # the keys and values of another layer, of one that has none of its own

    def __repr__(self) -> str:
        return f"LayerCall {self.site.name}: x {list(self.x.shape)}"

    @property
    def layer(self) -> MultiHeadAttention:
        return self.site.layer

    @property
    def kind(self) -> AttentionKind:
        """Which tokens look at which."""
        return self.site.stack

    @property
    def _given(self) -> dict[str, Any]:
        names = ("memory", "mask", "causal", "positions", "lent")
        return {name: getattr(self, name) for name in names}

    def queries_and_keys(self) -> QueriesAndKeys:
        """Queries and keys as the layer compares them."""
        return self.layer.queries_and_keys(self.x, **self._given)

    def steps(self, row: int | None = None) -> LayerSteps:
        """Every value of the call, computed again; the layer's tap acts as it did.

        In a layer without a tap, `row` leaves out all queries but that one.
        """
        return self.layer.steps(self.x, row=row, **self._given)

    def of_row(self, row: int, query_len: int, key_len: int) -> "LayerCall":
        """The call for one row of the batch alone, without padding on the right."""
        one = slice(row, row + 1)
        mask = self.mask
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
            mask = mask[one] if mask.shape[0] > 1 else mask
            mask = mask[..., :query_len, :key_len] if mask.shape[-2] > 1 else mask[..., :key_len]
            mask = None if bool(mask.all()) else mask
        positions = self.positions and self.positions.of_row(row, query_len)
        memory = None if self.memory is None else self.memory[one, :key_len]
        lent = self.lent and self.lent.of_row(row, query_len, key_len)
        x = self.x[one, :query_len]
        return replace(self, x=x, memory=memory, mask=mask, positions=positions, lent=lent)


@contextmanager
def record_calls(model: AnyModel) -> Iterator[list[LayerCall]]:
    """Record the calls of all attention layers of a model, in the order in which they run."""
    calls: list[LayerCall] = []

    def keep(
        module: MultiHeadAttention,
        given: tuple[Tensor, ...],
        named: Mapping[str, Any],
        *,
        site: AttentionSite,
    ) -> None:
        if named.get("cache") is not None:
            raise ValueError(f"{site.name} was called with a cache: run the whole text at once")
        causal = named.get("causal")
        calls.append(
            LayerCall(
                site,
                given[0],
                named.get("memory"),
                named.get("mask"),
                module.semantics.kind == "causal" if causal is None else causal,
                named.get("positions"),
                named.get("lent"),
            )
        )

    with ExitStack() as stack:
        for site in attention_sites(model):
            hook = site.layer.register_forward_pre_hook(partial(keep, site=site), with_kwargs=True)
            stack.callback(hook.remove)
        yield calls


@final
@dataclass(frozen=True, eq=False)
class Recording:
    """What a model computed on a batch of texts, each padded on the right."""

    texts: tuple[TextIds, ...]
    hidden: Float[Tensor, "batch length d_model"]  # the stream after the last norm
    calls: tuple[LayerCall, ...]  # of the attention layers, in the order in which they ran
    # the residual stream before each block and at the end, by stack: `[batch, length, d_model]`; empty unless
    # wanted
    residuals: Mapping[str, tuple[Tensor, ...]]

    def __repr__(self) -> str:
        return (
            f"Recording of {len(self.texts)} texts: hidden {list(self.hidden.shape)}, {len(self.calls)} calls"
        )


@final
class Reader(TextModel):
    """A model of ours with its tokenizers, ready to read texts. It reads in evaluation mode."""

    by = "triptych"

    def __init__(self, opened: OpenedModel, longest: int | None = None) -> None:
        """Put a reader together; `longest` is the length in tokens that the model is made for."""
        self.opened = opened
        self.name = opened.name
        self._longest_text = longest
        if isinstance(opened.model, LanguageModel) and opened.has_tokenizer:
            check_vocabulary(opened.model, opened.tokenizer)

    @property
    def kind(self) -> TextKind:
        model = self.model
        if isinstance(model, EncoderDecoder):
            return "pairs"
        return "causal" if model.causal and model.head is not None else "encoder"

    @property
    def model(self) -> LanguageModel | EncoderDecoder:
        return self.opened.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens that the model predicts."""
        return self.opened.tokenizer

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The tokenizer of what the first stack reads."""
        opened = self.opened
        return opened.tokenizers.source if opened.is_searched else opened.tokenizer

    def encode(
        self,
        texts: Sequence[Text],
        targets: Sequence[Text] | None = None,
        max_new_tokens: int = 0,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> list[TextIds]:
        """Encode texts, which may be token ids already."""
        if not texts:
            raise UsageError("there is no text: give at least one")
        if isinstance(self.model, EncoderDecoder):
            if max_new_tokens:
                raise UsageError(
                    f"{self.name} has an encoder and a decoder: it translates and does not continue"
                )
            return self._encode_pairs(self.model, texts, targets, special_tokens)
        if targets is not None:
            raise UsageError(f"{self.name} is not an encoder-decoder: leave out the target")
        if max_new_tokens and not self.model.causal:
            raise UsageError(f"{self.name} is an encoder, which does not continue texts")
        found = encode_texts(
            self.tokenizer,
            texts,
            special_tokens,
            vocab_size=self.model.vocab_size,
            begin_id=self.opened.begin_id,
        )
        ids = [TextIds(tuple(own)) for own in found]
        self.check(ids, max_tokens)
        return self._continued(ids, max_new_tokens, max_tokens) if max_new_tokens else ids

    def check(self, texts: Sequence[TextIds], max_tokens: int | None = None) -> None:
        """Check that no text is too long, or empty, or of another length than values put into the layers."""
        if isinstance(self.model, LanguageModel):
            _check_lengths([one.ids for one in texts], self.model.max_tokens, max_tokens, "text")
        else:
            sources = [one.source or () for one in texts]
            positions = self.model.encoder.max_tokens
            _check_lengths(sources, positions, max_tokens, "text")
            _check_lengths([one.ids for one in texts], self.model.max_target_tokens, max_tokens, "target")
        for one in texts:
            own = len(one.ids)
            source = len(one.ids if one.source is None else one.source)
            read = {"encoder": (source, source), "decoder": (own, own), "cross": (own, source)}
            require_lengths(self.model, read)

    def require_heads(self, heads: Sequence[str]) -> None:
        """The model has heads of these places and patterns."""
        sites = attention_sites(self.model)
        places = PlaceNames([(site.stack, site.block) for site in sites], self.name)
        places.heads(heads, [site.layer.num_heads for site in sites])

    def record(
        self, texts: Sequence[TextIds], max_tokens: int | None = None
    ) -> Iterator[tuple[list[int], Recording]]:
        """Run the model over texts, in batches of similar length."""
        self.check(texts, max_tokens)
        lengths = [[*(one.ids if one.source is None else one.source)] for one in texts]
        limit = self.model.rotary_limit if isinstance(self.model, LanguageModel) else None
        for whole in batches_of_like_length(lengths, BATCH_TOKENS):
            for batch in padded_alike(whole, [len(own) for own in lengths], limit):
                with torch.no_grad():
                    yield batch, self.run([texts[i] for i in batch])

    def run(self, texts: Sequence[TextIds], *, residuals: bool = False) -> Recording:
        """Run the model once, on a batch; gradients flow where they are recorded."""
        model = self.model
        with EvaluationMode(model), record_calls(model) as calls, _residuals(model, residuals) as streams:
            hidden = self._hidden(texts)
        with torch.no_grad(), EvaluationMode(model):
            # The padding may be whatever it is.
            if not are_finite(hidden):
                read = torch.cat([hidden[row, : len(text.ids)] for row, text in enumerate(texts)])
                require_finite_values(model, read, partial(self._hidden, texts))
        return Recording(tuple(texts), hidden, tuple(calls), {name: (*own,) for name, own in streams.items()})

    def logits(self, hidden: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows outputs"]:
        """Logits of the token after each; of a model without an output table the hidden states themselves."""
        if self.model.head is None:
            return hidden
        logits: Tensor = self.model.head(hidden)
        require_finite_logits(self.model, logits, partial(self.model.head, hidden))
        return logits

    def tokens(self, text: TextIds) -> Mapping[AttentionKind, tuple[tuple[str, ...], tuple[str, ...]]]:
        """The tokens that look, and those looked at, readable, of each kind of attention."""
        produced = tuple(self.tokenizer.pieces(text.ids))
        if isinstance(self.model, LanguageModel):
            return {self.model.architecture.kind: (produced, produced)}
        read = tuple(self.source_tokenizer.pieces(text.source or ()))
        # The decoder reads what it produces one place later.
        start, *_ = self.tokenizer.pieces([self.start_id])
        return {
            "encoder": (read, read),
            "decoder": (produced, (start, *produced[:-1])),
            "cross": (produced, read),
        }

    @property
    def start_id(self) -> int:
        """The token that an encoder-decoder's decoder reads first."""
        assert self.opened.start_id is not None, "an encoder-decoder has one"
        return self.opened.start_id

    @cached_property
    def _pad_id(self) -> int:
        model = self.model
        if isinstance(model, EncoderDecoder):
            return model.pad_id
        config = model.architecture.embeddings
        masked = None if config.masked is None else config.masked.padding
        choices = (config.padding_id, masked, self.tokenizer.pad_id, 0)
        return next(choice for choice in choices if choice is not None)

    def copied(self) -> "Reader":
        return Reader(self.opened.with_model(copy.deepcopy(self.model)), self._longest_text)

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        model = self.model
        for _ in range(RANDOM_WINDOWS):
            if isinstance(model, EncoderDecoder):
                window = {}
                pad = model.pad_id
                sides = (("input_ids", model.src_vocab_size), ("decoder_input_ids", model.tgt_vocab_size))
                for side, size in sides:
                    ids = torch.randint(0, size, (1, _RANDOM_PAIR), generator=generator)
                    window[side] = ids.masked_fill(ids == pad, (pad + 1) % size)  # Marian's pad comes last
                yield Window(window)
            else:
                length = max(4, min(RANDOM_TOKENS, self._longest()) - 4)
                yield Window(
                    {"input_ids": torch.randint(0, model.vocab_size, (1, length), generator=generator)}
                )

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        with EvaluationMode(self.model):
            found: Tensor = (
                self.model(window.inputs["input_ids"], window.inputs["decoder_input_ids"])
                if isinstance(self.model, EncoderDecoder)
                else self.model(window.inputs["input_ids"]).logits
            )
        return found[0]

    def inputs(self, window: Window, source: AttentionSource, sites: Sequence[Site]) -> dict[str, list[Seen]]:
        names = {there.name: site.name for site in sites for there in self.layers_of(site)}
        found: dict[str, list[Seen]] = {}
        with record_calls(self.model) as calls:
            self.outputs(window)
        for call in calls:
            if (name := names.get(call.site.name)) is not None:
                found.setdefault(name, []).append(Seen(call.x, call.memory))
        return found

    def runs(self, site: Site) -> bool:
        return bool(self.layers_of(site))

    def attention_modules(self, site: Site) -> Sequence[nn.Module]:
        return [there.layer for there in self.layers_of(site)]

    def layers_of(self, site: Site) -> list[AttentionSite]:
        """Return the layers of the model that have some weights; a model of one stack names it otherwise."""
        stack = "cross" if site.kind == "cross" else "encoder" if site.stack == "encoder" else "decoder"
        return [
            there
            for there in attention_sites(self.model)
            if there.block in site.numbers and (self.kind != "pairs" or there.stack == stack)
        ]

    def _longest(self) -> int:
        return WINDOW_TOKENS if self._longest_text is None else self._longest_text

    def _encode(self, text: str, special: bool) -> list[int]:
        return self.tokenizer.encode([text], add_special=special, parse_special=True)[0]

    def _pair(self, source: str, target: str) -> Window:
        model = self.opened.encoder_decoder
        tokenizers = self.opened.tokenizers
        start = tokenizers.target.rules.start
        longest = model.max_source_tokens
        most = model.max_target_tokens
        (src,), (tgt,) = tokenizers.source.encode([source]), tokenizers.target.encode([target])
        if model.recipe is None:  # models of other libraries have a fixed number of positions
            src = src[:longest]
            tgt = tgt[: None if most is None else most - len(start)]
        inputs = {
            "input_ids": torch.tensor([[*src, tokenizers.source.eos_id]]),
            "decoder_input_ids": torch.tensor([[*start, *tgt]]),
        }
        return Window(inputs, torch.tensor([*start[1:], *tgt, tokenizers.target.eos_id]))

    def _hidden(self, texts: Sequence[TextIds]) -> Float[Tensor, "batch length d_model"]:
        """Compute the stream after the last norm."""
        model = self.model
        device = next(model.parameters()).device
        if isinstance(model, EncoderDecoder):
            return self._run_pairs(model, texts, device)
        return self._run_single(model, texts, device)

    def _run_single(self, model: LanguageModel, texts: Sequence[TextIds], device: torch.device) -> Tensor:
        rows = [one.ids for one in texts]
        ids = _pad(rows, self._pad_id, device)
        mask = None
        if not model.causal and len({len(own) for own in rows}) > 1:
            lengths = torch.tensor([len(own) for own in rows], device=device)
            mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None])[:, None, None, :]
        return model.hidden(ids, mask=mask)

    def _run_pairs(self, model: EncoderDecoder, texts: Sequence[TextIds], device: torch.device) -> Tensor:
        src = _pad([one.source or () for one in texts], model.pad_id, device)
        shifted = [(self.start_id, *one.ids[:-1]) for one in texts]
        return model.decode(_pad(shifted, model.pad_id, device), model.encode(src), model.memory_mask(src))

    def _encode_pairs(
        self,
        model: EncoderDecoder,
        texts: Sequence[Text],
        targets: Sequence[Text] | None,
        special_tokens: SpecialTokens,
    ) -> list[TextIds]:
        if targets is not None and len(targets) != len(texts):
            raise UsageError(f"there are {len(texts)} texts and {len(targets)} targets: give one for each")
        for number, text in enumerate(texts, start=1):
            if isinstance(text, str) and not text.strip():
                raise UsageError(f"{which_of('text', number, texts)} is empty: give it some words")
        opened = self.opened
        if not opened.is_searched:  # another library's, whose outputs are not searched for
            if targets is None:
                raise UsageError(
                    f"{self.name} is not searched for a translation here: give the decoder's text, the target"
                    + ("" if opened.unsearched is None else f"; {opened.unsearched}")
                )
            sizes = (model.src_vocab_size, model.tgt_vocab_size)
            sources, produced = (
                encode_texts(self.tokenizer, own, special_tokens, vocab_size=size)
                for own, size in zip((texts, targets), sizes, strict=True)
            )
            return [TextIds(tuple(ids), tuple(read)) for read, ids in zip(sources, produced, strict=True)]
        pair = opened.tokenizers
        sources = [pair.source.sentence_ids(text, special_tokens) for text in texts]
        if targets is None:
            found = opened.translator().search_tokens(sources)
            produced = [[*best.ids] for best, *_ in found]
        else:
            produced = [pair.target.sentence_ids(text, special_tokens) for text in targets]
        # Tokens that every output is forced to begin with count as produced.
        _, *forced = pair.target.rules.start
        return [
            TextIds(
                (*forced, *ids, pair.target.eos_id),
                (*read, pair.source.eos_id),
                len(forced) + len(ids) + 1 if targets is None else 0,
            )
            for read, ids in zip(sources, produced, strict=True)
        ]

    def _continued(
        self, texts: Sequence[TextIds], max_new_tokens: int, max_tokens: int | None
    ) -> list[TextIds]:
        model = self.opened.language_model
        context = model.context
        if context is not None:
            for which, length in _lengths([one.ids for one in texts], "text"):
                if length >= context:
                    raise UsageError(
                        f"{which} has {length:,} tokens, which leaves no room for new ones in the "
                        f"{context:,} that the model reads at once: shorten it, or leave out max_new_tokens"
                    )
        try:
            options = GenerationOptions(max_new_tokens, max_prompt_tokens=max_tokens)
        except ValueError as error:
            raise UsageError(str(error)) from None
        with EvaluationMode(model):
            found = self.opened.generator().continue_tokens([one.ids for one in texts], options)
        longer = []
        for one, (new,) in zip(texts, found, strict=True):
            # The last token is read too, here.
            ids = new.ids if context is None else new.ids[: context - len(one.ids)]
            longer.append(TextIds((*one.ids, *ids), None, len(ids)))
        return longer


@contextmanager
def _residuals(model: AnyModel, wanted: bool) -> Iterator[dict[str, list[Tensor]]]:
    """Record the residual stream before each block, and before what ends a stack, by stack, if wanted."""
    found: dict[str, list[Tensor]] = {}
    if not wanted:
        yield found
        return

    def keep(module: nn.Module, given: tuple[Any, ...], *, stack: str) -> None:
        found.setdefault(stack, []).append(given[0])

    places = [(n, module) for n, half in model.stacks.items() for module in (*half.blocks, half.final_norm)]
    with ExitStack() as hooks:
        for stack, module in places:
            hooks.callback(module.register_forward_pre_hook(partial(keep, stack=stack)).remove)
        yield found


def _check_lengths(
    texts: Sequence[Sequence[int]], positions: int | None, most: int | None, what: str
) -> None:
    for which, length in _lengths(texts, what):
        check_length(which, length, positions, most, LONGEST_SHOWN, "max_tokens")


def _lengths(texts: Sequence[Sequence[int]], what: str) -> Iterator[tuple[str, int]]:
    """What each text is called in a message, and its tokens."""
    for number, ids in enumerate(texts, start=1):
        yield f"{what} {number}" if len(texts) > 1 else f"the {what}", len(ids)


def _pad(texts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    rows = [torch.tensor(list(ids)) for ids in texts]
    return pad_sequence(rows, batch_first=True, padding_value=pad_id).to(device)
