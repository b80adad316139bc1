"""Translation of lines of text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, final, overload

from triptych.errors import UsageError
from triptych.guesses import about_item
from triptych.literals import Precision, SpecialTokens
from triptych.running.decoding.decoder import Decoder, Group
from triptych.running.decoding.hypotheses import Hypothesis
from triptych.running.decoding_options import SearchOptions
from triptych.running.input_limits import LONGEST_LINE
from triptych.running.text.given import as_lines
from triptych.running.text.sentence_tokenizers import TokenizerPair
from triptych.running.text.sentences import (
    Spaced,
    cut_to_fit,
    split_sentences,
    without_invisible,
)

if TYPE_CHECKING:
    from triptych.core.models import EncoderDecoder
    from triptych.running.decoding.glossary import Glossary
    from triptych.running.decoding.token_loop import Asked, Loop
    from triptych.running.text.shortlists import Shortlist

_LINE_BREAKS = {ord("\n"): " ", ord("\r"): " "}


Ending = Literal["stop", "length"]


@dataclass(frozen=True)
class Candidate:
    """One translation of a line.

    Attributes:
        text: detokenised translation, in one line.
        pieces: readable tokens.
        score: log-probability over the length penalty; sum over the pieces of a long line. With a repetition
            penalty, of the penalised probabilities.
        log_prob: natural logarithm of the probability.
        finish: "stop" if the model ended every part of the translation; "length" if one was cut off at the
            limit, `max_extra_tokens` more tokens than its source or the model's positions.
    """

    text: str
    pieces: tuple[str, ...]
    score: float
    log_prob: float
    finish: Ending = "stop"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Translation:
    """A translated line.

    Attributes:
        source: source line.
        candidates: candidate translations, best first, with the white space around and between the sentences
            of the line; for a line without text, its white space with score 0.
        num_pieces: number of pieces in which the line was translated; 0 for an empty line, more than 1 for
            several sentences, or for a sentence past the model's limit.
        parts: translations of the sentences of a line with several, in order; empty for any other line.
    """

    source: str
    candidates: tuple[Candidate, ...]
    num_pieces: int
    parts: tuple["Translation", ...] = ()

    @property
    def text(self) -> str:
        """Best translation."""
        return self.candidates[0].text

    @property
    def finish(self) -> Ending:
        """End of the best translation: "stop", or "length" if it was cut off at the limit."""
        return self.candidates[0].finish

    @property
    def sentences(self) -> tuple["Translation", ...]:
        """Translations of the line's sentences: its parts, or itself."""
        return self.parts or (self,)

    def __str__(self) -> str:
        return self.text

    if not TYPE_CHECKING:

        def __getitem__(self, key: object) -> NoReturn:
            raise TypeError(about_item("translation", "translate"))


class _Cut(NamedTuple):
    """A line cut into sentences, and the sentences cut into pieces for translation."""

    line: str
    sentences: Spaced
    pieces: tuple[Spaced, ...]  # of each sentence
    encoded: list[list[int]]  # token ids of all pieces, in order


