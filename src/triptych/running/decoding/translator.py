"""Translation of lines of text."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Literal, final, overload

from triptych.core.models import EncoderDecoder
from triptych.errors import UsageError
from triptych.literals import Precision, SpecialTokens
from triptych.running.decoding.decoder import Decoder, Group
from triptych.running.decoding.glossary import Glossary
from triptych.running.decoding.search import Hypothesis
from triptych.running.decoding.sentence_decoder import SentenceDecoder
from triptych.running.decoding.token_loop import Asked, Loop
from triptych.running.decoding_options import SearchOptions
from triptych.running.input_limits import LONGEST_LINE
from triptych.running.text.given import as_lines
from triptych.running.text.sentence_tokenizers import TokenizerPair
from triptych.running.text.shortlists import Shortlist

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
        decoder: Decoder[SearchOptions] | None = None,
        shortlist: Shortlist | None = None,
        ensemble: Sequence[EncoderDecoder] = (),
    ) -> None:
        """Prepare translation by `decoder`, or else by triptych's with the other arguments.

        With an `ensemble`, probabilities are averaged over it and `model`; its models must have the
        vocabulary of `model`.
        """
        self.model = model
        self.models = (model, *ensemble)
        self.tokenizers = tokenizers
        self.decoder = decoder or SentenceDecoder(
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
        self.options = self.decoder.options
        self.batch_tokens = batch_tokens
        self.precision: Precision = precision
        self.shortlist = shortlist
        self._glossary: Glossary | None = None
        self._special_tokens: SpecialTokens = "tokens"

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
        for group in self.decoder.decode_groups(several, self._group):
            yield from self._finished(group)

    def loop(self, most_rows: int) -> Loop | None:
        """Return a loop for incoming requests of `begin`; None for another library."""
        return self.decoder.loop(most_rows, self.batch_tokens)

    def begin(self, line: str, options: SearchOptions) -> Asked[Translation]:
        """Return a request to translate a line, for a loop."""
        pieces = [self.decoder.begin(ids, options) for ids in self._pieces(line)]
        texts = chain.from_iterable(piece.texts for piece in pieces)
        return Asked([*texts], lambda: self._assemble(line, [piece.result() for piece in pieces]))

    def with_glossary(self, terms: Mapping[str, str]) -> "Translator":
        """Return a copy of the translator with a glossary of source terms and required translations."""
        if self.engine != "triptych" or self.shortlist is not None:
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
        self.decoder.start_workers()

    def close(self) -> None:
        """Stop the other workers; they restart on demand."""
        self.decoder.close()

    def __enter__(self) -> "Translator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _group(self, lines: Sequence[str]) -> Group:
        pieces = [self._pieces(line) for line in lines]
        return Group([*zip(lines, map(len, pieces), strict=True)], [*chain.from_iterable(pieces)])

    def _finished(self, group: Group) -> list[Translation]:
        found = iter(group.found)
        return [self._assemble(line, [*islice(found, num_pieces)]) for line, num_pieces in group.given]

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
        return self.decoder.decode(sentences)

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
            pieces=tuple(chain.from_iterable(tokenizer.pieces(h.ids) for h in hypotheses)),
            score=sum((h.score for h in hypotheses), start=0.0),
            log_prob=sum((h.log_prob for h in hypotheses), start=0.0),
        )


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
    return [*chain.from_iterable(split_line(part, fits, level + 1) for part in joined)]
