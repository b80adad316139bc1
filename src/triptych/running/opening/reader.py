"""Readers: a model of this library with its tokenizers, ready to run on texts."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import tomli_w
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from triptych.core.algebra.forms import are_finite
from triptych.core.checkpoints.stored_layers import AttentionSource, Site
from triptych.core.models import (
    AnyModel,
    AttentionSite,
    EncoderDecoder,
    LanguageModel,
    attention_sites,
    require_finite_logits,
    require_finite_values,
    require_lengths,
    write_model,
)
from triptych.core.places import PlaceNames
from triptych.errors import TriptychError, UsageError
from triptych.files import write_text
from triptych.literals import Precision, SpecialTokens
from triptych.running.batching import (
    EvaluationMode,
    batches_of_like_length,
    padded_alike,
)
from triptych.running.decoding_options import (
    GenerationOptions,
    SearchOptions,
)
from triptych.running.input_limits import LONGEST_SHOWN, check_length, check_vocabulary
from triptych.running.opening.generation_config import GenerationConfig
from triptych.running.opening.layer_calls import (
    AttentionKind,
    Recording,
    TextIds,
    record_calls,
    record_residuals,
)
from triptych.running.opening.run_folder import DECODING, TOKENIZER, DecodingConfig
from triptych.running.opening.text_reader import (
    RANDOM_TOKENS,
    RANDOM_WINDOWS,
    WINDOW_TOKENS,
    Output,
    Seen,
    TextKind,
    TextReader,
    Window,
)
from triptych.running.text.encoding import encode_inputs
from triptych.running.text.given import Text, require_one, which_of
from triptych.running.text.numbered import NumberedTokens
from triptych.running.text.sentence_tokenizers import TokenizerPair
from triptych.running.text.shortlists import Shortlist, read_shortlist
from triptych.running.text.tokenizers import EncodedText, Tokenizer

if TYPE_CHECKING:
    from triptych.running.decoding.text_generator import TextGenerator
    from triptych.running.decoding.translator import Translator

# Padded tokens of a batch.
BATCH_TOKENS = 8192
_RANDOM_PAIR = 24  # number of source tokens, and of target tokens


@final
class Reader(TextReader):
    """A model run by triptych: a language model with its tokenizer, or an encoder-decoder with two.

    Attributes:
        name: path, or name on the Hub.
        folder: folder of the files, including the tokenizer.
        model: module of the model; it runs in evaluation mode.
        end_ids: tokens that end a generated text.
        unsearched: error raised by an encoder-decoder without a supported search; None for other models.
        generation: settings of the checkpoint's `generation_config.json`.
        shortlist: restriction of a translator to some target tokens; None for no restriction.
        ensemble: further translators of an ensemble.
    """

    by = "triptych"
    model: AnyModel

    def __init__(
        self,
        name: str,
        folder: Path,
        model: LanguageModel | EncoderDecoder,
        tokenizers: Tokenizer | TokenizerPair | TriptychError,
        *,
        decoding: DecodingConfig | None = None,
        end_ids: tuple[int, ...] = (),
        begin_id: int | None = None,
        start_id: int | None = None,
        unsearched: TriptychError | None = None,
        generation: GenerationConfig | None = None,
    ) -> None:
        """Combine a model with its tokenizers, or with the error about missing tokenizers.

        `start_id` is the decoder's first token, by default the target tokenizer's. `unsearched` is the error
        raised by an encoder-decoder without a supported search.
        """
        self.name = name
        self.folder = folder
        self.model = model
        self._tokenizers = (
            _numbered(model, tokenizers)
            if isinstance(tokenizers, TriptychError)
            else tokenizers
        )
        self.unsearched = unsearched
        self.generation = generation or GenerationConfig()
        self.shortlist: Shortlist | None = None
        self.ensemble: tuple[EncoderDecoder, ...] = ()
        self._decoding = decoding
        self.end_ids = end_ids
        if isinstance(tokenizers, TokenizerPair) and start_id is None:
            start_id = tokenizers.target.rules.start[0]
        self._start_id = start_id
        self._begin_id = begin_id
        self._longest_text: int | None = None

    @property
    def has_tokenizer(self) -> bool:
        """Return True if the model can read texts as well as token ids."""
        return not isinstance(self._tokenizers, NumberedTokens)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model, or the target tokenizer of an encoder-decoder.

        A model without a tokenizer has a `NumberedTokens`: it refuses texts and shows tokens by their ids.
        """
        return (
            self._tokenizers.target
            if isinstance(self._tokenizers, TokenizerPair)
            else self._tokenizers
        )

    @property
    def begin_id(self) -> int | None:
        """The beginning-of-text token, which also encodes an empty text; None if the files do not name it."""
        own = self.tokenizer.bos_id
        return self._begin_id if own is None else own

    @property
    def translates(self) -> bool:
        """Return True if the model has an encoder and a decoder."""
        return isinstance(self.model, EncoderDecoder)

    @property
    def is_searched(self) -> bool:
        """Return True for an encoder-decoder with a supported search."""
        return self._decoding is not None

    @property
    def decoding(self) -> DecodingConfig:
        """The search settings of an encoder-decoder."""
        if self._decoding is None:
            raise self.unsearched or translates_not(self.name)
        return self._decoding

    @property
    def tokenizers(self) -> TokenizerPair:
        """The source and target tokenizers of a translator with a supported search."""
        if not isinstance(self._tokenizers, TokenizerPair):
            raise self.unsearched or translates_not(self.name)
        return self._tokenizers

    @property
    def language_model(self) -> LanguageModel:
        """The model, checked to have one stack."""
        if not isinstance(self.model, LanguageModel):
            raise UsageError(
                f"{self.name} translates: it has no language model; see triptych translate"
            )
        return self.model

    @property
    def encoder_decoder(self) -> EncoderDecoder:
        """The model, checked to have two stacks."""
        if not isinstance(self.model, EncoderDecoder):
            raise translates_not(self.name)
        return self.model

    def named(self, name: str) -> "Reader":
        """Return the same model under another name, for records and messages."""
        changed = copy.copy(self)
        changed.name = name
        return changed

    def with_model(self, model: LanguageModel | EncoderDecoder) -> "Reader":
        changed = copy.copy(self)
        changed.model = model
        return changed

    def with_longest(self, num_tokens: int) -> "Reader":
        """Return the same reader with windows of at most this many tokens."""
        changed = copy.copy(self)
        changed._longest_text = num_tokens
        return changed

    def without_tokenizer(self, why: TriptychError) -> "Reader":
        """Return the same model without a tokenizer; texts raise the error `why`."""
        changed = copy.copy(self)
        changed._tokenizers = _numbered(self.model, why)
        return changed

    def with_shortlist(self, file: Path) -> "Reader":
        """Return the same translator, restricted to the target tokens of a shortlist."""
        changed = copy.copy(self)
        changed.shortlist = read_shortlist(file, self.tokenizers)
        return changed

    def with_ensemble(self, others: Sequence["Reader"]) -> "Reader":
        """Return the same translator in an ensemble with translators of the same tokenizers."""
        own = _tokens_of(self)
        changed = copy.copy(self)
        for other in others:
            if _tokens_of(other) != own:
                raise UsageError(
                    f"{other.name} has other tokens than {self.name}: models of an ensemble share their "
                    "tokenizers, as runs of one recipe with several seeds do"
                )
        changed.ensemble = tuple(other.encoder_decoder for other in others)
        return changed

    def with_decoding(self, decoding: DecodingConfig) -> "Reader":
        changed = copy.copy(self)
        changed._decoding = decoding
        return changed

    def save_tokenizers(self, folder: Path) -> None:
        """Write the tokenizer files of a triptych model into its folder."""
        if isinstance(self._tokenizers, TokenizerPair):
            self._tokenizers.save(folder)
        else:
            self.tokenizer.save(folder / TOKENIZER)

    def save(self, folder: Path) -> None:
        """Write model, tokenizers and search settings into a folder, without a recipe."""
        write_model(self.encoder_decoder, folder)
        self.tokenizers.save(folder)
        write_text(
            folder / DECODING,
            tomli_w.dumps(self.decoding.model_dump(exclude_none=True)),
        )

    def search_options(self, **search: Any) -> SearchOptions:
        """Return the search options; see `DecodingConfig.search_options`."""
        return self.decoding.search_options(**search)

    def translator(
        self,
        options: SearchOptions | None = None,
        *,
        precision: Precision = "fp32",
        workers: int = 1,
    ) -> "Translator":
        """Build a translator; the default is the model's search options."""
        from triptych.running.decoding.translator import Translator

        options = options or self.search_options()
        return Translator(
            self.encoder_decoder,
            self.tokenizers,
            options,
            precision=precision,
            workers=workers,
            shortlist=self.shortlist,
            ensemble=self.ensemble,
        )

    def generator(
        self, *, precision: Precision = "fp32", batch_rows: int = 32
    ) -> "TextGenerator":
        """Build a generator of continuations."""
        from triptych.running.decoding.text_generator import TextGenerator

        return TextGenerator(
            self.language_model,
            self.tokenizer,
            precision=precision,
            end_ids=self.end_ids,
            begin_id=self.begin_id,
            batch_rows=batch_rows,
        )

    @property
    def kind(self) -> TextKind:
        model = self.model
        if isinstance(model, EncoderDecoder):
            return "pairs"
        return "causal" if model.causal and model.head is not None else "encoder"

    @property
    def last_stack(self) -> LanguageModel:
        """The stack whose output the head reads: the decoder of an encoder-decoder."""
        *_, last = self.model.stacks.values()
        return last

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes of a task head; None for other models."""
        task = self.last_stack.task
        return None if task is None else task.config.labels

    @property
    def second_labels(self) -> tuple[str, ...] | None:
        """The names of the classes of the second head of a model with two; None for other models."""
        second = self.last_stack.second
        return None if second is None else second.config.labels

    @property
    def why_no_classes(self) -> str:
        """The reason why the model does not give a text one class of several; "" if it does."""
        task = self.last_stack.task
        if task is None:
            return "has no head that tells classes of texts apart"
        if task.config.pooling == "each":
            return f"has a head for each token ({', '.join(task.config.labels[:4])})"
        if len(task.config.labels) == 1:
            return "has a head with one number for a text"
        if task.config.several:
            return "has a head that may give a text several classes (problem_type)"
        return ""

    @property
    def predicts(self) -> bool:
        """Return True for models of the next token."""
        last = self.last_stack
        return last.causal and last.head is not None

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return next(self.model.parameters()).dtype

    @property
    def source_tokenizer(self) -> Tokenizer:
        """The tokenizer of the first stack's input."""
        return self.tokenizers.source if self.is_searched else self.tokenizer

    def encode(
        self,
        texts: Sequence[Text],
        targets: Sequence[Text] | None = None,
        max_new_tokens: int = 0,
        max_tokens: int | None = None,
        special_tokens: SpecialTokens = "tokens",
    ) -> list[TextIds]:
        """Encode texts, given as strings or token ids.

        A causal model continues them by `max_new_tokens`. A translator translates them if `targets` is None.
        """
        # Refuse arguments without a meaning for the kind of model before encoding.
        if not texts:
            raise UsageError("there is no text: give at least one")
        if isinstance(self.model, EncoderDecoder):
            if max_new_tokens:
                raise UsageError(
                    f"{self.name} has an encoder and a decoder: it translates and does not continue"
                )
            return self._encode_pairs(self.model, texts, targets, special_tokens)
        if targets is not None:
            raise UsageError(
                f"{self.name} is not an encoder-decoder: leave out the target"
            )
        if max_new_tokens and not self.model.causal:
            raise UsageError(
                f"{self.name} is an encoder, which does not continue texts"
            )
        found = self.encode_inputs(texts, special_tokens)
        ids = [self._with_types(self.model, own) for own in found]
        self.check(ids, max_tokens)
        return (
            self._continued(ids, max_new_tokens, max_tokens) if max_new_tokens else ids
        )

    def encode_inputs(
        self, texts: Sequence[Text], special_tokens: SpecialTokens = "tokens"
    ) -> list[EncodedText]:
        """Encode texts of any length as inputs of the first stack: sources, for an encoder-decoder."""
        model = self.model
        if isinstance(model, EncoderDecoder):
            return self._encode_sources(model, texts, special_tokens)
        if model.causal and model.task is None:
            # A language model's tokenizer would put both texts together without a separator.
            for number, text in enumerate(texts, start=1):
                require_one(text, which_of("text", number, texts))
        self.require_vocabulary()
        return encode_inputs(
            self.tokenizer,
            texts,
            special_tokens,
            vocab_size=model.vocab_size,
            begin_id=self.begin_id,
        )

    def _encode_sources(
        self,
        model: EncoderDecoder,
        texts: Sequence[Text],
        special_tokens: SpecialTokens,
    ) -> list[EncodedText]:
        if not self.is_searched:
            return encode_inputs(
                self.tokenizer, texts, special_tokens, vocab_size=model.src_vocab_size
            )
        source = self.tokenizers.source
        for number, text in enumerate(texts, start=1):
            require_one(text, which_of("text", number, texts))
        sentences = [source.sentence_ids(text, special_tokens) for text in texts]
        return [EncodedText([*ids, source.eos_id]) for ids in sentences]

    def _with_types(self, model: LanguageModel, text: EncodedText) -> TextIds:
        """Return the token ids of a text, with token types for a model with a table of types."""
        known = model.architecture.embeddings.num_types
        if text.types is None or not known:
            return TextIds(tuple(text.ids), second=text.second)
        if max(text.types, default=0) >= known:
            raise UsageError(
                f"the tokenizer of {self.name} gives the second text of a pair the type "
                f"{max(text.types)}, and the model has {known} type{'s' * (known != 1)}: give one text"
            )
        return TextIds(tuple(text.ids), types=tuple(text.types), second=text.second)

    def require_vocabulary(self) -> None:
        """Check that the vocabulary of a language model includes the tokenizer's tokens."""
        if isinstance(self.model, LanguageModel) and self.has_tokenizer:
            check_vocabulary(self.model, self.tokenizer)

    def check(self, texts: Sequence[TextIds], max_tokens: int | None = None) -> None:
        """Check the length of texts: not 0, within the model's limit, and equal to that of patched values."""
        if isinstance(self.model, LanguageModel):
            _check_lengths(
                [one.ids for one in texts], self.model.max_tokens, max_tokens, "text"
            )
        else:
            sources = [one.source or () for one in texts]
            positions = self.model.encoder.max_tokens
            _check_lengths(sources, positions, max_tokens, "text")
            _check_lengths(
                [one.ids for one in texts],
                self.model.max_target_tokens,
                max_tokens,
                "target",
            )
        # Numbers of queries and keys by kind of attention, as required by patched values of another run.
        for one in texts:
            own = len(one.ids)
            source = len(one.ids if one.source is None else one.source)
            read = {
                "encoder": (source, source),
                "decoder": (own, own),
                "cross": (own, source),
            }
            require_lengths(self.model, read)

    def require_heads(self, heads: Sequence[str]) -> None:
        """Check that the model has heads of these names and patterns."""
        sites = attention_sites(self.model)
        places = PlaceNames([(site.stack, site.block) for site in sites], self.name)
        places.heads(heads, [site.layer.num_heads for site in sites])

    def record(
        self, texts: Sequence[TextIds], max_tokens: int | None = None
    ) -> Iterator[tuple[list[int], Recording]]:
        """Run the model over texts in batches of similar length; yield text indices and recordings."""
        self.check(texts, max_tokens)
        for batch in self.batches(texts):
            with torch.no_grad():
                yield batch, self.run([texts[i] for i in batch])

    def batches(self, texts: Sequence[TextIds]) -> Iterator[list[int]]:
        """Yield the indices of texts in batches of similar length."""
        lengths = [[*(one.ids if one.source is None else one.source)] for one in texts]
        limit = (
            self.model.rotary_limit if isinstance(self.model, LanguageModel) else None
        )
        for whole in batches_of_like_length(lengths, BATCH_TOKENS):
            yield from padded_alike(whole, [len(own) for own in lengths], limit)

    def run(self, texts: Sequence[TextIds], *, residuals: bool = False) -> Recording:
        """Run the model once on a batch; gradients flow if autograd is enabled."""
        model = self.model
        with (
            EvaluationMode(model),
            record_calls(model) as calls,
            record_residuals(model, residuals) as streams,
        ):
            hidden = self._hidden(texts)
        self._require_finite(texts, hidden)
        return Recording(
            tuple(texts),
            hidden,
            tuple(calls),
            {name: (*own,) for name, own in streams.items()},
        )

    @torch.no_grad()
    def class_logits(
        self, texts: Sequence[TextIds]
    ) -> list[Float[Tensor, "*length labels"]]:
        """Compute the logits of texts as one batch, by the task head."""
        with EvaluationMode(self.model):
            hidden = self._hidden(texts)
        self._require_finite(texts, hidden)
        return [
            self.text_logits(hidden[row, : len(text.ids)], text.ids)
            for row, text in enumerate(texts)
        ]

    def _require_finite(self, texts: Sequence[TextIds], hidden: Tensor) -> None:
        # Hidden states of padding may be NaN: only hidden states of tokens are checked.
        if not are_finite(hidden.detach()):
            with torch.no_grad(), EvaluationMode(self.model):
                read = torch.cat(
                    [hidden[row, : len(text.ids)] for row, text in enumerate(texts)]
                )
                require_finite_values(self.model, read, partial(self._hidden, texts))

    def logits(
        self, hidden: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows outputs"]:
        """Compute logits; a model without an output head returns the hidden states unchanged."""
        head = self.last_stack.head
        if head is None:
            return hidden
        logits: Tensor = head(hidden)
        require_finite_logits(self.model, logits, partial(head, hidden))
        return logits

    def text_logits(
        self, hidden: Float[Tensor, "length d_model"], ids: Sequence[int]
    ) -> Float[Tensor, "*length outputs"]:
        """Compute the logits of a whole text, by the task head if present."""
        task = self.last_stack.task
        return self.logits(hidden) if task is None else self._of(task, hidden, ids)

    def second_logits(
        self, hidden: Float[Tensor, "length d_model"], ids: Sequence[int]
    ) -> Float[Tensor, " classes"] | None:
        """Compute the logits of the second head of a model with two; None for other models."""
        second = self.last_stack.second
        return None if second is None else self._of(second, hidden, ids)

    def _of(self, head: nn.Module, hidden: Tensor, ids: Sequence[int]) -> Tensor:
        run = partial(head, hidden, torch.tensor(list(ids), device=hidden.device))
        logits: Tensor = run()
        require_finite_logits(self.model, logits, run)
        return logits

    def tokens(
        self, text: TextIds
    ) -> Mapping[AttentionKind, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return query tokens and key tokens in readable form, by kind of attention."""
        produced = tuple(self.tokenizer.pieces(text.ids))
        if isinstance(self.model, LanguageModel):
            return {self.model.architecture.kind: (produced, produced)}
        read = tuple(self.source_tokenizer.pieces(text.source or ()))
        # The decoder's input is its output shifted right by one position.
        start, *_ = self.tokenizer.pieces([self.first_id(text.ids)])
        return {
            "encoder": (read, read),
            "decoder": (produced, (start, *produced[:-1])),
            "cross": (produced, read),
        }

    @property
    def start_id(self) -> int:
        """The first input token of an encoder-decoder's decoder."""
        assert self._start_id is not None, "an encoder-decoder has one"
        return self._start_id

    def first_id(self, ids: Sequence[int]) -> int:
        """Return the token that the decoder begins with for a target."""
        task = self.last_stack.task
        wraps = task is not None and task.config.wraps and len(ids) > 0
        return ids[-1] if wraps else self.start_id

    @property
    def _pad_id(self) -> int:
        model = self.model
        if isinstance(model, EncoderDecoder):
            return model.pad_id
        config = model.architecture.embeddings
        masked = None if config.masked is None else config.masked.padding
        choices = (config.padding_id, masked, self.tokenizer.pad_id, 0)
        return next(choice for choice in choices if choice is not None)

    def copied(self) -> "Reader":
        return self.with_model(copy.deepcopy(self.model))

    def random_windows(self, seed: int) -> Iterator[Window]:
        # Encoder-decoders read the pad token as padding, so random pairs must not contain it.
        generator = torch.Generator().manual_seed(seed)
        model = self.model
        for _ in range(RANDOM_WINDOWS):
            if isinstance(model, EncoderDecoder):
                window = {}
                pad = model.pad_id
                sides = (
                    ("input_ids", model.src_vocab_size),
                    ("decoder_input_ids", model.tgt_vocab_size),
                )
                for side, size in sides:
                    ids = torch.randint(0, size, (1, _RANDOM_PAIR), generator=generator)
                    window[side] = ids.masked_fill(
                        ids == pad, (pad + 1) % size
                    )  # Marian's last id is pad
                task = model.decoder.task
                if task is not None and task.config.pooling == "end":
                    window["input_ids"][0, -1] = task.config.token or 0
                yield Window(window)
            else:
                length = max(4, min(RANDOM_TOKENS, self._longest()) - 4)
                yield Window(
                    {
                        "input_ids": torch.randint(
                            0, model.vocab_size, (1, length), generator=generator
                        )
                    }
                )

    @property
    def output(self) -> Output:
        task = self.last_stack.task
        head = self.last_stack.head
        if task is not None:
            config = task.config
            # Start and end of an answer are distributed over the tokens, not over the two labels.
            is_span = config.pooling == "each" and config.labels == ("start", "end")
            is_distribution = len(config.labels) > 1 and not config.several
            return "classes" if is_distribution and not is_span else "numbers"
        if head is None:
            return "hidden states"
        outputs = head.config.outputs
        if outputs in (None, self.last_stack.vocab_size):
            return "tokens"
        return "numbers" if outputs == 1 else "classes"

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        model = self.model
        read = window.inputs["input_ids"]
        with EvaluationMode(model):
            if isinstance(model, EncoderDecoder):
                shifted = window.inputs["decoder_input_ids"]
                hidden = model.decode(
                    shifted, model.encode(read), model.memory_mask(read)
                )
            else:
                hidden = model.hidden(read)
            task = self.last_stack.task
            if task is not None:
                logits: Tensor = task(hidden[0], read[0])
                return logits.reshape(-1, len(task.config.labels))
            head = self.last_stack.head
            return hidden[0] if head is None else head(hidden)[0]

    def inputs(
        self, window: Window, source: AttentionSource, sites: Sequence[Site]
    ) -> dict[str, list[Seen]]:
        names = {
            there.name: site.name for site in sites for there in self.layers_of(site)
        }
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
        """Return the model's layers at a site of a checkpoint, by number and (in encoder-decoders) stack."""
        stack = (
            "cross"
            if site.kind == "cross"
            else "encoder"
            if site.stack == "encoder"
            else "decoder"
        )
        return [
            there
            for there in attention_sites(self.model)
            if there.block in site.numbers
            and (self.kind != "pairs" or there.stack == stack)
        ]

    def _longest(self) -> int:
        return WINDOW_TOKENS if self._longest_text is None else self._longest_text

    def _encode(self, text: str, special: bool) -> list[int]:
        self.require_vocabulary()
        return self.tokenizer.encode([text], add_special=special, parse_special=True)[0]

    def _pair(self, source: str, target: str) -> Window:
        model = self.encoder_decoder
        tokenizers = self.tokenizers
        start = tokenizers.target.rules.start
        longest = model.max_source_tokens
        most = model.max_target_tokens
        (src,), (tgt,) = (
            tokenizers.source.encode([source]),
            tokenizers.target.encode([target]),
        )
        if (
            model.recipe_limit is None
        ):  # checkpoints of other libraries have a fixed number of positions
            src = src[:longest]
            tgt = tgt[: None if most is None else most - len(start)]
        inputs = {
            "input_ids": torch.tensor([[*src, tokenizers.source.eos_id]]),
            "decoder_input_ids": torch.tensor([[*start, *tgt]]),
        }
        return Window(
            inputs, torch.tensor([*start[1:], *tgt, tokenizers.target.eos_id])
        )

    def _hidden(
        self, texts: Sequence[TextIds]
    ) -> Float[Tensor, "batch length d_model"]:
        """Compute the residual stream after the final norm."""
        model = self.model
        device = next(model.parameters()).device
        if isinstance(model, EncoderDecoder):
            return self._run_pairs(model, texts, device)
        return self._run_single(model, texts, device)

    def _run_single(
        self, model: LanguageModel, texts: Sequence[TextIds], device: torch.device
    ) -> Tensor:
        rows = [one.ids for one in texts]
        ids = _pad(rows, self._pad_id, device)
        mask = None
        if not model.causal and len({len(own) for own in rows}) > 1:
            lengths = torch.tensor([len(own) for own in rows], device=device)
            mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None])[
                :, None, None, :
            ]
        types = None
        if any(one.types is not None for one in texts):
            of_texts = [one.types or (0,) * len(one.ids) for one in texts]
            types = _pad(of_texts, 0, device)
        return model.hidden(ids, mask=mask, types=types)

    def _run_pairs(
        self, model: EncoderDecoder, texts: Sequence[TextIds], device: torch.device
    ) -> Tensor:
        src = _pad([one.source or () for one in texts], model.pad_id, device)
        shifted = [(self.first_id(one.ids), *one.ids[:-1]) for one in texts]
        return model.decode(
            _pad(shifted, model.pad_id, device),
            model.encode(src),
            model.memory_mask(src),
        )

    def _encode_pairs(
        self,
        model: EncoderDecoder,
        texts: Sequence[Text],
        targets: Sequence[Text] | None,
        special_tokens: SpecialTokens,
    ) -> list[TextIds]:
        if targets is not None and len(targets) != len(texts):
            raise UsageError(
                f"there are {len(texts)} texts and {len(targets)} targets: give one for each"
            )
        for number, text in enumerate(texts, start=1):
            if isinstance(text, str) and not text.strip():
                raise UsageError(
                    f"{which_of('text', number, texts)} is empty: give it some words"
                )
        if (
            not self.is_searched
        ):  # a checkpoint of another library without a supported search
            if targets is None and model.decoder.head is None:
                targets = texts  # as in `transformers`, the decoder of a task reads the text once more
            if targets is None:
                raise UsageError(
                    f"{self.name} is not searched for a translation here: give the decoder's text, the target"
                    + ("" if self.unsearched is None else f"; {self.unsearched}")
                )
            encoded = self._encode_sources(model, texts, special_tokens)
            of_targets = encode_inputs(
                self.tokenizer,
                targets,
                special_tokens,
                vocab_size=model.tgt_vocab_size,
            )
            return [
                TextIds(tuple(own.ids), tuple(read.ids), second=own.second)
                for read, own in zip(encoded, of_targets, strict=True)
            ]
        pair = self.tokenizers
        sources = self._encode_sources(model, texts, special_tokens)
        if targets is None:
            # The search adds the end of each sentence itself.
            found = self.translator().search_tokens([own.ids[:-1] for own in sources])
            produced = [[*best.ids] for best, *_ in found]
        else:
            produced = [
                pair.target.sentence_ids(text, special_tokens) for text in targets
            ]
        # Forced first tokens of outputs count as generated.
        _, *forced = pair.target.rules.start
        return [
            TextIds(
                (*forced, *ids, pair.target.eos_id),
                tuple(read.ids),
                len(forced) + len(ids) + 1 if targets is None else 0,
            )
            for read, ids in zip(sources, produced, strict=True)
        ]

    def _continued(
        self, texts: Sequence[TextIds], max_new_tokens: int, max_tokens: int | None
    ) -> list[TextIds]:
        model = self.language_model
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
            found = self.generator().continue_tokens(
                [one.ids for one in texts], options
            )
        longer = []
        for one, (new,) in zip(texts, found, strict=True):
            # Unlike generation, the reader also runs on the last token, so it has to fit into the context.
            ids = new.ids if context is None else new.ids[: context - len(one.ids)]
            longer.append(TextIds((*one.ids, *ids), None, len(ids), second=one.second))
        return longer


