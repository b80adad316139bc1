"""Text generation: continuations as text, with stop strings and streaming."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, final

from triptych.core.models import LanguageModel
from triptych.errors import UsageError
from triptych.guesses import about_item
from triptych.literals import Precision, SpecialTokens
from triptych.printable import shortened
from triptych.running.changes import Change, ValueChange
from triptych.running.decoding.decoder import Decoder, Ends
from triptych.running.decoding.hypotheses import Finish, Hypothesis, Top
from triptych.running.decoding.prompt_decoder import PromptDecoder
from triptych.running.decoding.token_loop import Asked, Loop
from triptych.running.decoding_options import GenerationOptions
from triptych.running.input_limits import check_vocabulary
from triptych.running.text.encoding import encode_texts
from triptych.running.text.given import Text, which_of
from triptych.running.text.tokenizers import (
    StreamDecoder,
    Tokenizer,
)

# The last tokens of the prompt are decoded first: the space before the first new token depends on them.
_BEFORE = 8
_SHOWN = 200  # characters of a text in a repr


@dataclass(frozen=True)
class Continuation:
    """A continuation of a prompt."""

    text: str  # text of the continuation, up to a stop string
    ids: tuple[int, ...]  # tokens, including the tokens of a stop string
    pieces: tuple[str, ...]  # readable tokens
    log_probs: tuple[
        float, ...
    ]  # log-probabilities of the tokens and of a stop token; see `NewToken`
    finish: Finish  # reason for the end; see `NewToken`
    tops: tuple[Top, ...]  # if requested, most probable tokens at each position
    score: float  # sum of `log_probs`, divided by the length penalty in beam search

    def __repr__(self) -> str:
        text = shortened(self.text, _SHOWN)
        count = len(self.ids)
        return f"Continuation({text!r}: {count} tokens, finish {self.finish!r}, score {self.score:.4g})"

    def __str__(self) -> str:
        return self.text

    if not TYPE_CHECKING:

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError(about_item("continuation", "generate"))


@final
class StreamedText(Iterator[str]):
    """The text of a continuation in parts, while it is generated.

    Attributes:
        finish: reason for the end, as in `Continuation`; None before the end.
    """

    def __init__(self, parts: Generator[str, None, Finish | None]) -> None:
        """Use `Model.generate` with `stream=True`."""
        self._parts = parts
        self.finish: Finish | None = None

    def __iter__(self) -> "StreamedText":
        return self

    def __next__(self) -> str:
        try:
            return next(self._parts)
        except StopIteration as end:
            self.finish = end.value or self.finish
            raise


@final
class TextStream:
    """Incremental text of a continuation, with detection of stop strings."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.text = ""
        self.is_over = False
        self._stops = stops
        self._held = ""
        self._decoder = StreamDecoder(tokenizer)
        for token in prompt[-_BEFORE:]:
            self._decoder.push(token)

    def push(self, token: int) -> str:
        """Append a token and return the newly certain text."""
        return self._given_out(self._decoder.push(token))

    def finish(self) -> str:
        """Return the remaining text at the end of the continuation."""
        if self.is_over:
            return ""
        rest = self._given_out(self._decoder.finish())
        held = "" if self.is_over else self._held
        self._held = ""
        self.text += held
        return rest + held

    def _given_out(self, new: str) -> str:
        # A possible start of a stop string is kept back until the next tokens decide.
        pending = self._held + new
        self._held = ""
        found = [place for stop in self._stops if (place := pending.find(stop)) >= 0]
        if found:
            self.is_over, pending = True, pending[: min(found)]
        elif self._stops:
            longest = max(
                (_beginning(pending, stop) for stop in self._stops), default=0
            )
            pending, self._held = (
                pending[: len(pending) - longest],
                pending[len(pending) - longest :],
            )
        self.text += pending
        return pending


