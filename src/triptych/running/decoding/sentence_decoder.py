"""Beam search of sentences with an encoder-decoder or an ensemble, in one process or several."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from triptych import thresholds
from triptych.core.models import EncoderDecoder
from triptych.errors import UsageError
from triptych.literals import Precision
from triptych.running.batching import batches_of_like_length
from triptych.running.decoding.decoder import (
    Ends,
    Group,
    Hypotheses,
    never_ends,
)
from triptych.running.decoding.engine import DecodingEngine, Engine
from triptych.running.decoding.engine_decoder import EngineDecoder
from triptych.running.decoding.ensemble import EnsembleEngine
from triptych.running.decoding.glossary import Sentence
from triptych.running.decoding.hypotheses import Hypothesis, best_first
from triptych.running.decoding.linear_maps import unsupported_precision
from triptych.running.decoding.plain_engine import PlainEngine, needs_plain
from triptych.running.decoding.search import rules_of, sentence_text
from triptych.running.decoding.sentence_sampling import sentence_samples
from triptych.running.decoding.shortlisting import ShortlistEngine
from triptych.running.decoding.token_loop import Asked, Loop
from triptych.running.decoding.workers import Searcher, WorkerPool
from triptych.running.decoding_options import SearchOptions
from triptych.running.text.shortlists import Shortlist
from triptych.running.text.tokenizers import OutputRules
from triptych.threads import Ahead, torch_threads

# Maximum number of groups read ahead, and of groups in search.
_GROUPS_READ_AHEAD = 2
_GROUPS_IN_HAND = 3


@final
class SentenceDecoder(EngineDecoder[SearchOptions]):
    """Beam search or sampling: maps sentences, token ids without the end of sentence, to hypotheses."""

    def __init__(
        self,
        models: Sequence[EncoderDecoder],
        src_eos_id: int,
        rules: OutputRules,
        options: SearchOptions,
        precision: Precision = "fp32",
        *,
        shortlist: Shortlist | None = None,
        batch_tokens: int = 2048,
        batch_sentences: int | None = None,
        workers: int = 1,
    ) -> None:
        """Search with one model, or with an ensemble of models with the same vocabulary."""
        super().__init__(models, precision, options)
        if workers < 1:
            raise UsageError(f"workers is {workers}: at least 1 is needed")
        device = next(models[0].parameters()).device
        if reason := unsupported_precision(precision, device):
            raise UsageError(f"this model cannot be run in {precision}: {reason}")
        self.models = tuple(models)
        limits = [model.max_source_tokens for model in models]
        self.max_source_tokens = min(
            (limit for limit in limits if limit is not None), default=None
        )
        # Several processes would compete for a GPU.
        self.workers = workers if device.type == "cpu" else 1
        self._src_eos_id = src_eos_id
        self._rules = rules
        self._shortlist = shortlist
        self._batch_tokens = batch_tokens
        self.batch_sentences = batch_sentences
        self._pool: WorkerPool | None = None

    def decode(
        self,
        texts: Sequence[Sequence[int]],
        options: SearchOptions | None = None,
        ends: Ends = never_ends,
    ) -> Hypotheses:
        engine = self.engine
        results: Hypotheses = [[] for _ in texts]
        for batch in self.batches(texts):
            asked = [self.begin(texts[i], options or self.options) for i in batch]
            for i, hypotheses in zip(
                batch, Loop(engine).run_requests(asked), strict=True
            ):
                results[i] = hypotheses
        return results

    def begin(
        self, ids: Sequence[int], options: SearchOptions, ends: Ends = never_ends
    ) -> Asked[list[Hypothesis]]:
        terms = ids.terms if isinstance(ids, Sentence) else None
        whole = [*ids, self._src_eos_id]
        if not options.sampling.is_greedy:
            samples = sentence_samples(self._last_engine, whole, options, self._rules)
            return Asked(
                samples, lambda: best_first([sample.hypothesis for sample in samples])
            )
        text = sentence_text(self._last_engine, whole, options, self._rules, terms)
        return Asked([text], lambda: text.best[: options.num_best])

    def decode_groups(
        self, given: Iterable[Any], begin: Callable[[Any], Group]
    ) -> Iterator[Group]:
        if self.workers == 1:
            return super().decode_groups(given, begin)
        return self._decode_side_by_side(given, begin)

    def batches(self, sentences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield batches of similar lengths, as lists of sentence indices."""
        return batches_of_like_length(
            sentences, self._batch_tokens, self.batch_sentences
        )

    def start_workers(self) -> None:
        """Start the other workers and wait until they are ready, instead of starting them on demand."""
        if self.workers > 1:
            pool = self._ready_pool()
            pool.start(self.workers - 1)
            pool.wait_until_ready()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _make_engine(self) -> DecodingEngine:
        if self._shortlist is not None and (reason := self._beyond_shortlists()):
            raise UsageError(f"{reason} runs without a shortlist: leave it out")
        engines = [
            _engine(model, self.precision, self._rules, self._shortlist)
            for model in self.models
        ]
        return engines[0] if len(engines) == 1 else EnsembleEngine(engines)

    def _beyond_shortlists(self) -> str | None:
        """Return what needs all tokens of the vocabulary; None without a need."""
        sampling = self.options.sampling
        needs = {
            "an ensemble": len(self.models) > 1,
            "a model that repeats no phrase": rules_of(
                self.options, self._rules
            ).no_repeat
            > 0,
            "a repetition penalty": sampling.repetition_penalty != 1,
            "sampling": not sampling.is_greedy,
        }
        return next((name for name, is_needed in needs.items() if is_needed), None)

    def _ready_pool(self) -> WorkerPool:
        self._forget_what_is_stale()
        if self._pool is None:
            how = (
                self.models,
                self._src_eos_id,
                self._rules,
                self.options,
                self.precision,
                self._shortlist,
            )
            self._pool = WorkerPool(make_searcher, how)
        return self._pool

    def _decode_side_by_side(
        self, given: Iterable[Any], begin: Callable[[Any], Group]
    ) -> Iterator[Group]:
        pool = self._ready_pool()
        arriving = Ahead(given, depth=_GROUPS_READ_AHEAD)
        groups: deque[Group] = deque()
        failure: Exception | None = None
        try:
            while True:
                with torch_threads(1):
                    # Wait for a new group only if no group is in search.
                    while len(groups) < _GROUPS_IN_HAND and (
                        not groups or arriving.has_more
                    ):
                        try:
                            one = next(arriving, None)
                        except Exception as error:  # noqa: BLE001 (raised when the groups before it are done)
                            failure = error
                            one = None
                        if one is None:
                            break
                        groups.append(begin(one))
                        for part in self.batches(groups[-1].texts):
                            pool.submit(
                                (groups[-1], part), [groups[-1].texts[i] for i in part]
                            )
                    if not groups:
                        if failure is not None:
                            raise failure
                        return
                    if (
                        sum(group.missing for group in groups)
                        >= thresholds.SENTENCES_WORTH_A_WORKER
                    ):
                        pool.start(self.workers - 1)
                    while groups[0].missing:
                        (group, part), results = pool.next()
                        for i, hypotheses in zip(part, results, strict=True):
                            group.found[i] = hypotheses
                        group.missing -= len(part)
                        if arriving.has_more and len(groups) < _GROUPS_IN_HAND:
                            break
                while groups and not groups[0].missing:
                    yield groups.popleft()
        finally:
            arriving.close(waits=False)  # the next group may never arrive
            if any(group.missing for group in groups):
                self.close()  # the caller stopped early: cancel the workers' batches