@final
class Translator:
    """Translation with an encoder-decoder and its tokenizers."""

    def __init__(
        self,
        model: "EncoderDecoder | None",
        tokenizers: TokenizerPair,
        options: SearchOptions | None = None,
        batch_tokens: int = 2048,
        *,
        batch_sentences: int | None = None,
        precision: Precision = "fp32",
        workers: int = 1,
        decoder: Decoder[SearchOptions] | None = None,
        shortlist: "Shortlist | None" = None,
        ensemble: "Sequence[EncoderDecoder]" = (),
    ) -> None:
        """Prepare translation by `decoder`, or else by triptych's with the other arguments.

        With an `ensemble`, probabilities are averaged over it and `model`; its models must have the
        vocabulary of `model`. A `decoder` may do without the model.
        """
        self.models = () if model is None else (model, *ensemble)
        self.tokenizers = tokenizers
        if decoder is None:
            from triptych.running.decoding.sentence_decoder import SentenceDecoder

            decoder = SentenceDecoder(
                self.models,
                tokenizers.source.eos_id,
                tokenizers.target.rules,
                options or SearchOptions(),
                precision,
                shortlist=shortlist,
                batch_tokens=batch_tokens,
                batch_sentences=batch_sentences,
                workers=workers,
            )
        self.decoder: Decoder[SearchOptions] = decoder
        self.batch_tokens = batch_tokens
        self.precision: Precision = precision
        self.shortlist = shortlist
        self._glossary: Glossary | None = None
        self._special_tokens: SpecialTokens = "tokens"

    @property
    def model(self) -> "EncoderDecoder":
        """The model, the first of an ensemble."""
        return self.models[0]

    @property
    def options(self) -> SearchOptions:
        """Search options of the decoder."""
        return self.decoder.options

    @property
    def engine(self) -> Literal["triptych", "ctranslate2"]:
        """Decoding library."""
        return self.decoder.library

    @property
    def workers(self) -> int:
        """Number of processes that translate, or of CTranslate2's threads."""
        return self.decoder.workers

    @property
    def max_source_tokens(self) -> int:
        """Maximum length of a sentence translated whole, in tokens without the end of sentence."""
        limits = self.options.max_source_tokens, self.decoder.max_source_tokens
        return min(
            (limit for limit in limits if limit is not None), default=LONGEST_LINE
        )

    @overload
    def translate(self, lines: str) -> Translation: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, lines: Iterable[str]) -> list[Translation]: ...

    def translate(self, lines: str | Iterable[str]) -> Translation | list[Translation]:
        """Translate a line, or several lines in their order.

        The sentences of a line are translated one by one and joined with their original spacing, unless the
        options differ. A sentence longer than `max_source_tokens` is cut, between clauses where possible,
        without losing any part.
        """
        found = list(self.translate_stream([as_lines(lines)]))
        return found[0] if isinstance(lines, str) else found

    def translate_stream(
        self, batches: Iterable[str | Sequence[str]]
    ) -> Iterator[Translation]:
        """Translate batches of lines and yield translations in order, without waiting for later batches."""
        several = (
            as_lines(batch)
            for batch in ([batches] if isinstance(batches, str) else batches)
        )
        for group in self.decoder.decode_groups(several, self._group):
            yield from self._finished(group)

    def loop(self, most_rows: int) -> "Loop | None":
        """Return a loop for incoming requests of `begin`; None for another library."""
        return self.decoder.loop(most_rows, self.batch_tokens)

    def begin(self, line: str, options: SearchOptions) -> "Asked[Translation]":
        """Return a request to translate a line, for a loop."""
        from triptych.running.decoding.token_loop import Asked

        cut = self._cut(line)
        pieces = [self.decoder.begin(ids, options) for ids in cut.encoded]
        texts = chain.from_iterable(piece.texts for piece in pieces)
        return Asked(
            [*texts],
            lambda: self._assemble(cut, iter([piece.result() for piece in pieces])),
        )

    def with_glossary(self, terms: Mapping[str, str]) -> "Translator":
        """Return a copy of the translator with a glossary of source terms and required translations."""
        if self.engine != "triptych" or self.shortlist is not None:
            raise UsageError(
                "a glossary goes with --engine triptych, and without a shortlist"
            )
        if not self.options.sampling.is_greedy:
            raise UsageError(
                "a glossary is searched with a beam: leave out the temperature"
            )
        from triptych.running.decoding.glossary import Glossary

        own = copy(self)
        own._glossary = Glossary(terms, self.tokenizers.target)
        return own

    def with_special_tokens(self, special_tokens: SpecialTokens) -> "Translator":
        """Return a copy of the translator with another treatment of special tokens in a sentence."""
        own = copy(self)
        own._special_tokens = special_tokens
        return own

    def without_scores(self) -> "Translator":
        """Return a copy of the translator for texts alone: where scores cost time, they are NaN."""
        own = copy(self)
        own.decoder = self.decoder.without_scores()
        return own

    def reading_ahead(self) -> "Translator":
        """Return a copy with a `translate_stream` for batches at hand: it may wait for a later batch."""
        own = copy(self)
        own.decoder = self.decoder.reading_ahead()
        return own

    def start_workers(self) -> None:
        """Start the other workers and wait until they are ready, instead of starting them on demand."""
        self.decoder.start_workers()

    def close(self) -> None:
        """Stop the other workers; they restart on demand."""
        self.decoder.close()

    def __enter__(self) -> "Translator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _group(self, lines: Sequence[str]) -> Group:
        cuts = [self._cut(line) for line in lines]
        return Group(cuts, [*chain.from_iterable(cut.encoded for cut in cuts)])

    def _finished(self, group: Group) -> list[Translation]:
        found = iter(group.found)
        return [self._assemble(cut, found) for cut in group.given]

    def _cut(self, line: str) -> _Cut:
        """Cut a line into sentences and pieces; a leading code such as `>>de<<` goes before each piece."""
        code = self.tokenizers.source.opening(line.strip())
        text = line.strip()[len(code) :].strip() if code else line
        sentences = Spaced.of(split_sentences(text) if self.options.split else [text])
        if code and not sentences.texts:
            sentences = Spaced(("",), ("", ""))
        encoded = list[list[int]]()
        pieces = tuple(
            self._encode_pieces(sentence, code, encoded) for sentence in sentences.texts
        )
        return _Cut(line, sentences, pieces, encoded)

    def _encode_pieces(
        self, sentence: str, code: str, encoded: list[list[int]]
    ) -> Spaced:
        """Cut a sentence into pieces that the model takes, and add their token ids to `encoded`."""
        sentence = without_invisible(sentence)
        encode = partial(
            self.tokenizers.source.sentence_ids, special_tokens=self._special_tokens
        )
        limit = self.max_source_tokens
        glossary = self._glossary
        ids = encode(code + sentence)
        pieces = Spaced((sentence,), ("", ""))
        found = [ids]
        if len(ids) > limit:
            pieces = Spaced.of(
                cut_to_fit(sentence, lambda text: len(encode(code + text)) <= limit)
            )
            found = [encode(code + text) for text in pieces.texts]
        for text, own in zip(pieces.texts, found, strict=True):
            encoded.append(
                own if glossary is None else glossary.sentence(code + text, own)
            )
        return pieces

    def search_tokens(self, sentences: Sequence[list[int]]) -> list[list[Hypothesis]]:
        """Search sentences given as token ids; return hypotheses of each sentence by falling score."""
        return self.decoder.decode(sentences)

    def _assemble(self, cut: _Cut, found: Iterator[list[Hypothesis]]) -> Translation:
        several = len(cut.sentences.texts) > 1
        parts = [
            self._sentence(text, pieces, [next(found) for _ in pieces.texts])
            for text, pieces in zip(cut.sentences.texts, cut.pieces, strict=True)
        ]
        return Translation(
            cut.line,
            _join(cut.sentences, [part.candidates for part in parts]),
            sum(part.num_pieces for part in parts),
            tuple(parts) if several else (),
        )

    def _sentence(
        self, text: str, pieces: Spaced, found: Sequence[list[Hypothesis]]
    ) -> Translation:
        candidates = _join(
            pieces, [[*map(self._candidate, hypotheses)] for hypotheses in found]
        )
        return Translation(text, candidates, len(found))

    def _candidate(self, hypothesis: Hypothesis) -> Candidate:
        tokenizer = self.tokenizers.target
        return Candidate(
            # A model trained on multi-line records may output line breaks; a translation is one line.
            text=tokenizer.decode([hypothesis.ids])[0].translate(_LINE_BREAKS),
            pieces=tuple(tokenizer.pieces(hypothesis.ids)),
            score=hypothesis.score,
            log_prob=hypothesis.log_prob,
            finish="length" if hypothesis.finish in ("length", "positions") else "stop",
        )


def _join(
    spaced: Spaced, found: Sequence[Sequence[Candidate]]
) -> tuple[Candidate, ...]:
    """Join the n-th best translations of all parts to the n-th best of the whole, with its white space."""
    ranks = range(min(map(len, found), default=1))
    return tuple(
        _joined(spaced, [candidates[rank] for candidates in found]) for rank in ranks
    )


def _joined(spaced: Spaced, candidates: Sequence[Candidate]) -> Candidate:
    if len(candidates) == 1 and not any(spaced.spaces):
        return candidates[0]
    return Candidate(
        text=spaced.join([candidate.text for candidate in candidates]),
        pieces=tuple(chain.from_iterable(candidate.pieces for candidate in candidates)),
        score=sum((candidate.score for candidate in candidates), start=0.0),
        log_prob=sum((candidate.log_prob for candidate in candidates), start=0.0),
        finish="length"
        if any(candidate.finish == "length" for candidate in candidates)
        else "stop",
    )
