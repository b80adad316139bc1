"""Translation of lines of text."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, final, overload

from triptych import thresholds
from triptych.core.models import EncoderDecoder
from triptych.errors import UsageError
from triptych.literals import Precision, SpecialTokens
from triptych.running.batching import batches_of_like_length
from triptych.running.decoding.batch_searcher import BatchSearcher
from triptych.running.decoding.glossary import Glossary
from triptych.running.decoding.linear_maps import unsupported_precision
from triptych.running.decoding.search import Hypothesis
from triptych.running.decoding.token_loop import Asked, Loop
from triptych.running.decoding.workers import Searcher, WorkerPool
from triptych.running.decoding_options import SearchOptions
from triptych.running.limits import LONGEST_LINE
from triptych.running.text import OutputRules, TokenizerPair, as_lines
from triptych.running.text.shortlists import Shortlist
from triptych.threads import Ahead, torch_threads

# Maximum number of groups of lines read ahead, and of groups in translation.
_GROUPS_READ_AHEAD = 2
_GROUPS_IN_HAND = 3
_LINE_BREAKS = {ord("\n"): " ", ord("\r"): " "}


@dataclass(frozen=True)
class Candidate:
    """One translation of a line."""

    text: str  # detokenised translation, in one line
    pieces: tuple[str, ...]  # readable tokens
    score: float  # log-probability over the length penalty; sum over the pieces of a long line
    log_prob: float  # natural logarithm of the probability


@dataclass(frozen=True)
class Translation:
    """A translated line.

    Attributes:
        source: source line.
        candidates: candidate translations, best first; for an empty line, one empty translation of score 0.
        num_pieces: number of pieces in which the line was translated; 0 for an empty line, more than 1 only
            for a line past the model's limit.
    """

    source: str
    candidates: tuple[Candidate, ...]
    num_pieces: int

    @property
    def text(self) -> str:
        """Best translation."""
        return self.candidates[0].text


@final
class Translator:
    """Translation with an encoder-decoder and its tokenizers."""

    def __init__(
        self,
        model: EncoderDecoder,
        tokenizers: TokenizerPair,
        options: SearchOptions | None = None,
        batch_tokens: int = 2048,
        *,
        batch_sentences: int | None = None,
        precision: Precision = "fp32",
        workers: int = 1,
        searcher: Searcher | None = None,
        shortlist: Shortlist | None = None,
        ensemble: Sequence[EncoderDecoder] = (),
    ) -> None:
        """Prepare translation; with an `ensemble`, probabilities are averaged over it and `model`.

        Models of an ensemble must have the vocabulary of `model`.
        """
        if workers < 1:
            raise UsageError(f"workers is {workers}: at least 1 is needed")
        self.model = model
        self.models = (model, *ensemble)
        self.tokenizers = tokenizers
        self.options = options or SearchOptions()
        self.batch_tokens = batch_tokens
        self.batch_sentences = batch_sentences
        self.precision: Precision = precision
        self.shortlist = shortlist
        device = next(model.parameters()).device
        self.workers = workers if searcher is not None or device.type == "cpu" else 1
        self._other_searcher = searcher
        self._pool: WorkerPool | None = None
        self._searcher: BatchSearcher | None = None
        self._made_of: object = None
        self._glossary: Glossary | None = None
        self._special_tokens: SpecialTokens = "tokens"
        if searcher is None and (reason := unsupported_precision(precision, device)):
            raise UsageError(f"this model cannot be run in {precision}: {reason}")

    @property
    def engine(self) -> Literal["triptych", "ctranslate2"]:
        """Decoding library."""
        return "triptych" if self._other_searcher is None else "ctranslate2"

    @property
    def max_source_tokens(self) -> int:
        """Maximum length of a line translated whole, in tokens without the end of sentence."""
        limits = self.options.max_source_tokens, *(model.max_source_tokens for model in self.models)
        return min((limit for limit in limits if limit is not None), default=LONGEST_LINE)

    @overload
    def translate(self, lines: str) -> Translation: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, lines: Iterable[str]) -> list[Translation]: ...

    def translate(self, lines: str | Iterable[str]) -> Translation | list[Translation]:
        """Translate a line, or several lines in their order.

        An empty line gives an empty translation. A line longer than `max_source_tokens` is split, between
        sentences where possible, without losing any part.
        """
        found = list(self.translate_stream([as_lines(lines)]))
        return found[0] if isinstance(lines, str) else found

    def translate_stream(self, batches: Iterable[str | Sequence[str]]) -> Iterator[Translation]:
        """Translate batches of lines and yield translations in order, without waiting for later batches."""
        several = (as_lines(batch) for batch in ([batches] if isinstance(batches, str) else batches))
        if self.workers > 1 and self._other_searcher is None:
            yield from self._translated_side_by_side(several)
        else:
            for group in map(self._group, several):
                group.found = self.search_tokens(group.sentences)
                yield from self._finished(group)

    def loop(self, most_rows: int) -> Loop | None:
        """Return a loop for incoming requests of `begin`; None for another library."""
        if self._other_searcher is not None:
            return None
        return Loop(self._ready_searcher().engine, most_rows=most_rows, most_tokens=self.batch_tokens)

    def begin(self, line: str, options: SearchOptions) -> Asked[Translation]:
        """Return a request to translate a line, for a loop."""
        # Changed weights are detected only when a loop is created: the check costs as much as a small step.
        searcher = self._searcher or self._ready_searcher()
        texts = [searcher.text(ids, options) for ids in self._pieces(line)]
        return Asked(texts, lambda: self._assemble(line, [text.best[: options.num_best] for text in texts]))

    def with_glossary(self, terms: Mapping[str, str]) -> "Translator":
        """Return a copy of the translator with a glossary of source terms and required translations."""
        if self._other_searcher is not None or self.shortlist is not None:
            raise UsageError("a glossary goes with --engine triptych, and without a shortlist")
        own = copy(self)
        own._glossary = Glossary(terms, self.tokenizers.target)
        return own

    def with_special_tokens(self, special_tokens: SpecialTokens) -> "Translator":
        """Return a copy of the translator with another treatment of special tokens in a sentence."""
        own = copy(self)
        own._special_tokens = special_tokens
        return own

    def start_workers(self) -> None:
        """Start the other workers and wait until they are ready, instead of starting them on demand."""
        if self.workers > 1 and self._other_searcher is None:
            pool = self._ready_pool()
            pool.start(self.workers - 1)
            pool.wait_until_ready()

    def close(self) -> None:
        """Stop the other workers; they restart on demand."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> "Translator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _translated_side_by_side(self, batches: Iterable[Sequence[str]]) -> Iterator[Translation]:
        pool = self._ready_pool()
        arriving = Ahead(batches, depth=_GROUPS_READ_AHEAD)
        groups: deque[_Group] = deque()
        failure: Exception | None = None
        try:
            while True:
                with torch_threads(1):
                    # Wait for new lines only if no group is in translation.
                    while len(groups) < _GROUPS_IN_HAND and (not groups or arriving.has_more):
                        try:
                            lines = next(arriving, None)
                        except Exception as error:  # noqa: BLE001 (raised when the lines before it are done)
                            failure = error
                            lines = None
                        if lines is None:
                            break
                        groups.append(self._group(lines))
                        for part in self._batches(groups[-1].sentences):
                            pool.submit((groups[-1], part), [groups[-1].sentences[i] for i in part])
                    if not groups:
                        if failure is not None:
                            raise failure
                        return
                    if sum(group.missing for group in groups) >= thresholds.SENTENCES_WORTH_A_WORKER:
                        pool.start(self.workers - 1)
                    while groups[0].missing:
                        (group, part), results = pool.next()
                        for i, hypotheses in zip(part, results, strict=True):
                            group.found[i] = hypotheses
                        group.missing -= len(part)
                        if arriving.has_more and len(groups) < _GROUPS_IN_HAND:
                            break
                while groups and not groups[0].missing:
                    yield from self._finished(groups.popleft())
        finally:
            arriving.close(waits=False)  # the next line may never arrive
            if any(group.missing for group in groups):
                self.close()  # the caller stopped early: cancel the workers' batches

    def _group(self, lines: Sequence[str]) -> "_Group":
        pieces = [self._pieces(line) for line in lines]
        sentences = [ids for of_line in pieces for ids in of_line]
        return _Group(lines, [*map(len, pieces)], sentences, [[] for _ in sentences], len(sentences))

    def _finished(self, group: "_Group") -> list[Translation]:
        found = iter(group.found)
        return [
            self._assemble(line, [*islice(found, count)])
            for line, count in zip(group.lines, group.num_pieces, strict=True)
        ]

    def _ready_pool(self) -> WorkerPool:
        self._forget_what_is_stale()
        if self._pool is None:
            self._pool = WorkerPool(BatchSearcher, self._searcher_arguments())
        return self._pool

    def _ready_searcher(self) -> BatchSearcher:
        self._forget_what_is_stale()
        if self._searcher is None:
            self._searcher = BatchSearcher(*self._searcher_arguments())
        return self._searcher

    def _forget_what_is_stale(self) -> None:
        """Discard searcher and workers if the model's weights have changed."""
        if self._made_of != (version := _version(self.models)):
            self.close()
            self._searcher = None
            self._made_of = version

    def _searcher_arguments(
        self,
    ) -> tuple[Sequence[EncoderDecoder], int, SearchOptions, Precision, OutputRules, Shortlist | None]:
        src = self.tokenizers.source
        tgt = self.tokenizers.target
        return self.models, src.eos_id, self.options, self.precision, tgt.rules, self.shortlist

    def _pieces(self, line: str) -> list[list[int]]:
        glossary = self._glossary
        return [ids if glossary is None else glossary.sentence(text, ids) for text, ids in self._cut(line)]

    def _cut(self, line: str) -> list[tuple[str, list[int]]]:
        line = line.strip()
        if not line:
            return []
        source = self.tokenizers.source
        encode = partial(source.sentence_ids, special_tokens=self._special_tokens)
        ids = encode(line)
        limit = self.max_source_tokens
        if len(ids) <= limit:
            return [(line, ids)]
        code = source.opening(line)
        parts = split_line(line[len(code) :].strip(), lambda text: len(encode(code + text)) <= limit)
        return [(code + part, encode(code + part)) for part in parts]

    def search_tokens(self, sentences: Sequence[list[int]]) -> list[list[Hypothesis]]:
        """Search sentences given as token ids; return hypotheses of each sentence by falling score."""
        if self._other_searcher is not None:
            return self._other_searcher(sentences) if sentences else []
        searcher = self._ready_searcher()
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        for batch in self._batches(sentences):
            for i, hypotheses in zip(batch, searcher([sentences[i] for i in batch]), strict=True):
                results[i] = hypotheses
        return results

    def _batches(self, sentences: Sequence[list[int]]) -> Iterator[list[int]]:
        return batches_of_like_length(sentences, self.batch_tokens, self.batch_sentences)

    def _assemble(self, line: str, found: list[list[Hypothesis]]) -> Translation:
        # The n-th best translation of a split line joins the n-th best of every piece. An empty line has one
        # empty translation.
        num_candidates = min((len(hypotheses) for hypotheses in found), default=1)
        candidates = tuple(
            self._candidate([hypotheses[rank] for hypotheses in found]) for rank in range(num_candidates)
        )
        return Translation(line, candidates, len(found))

    def _candidate(self, hypotheses: list[Hypothesis]) -> Candidate:
        tokenizer = self.tokenizers.target
        texts = tokenizer.decode([hypothesis.ids for hypothesis in hypotheses])
        return Candidate(
            # A model trained on multi-line records may output line breaks; a translation is one line.
            text=" ".join(text for text in texts if text).translate(_LINE_BREAKS),
            pieces=tuple(piece for h in hypotheses for piece in tokenizer.pieces(h.ids)),
            score=sum((h.score for h in hypotheses), start=0.0),
            log_prob=sum((h.log_prob for h in hypotheses), start=0.0),
        )