def make_searcher(
    models: Sequence[EncoderDecoder],
    src_eos_id: int,
    rules: OutputRules,
    options: SearchOptions,
    precision: Precision,
    shortlist: Shortlist | None,
) -> Searcher:
    """Make the search of a worker: one batch at a time, as it comes."""
    # The pool hands out batches: they are not divided again.
    decoder = SentenceDecoder(
        models, src_eos_id, rules, options, precision, shortlist=shortlist
    )
    engine = decoder.engine

    def search(sentences: Sequence[Sequence[int]]) -> Hypotheses:
        return Loop(engine).run_requests(
            [decoder.begin(ids, options) for ids in sentences]
        )

    return search


def _engine(
    model: EncoderDecoder,
    precision: Precision,
    rules: OutputRules,
    shortlist: Shortlist | None,
) -> DecodingEngine:
    what = "a model with changed values, or with attention that cannot be fused,"
    if not needs_plain(model):
        if shortlist is not None:
            return ShortlistEngine(model, shortlist, rules, precision)
        return Engine(model, precision, never=rules.never)
    if shortlist is not None:
        raise UsageError(f"{what} runs without a shortlist: leave it out")
    if precision != "fp32":
        raise UsageError(f"{what} runs in fp32, not in {precision}")
    return PlainEngine(model, never=rules.never)