def _beginning(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` among the proper prefixes of `stop`."""
    return next(
        n
        for n in range(min(len(text), len(stop) - 1), -1, -1)
        if text.endswith(stop[:n])
    )


@final
class TextGenerator:
    """Text generation with a language model and its tokenizer."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        precision: Precision = "fp32",
        end_ids: Sequence[int] = (),
        begin_id: int | None = None,
        batch_rows: int = 32,
        decoder: Decoder[GenerationOptions] | None = None,
    ) -> None:
        """Continue texts by `decoder`, or else by triptych's, with at most `batch_rows` texts at a time."""
        check_vocabulary(model, tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.precision = precision
        self._begin_id = begin_id
        # End tokens of the checkpoint replace the tokenizer's.
        usual = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self.end_ids = tuple(dict.fromkeys(end_ids)) or usual
        self.decoder = decoder or PromptDecoder(
            model, tokenizer.vocab_size, precision, batch_rows=batch_rows
        )

    def encode(
        self,
        prompt: Text,
        *,
        chat: bool = False,
        special_tokens: SpecialTokens = "tokens",
    ) -> list[int]:
        """Encode a prompt; an empty prompt becomes the start token."""
        (ids,) = self.encode_prompts([prompt], chat=chat, special_tokens=special_tokens)
        return ids

    def encode_prompts(
        self,
        prompts: Sequence[Text],
        *,
        chat: bool = False,
        special_tokens: SpecialTokens = "tokens",
    ) -> list[list[int]]:
        """Encode prompts; see `encode`."""
        if chat:
            return [self._chat_ids(prompt, special_tokens) for prompt in prompts]
        found = encode_texts(
            self.tokenizer,
            prompts,
            special_tokens,
            vocab_size=self.model.vocab_size,
            begin_id=self._begin_id,
        )
        for number, ids in enumerate(found, start=1):
            if not ids:
                raise UsageError(
                    f"{which_of('prompt', number, found)} is empty: give it some text (the tokenizer has no "
                    "token that begins one)"
                )
        return found

    def _chat_ids(self, prompt: Text, special_tokens: SpecialTokens) -> list[int]:
        if not isinstance(prompt, str):
            raise UsageError(
                "chat puts a text into a template: give a string, or leave out chat"
            )
        message = {"role": "user", "content": prompt}
        return self.tokenizer.chat_ids([message], special_tokens=special_tokens)

    def generate(
        self,
        prompts: Sequence[Text],
        options: GenerationOptions,
        *,
        chat: bool = False,
        special_tokens: SpecialTokens = "tokens",
    ) -> list[list[Continuation]]:
        """Continue prompts; prompts of similar length share a batch."""
        ids = self.encode_prompts(prompts, chat=chat, special_tokens=special_tokens)
        return self.continue_tokens(ids, options)

    def continue_tokens(
        self,
        texts: Sequence[Sequence[int]],
        options: GenerationOptions,
        tell: Callable[[int, str], None] = lambda row, text: None,
    ) -> list[list[Continuation]]:
        """Continue texts given as token ids; see `generate`.

        Unless a beam is searched, `tell` is called after each token with a row and the newly certain text.
        The row is the number of the text times `num_samples`, plus the number of the sample.
        """
        options = self._with_ends(options)
        count = options.num_samples
        # A stream decodes the tokens of a row while it grows, so that a stop string ends the row.
        streams, ends = self._streams(texts, options, tell)
        found = self.decoder.decode(texts, options, ends)
        return [
            self._continuations(
                of_prompt, streams[i * count : (i + 1) * count], options
            )
            for i, of_prompt in enumerate(found)
        ]

    def loop(self, most_rows: int, most_tokens: int) -> Loop | None:
        """Return a loop for incoming requests of `begin`; None for another library."""
        return self.decoder.loop(most_rows, most_tokens)

    def begin(
        self,
        ids: Sequence[int],
        options: GenerationOptions,
        tell: Callable[[int, str], None] = lambda sample, text: None,
    ) -> Asked[list[Continuation]]:
        """Return a request to continue a text; `tell` is called with a sample's number and its new text."""
        options = self._with_ends(options)
        streams, ends = self._streams([ids], options, tell)
        asked = self.decoder.begin(ids, options, ends)
        return Asked(
            asked.texts, lambda: self._continuations(asked.result(), streams, options)
        )

    def stream(
        self,
        prompt: Text,
        options: GenerationOptions,
        *,
        chat: bool = False,
        special_tokens: SpecialTokens = "tokens",
    ) -> StreamedText:
        """Continue a prompt; the iterator yields the text in parts during generation."""
        if options.beam_size > 1 or options.num_samples > 1:
            raise ValueError("one sample without a beam comes token by token")
        return StreamedText(self._parts(prompt, options, chat, special_tokens))

    def _parts(
        self,
        prompt: Text,
        options: GenerationOptions,
        chat: bool,
        special_tokens: SpecialTokens,
    ) -> Generator[str, None, Finish | None]:
        """Yield the text in parts; return why it ended."""
        ids = self.encode(prompt, chat=chat, special_tokens=special_tokens)
        options = self._with_ends(options)
        new = deque[str]()
        (text,), ends = self._streams(
            [ids], options, lambda row, text: new.append(text)
        )
        steps = self.decoder.stream(ids, options, ends)
        finish = None
        is_open = True
        while is_open:
            # A step fills `new` through the callback above.
            try:
                next(steps)
            except StopIteration as end:
                finish = end.value
                is_open = False
            while new:
                if part := new.popleft():
                    yield part
        if rest := text.finish():
            yield rest
        return "text" if text.is_over else finish

    def _with_ends(self, options: GenerationOptions) -> GenerationOptions:
        sampling = options.sampling
        if sampling.rules.min_new_tokens or sampling.rules.min_length:
            sampling = replace(
                sampling, rules=replace(sampling.rules, ends=self.end_ids)
            )
        return replace(
            options,
            sampling=sampling,
            stop_ids=tuple({*options.stop_ids, *self.end_ids}),
        )

    def _streams(
        self,
        texts: Sequence[Sequence[int]],
        options: GenerationOptions,
        tell: Callable[[int, str], None],
    ) -> tuple[list[TextStream], Ends]:
        """Return the text stream of each sample, and a callback to append a token and detect the end."""
        streams = list[TextStream]()
        for ids in texts:
            for _ in range(options.num_samples):
                streams.append(TextStream(self.tokenizer, ids, options.stop_texts))

        def ends(row: int, token: int) -> bool:
            tell(row, streams[row].push(token))
            return streams[row].is_over

        return streams, ends

    def _continuations(
        self,
        found: Sequence[Hypothesis],
        streams: Sequence[TextStream],
        options: GenerationOptions,
    ) -> list[Continuation]:
        continuations = []
        for one, text in zip(found, streams, strict=False):
            # Samples end at stop strings in `ends`; beam search knows tokens only and is cut here.
            own = _cut_at_stop(one, text) if options.beam_size > 1 else one
            text.finish()
            finish = "text" if text.is_over else own.finish
            assert finish is not None, "it has ended"
            pieces = tuple(self.tokenizer.pieces(own.ids))
            continuations.append(
                Continuation(
                    text=text.text,
                    ids=own.ids,
                    pieces=pieces,
                    log_probs=own.log_probs,
                    finish=finish,
                    tops=own.tops,
                    score=own.score,
                )
            )
        return continuations


def continue_changed(
    ids: Sequence[list[int]],
    by: TextGenerator,
    options: GenerationOptions,
    changes: Sequence[Change],
) -> list[list[Continuation]]:
    """Continue texts; if activations are edited by position, only texts of equal length share a batch."""
    if not any(isinstance(change, ValueChange) for change in changes):
        return by.continue_tokens(ids, options)
    found: dict[int, list[Continuation]] = {}
    for length in sorted({len(own) for own in ids}):
        places = [place for place, own in enumerate(ids) if len(own) == length]
        found |= dict(
            zip(
                places,
                by.continue_tokens([ids[i] for i in places], options),
                strict=True,
            )
        )
    return [found[place] for place in range(len(ids))]


def _cut_at_stop(found: Hypothesis, text: TextStream) -> Hypothesis:
    """Cut a hypothesis of a beam at a stop string, which beam search ignores."""
    for count, token in enumerate(found.ids, start=1):
        text.push(token)
        if text.is_over:
            return found._replace(
                ids=found.ids[:count], log_probs=found.log_probs[:count]
            )
    return found