@dataclass
class _Group:
    """A batch of lines in translation."""

    lines: Sequence[str]
    num_pieces: list[int]  # number of pieces of each line
    sentences: list[list[int]]
    found: list[list[Hypothesis]]
    missing: int


def _version(models: Sequence[EncoderDecoder]) -> object:
    """Return a fingerprint of the weights: addresses and version counters of all parameters."""
    parameters = (parameter for model in models for parameter in model.parameters())
    return tuple((parameter.data_ptr(), parameter._version) for parameter in parameters)


# Split points in order of preference: ends of sentences, ends of clauses, spaces. Punctuation is kept.
_BOUNDARIES = (re.compile(r"(?<=[.!?…。！？])\s+"), re.compile(r"(?<=[,;:–—])\s+"), re.compile(r"\s+"))


def split_line(text: str, fits: Callable[[str], bool], level: int = 0) -> list[str]:
    """Split a line into pieces that fit: between sentences, else clauses, else words, else anywhere."""
    if fits(text) or len(text) <= 1:
        return [text]
    if level == len(_BOUNDARIES):
        middle = len(text) // 2
        return split_line(text[:middle], fits, level) + split_line(text[middle:], fits, level)
    # Neighbouring parts are joined as long as they fit; longer parts are split at the next level.
    parts = [part for part in _BOUNDARIES[level].split(text) if part]
    joined: list[str] = []
    for part in parts:
        if joined and fits(f"{joined[-1]} {part}"):
            joined[-1] = f"{joined[-1]} {part}"
        else:
            joined.append(part)
    return [piece for part in joined for piece in split_line(part, fits, level + 1)]