def _numbered(
    model: LanguageModel | EncoderDecoder, why: TriptychError
) -> NumberedTokens:
    size = (
        model.tgt_vocab_size if isinstance(model, EncoderDecoder) else model.vocab_size
    )
    return NumberedTokens(size, why)


def _tokens_of(reader: Reader) -> tuple[object, ...]:
    """Return the tokenizers and the output width: equal for all models of an ensemble."""
    pair = reader.tokenizers
    model = reader.encoder_decoder
    return pair.source.to_json(), pair.target.to_json(), model.head.output.out_features


def translates_not(name: str) -> UsageError:
    """Return the error for translation with a language model."""
    return UsageError(
        f"{name} is a language model, which does not translate: see triptych generate or fill"
    )


def _check_lengths(
    texts: Sequence[Sequence[int]], positions: int | None, most: int | None, what: str
) -> None:
    for which, length in _lengths(texts, what):
        check_length(which, length, positions, most, LONGEST_SHOWN, "max_tokens")


def _lengths(texts: Sequence[Sequence[int]], what: str) -> Iterator[tuple[str, int]]:
    """Yield the name of each text for messages, and its number of tokens."""
    for number, ids in enumerate(texts, start=1):
        yield f"{what} {number}" if len(texts) > 1 else f"the {what}", len(ids)


def _pad(texts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    rows = [torch.tensor(list(ids)) for ids in texts]
    return pad_sequence(rows, batch_first=True, padding_value=pad_id).to(device)
