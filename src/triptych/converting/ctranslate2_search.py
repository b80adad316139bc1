"""Beam search of sentences with CTranslate2, without torch.

A kept translator (`kept_translators.py`) needs these modules alone: the import of torch takes as long as
hundreds of sentences.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from triptych.errors import DataError, UsageError
from triptych.literals import Precision
from triptych.running.decoding import (
    Decoder,
    Ends,
    Group,
    Hypotheses,
    Hypothesis,
    SamplingOptions,
    SearchOptions,
    Translator,
    batches_of_like_length,
    best_first,
    length_penalty,
    limit_of,
    never_ends,
)
from triptych.running.text import TokenizerPair

# Source tokens searched together: larger batches outgrow the caches of a core.
_BATCH_TOKENS = 512
_COMPUTE_TYPES: dict[Precision, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "int8": "int8_float32",
}


def compute_type(precision: Precision, device: str) -> str:
    import ctranslate2

    wanted = _COMPUTE_TYPES[precision]
    supported = ctranslate2.get_supported_compute_types(device)
    if wanted not in supported:
        able = ", ".join(
            name for name, theirs in _COMPUTE_TYPES.items() if theirs in supported
        )
        raise UsageError(
            f"CTranslate2 cannot compute in {precision} on this {device}: it can in {able}"
        )
    return wanted


def load_folder(
    name: str,
    folder: Path,
    precision: Precision,
    place: tuple[Literal["cpu", "cuda"], int],
    threads: tuple[int, int],
) -> Any:
    """Build CTranslate2's class `name` for the folder of a converted model.

    `threads` are the number of threads for batches, ignored on a GPU, and the number of threads for each
    product.
    """
    import ctranslate2

    device, index = place
    kind = compute_type(precision, device)
    try:
        return getattr(ctranslate2, name)(
            str(folder),
            device=device,
            device_index=index,
            compute_type=kind,
            inter_threads=threads[0] if device == "cpu" else 1,
            intra_threads=threads[1],
        )
    except (RuntimeError, ValueError) as error:
        raise DataError(
            f"{folder} cannot be read by CTranslate2 ({error}): remove it"
        ) from None


# The reason that `engine="auto"` gives.
TAKEN_BY_AUTO = "CTranslate2 translates: it is faster on CPUs (--engine triptych searches without it)"


class SearchLimits(NamedTuple):
    """Limits of a model for its search."""

    max_source_tokens: int | None  # maximum length of a source; None for no limit
    max_target_tokens: int | None  # maximum length of an output, its start included
    has_shortlist: bool = False


class _Search(NamedTuple):
    """A search of sentences that CTranslate2 has begun."""

    sentences: Sequence[Sequence[int]]
    limits: list[int]  # maximum lengths of the outputs
    batches: list[list[int]]  # indices of the sentences
    pending: list[list[Any]]  # asynchronous results of each batch


@final
class CTranslate2Searcher(Decoder[SearchOptions]):
    """Beam search of sentences with CTranslate2."""

    library = "ctranslate2"

    # If a hypothesis reaches the length limit, its sentence is searched again by triptych in fp32, on the
    # CPU: CTranslate2 cuts such outputs off without an end of sentence, and scores them beyond the limit.
    # A greedy output without scores is only cut to the limit.

    def __init__(
        self,
        translator: Any,
        tokenizers: TokenizerPair,
        options: SearchOptions,
        limits: SearchLimits,
        search_again: Callable[[SearchOptions], Translator],
        folder: Path,
    ) -> None:
        """Search with a translator of CTranslate2; `search_again` makes triptych's for outputs cut off.

        `folder` has the converted model; it may be gone.
        """
        self.folder = folder
        self.options = options
        self.limits = limits
        self.max_source_tokens = limits.max_source_tokens
        self.workers: int = translator.num_translators  # 1 on a GPU
        self._translator = translator
        self._source = tokenizers.source
        self._target = tokenizers.target
        self._names = self._source.vocabulary
        self._ids = {token: i for i, token in enumerate(self._target.vocabulary)}
        self._search_again = search_again
        self._own: Translator | None = None
        self._returns_scores = True
        self._most_waiting = 0  # groups begun and not yielded

    def without_scores(self) -> "CTranslate2Searcher":
        """Return a decoder without scores if its search is greedy: they cost a softmax at each step."""
        if self.options.beam_size > 1:
            return self
        own = copy(self)
        own._returns_scores = False
        return own

    def reading_ahead(self) -> "CTranslate2Searcher":
        """Return a decoder for groups at hand: the next group is prepared during the search of a group."""
        own = copy(self)
        own._most_waiting = 1
        return own

    def decode_groups(
        self, given: Iterable[Any], begin: Callable[[Any], Group]
    ) -> Iterator[Group]:
        waiting = deque[tuple[Group, _Search]]()
        failure: Exception | None = None
        try:
            for one in given:
                group = begin(one)
                waiting.append((group, self._started(group.texts)))
                if len(waiting) > self._most_waiting:
                    yield self._ended(*waiting.popleft())
        except Exception as error:  # noqa: BLE001 (raised when the groups in front of it are done)
            failure = error
        while waiting:
            yield self._ended(*waiting.popleft())
        if failure is not None:
            raise failure

    def _ended(self, group: Group, search: _Search) -> Group:
        group.found = self._found(search)
        group.missing = 0
        return group

    def decode(
        self,
        texts: Sequence[Sequence[int]],
        options: SearchOptions | None = None,
        ends: Ends = never_ends,
    ) -> Hypotheses:
        assert options in (None, self.options), (
            "the model is converted for the options of its searcher"
        )
        return self._found(self._started(texts))

    def _started(self, sentences: Sequence[Sequence[int]]) -> _Search:
        batches = list(batches_of_like_length(sentences, _BATCH_TOKENS))
        limits = [*map(self._limit, sentences)]
        pending = [
            self._begin([sentences[i] for i in batch], max(limits[i] for i in batch))
            for batch in batches
        ]
        return _Search(sentences, limits, batches, pending)

    def _found(self, search: _Search) -> Hypotheses:
        """Wait for the results of a search, and return the hypotheses of its sentences."""
        sentences, limits, batches, pending = search
        found: list[list[Hypothesis]] = [[] for _ in sentences]
        for batch, results in zip(batches, pending, strict=True):
            for i, result in zip(batch, results, strict=True):
                found[i] = self._hypotheses(result.result(), limits[i])
        # `_hypotheses` returns an empty list for a sentence that reached the length limit.
        if cut := [i for i, hypotheses in enumerate(found) if not hypotheses]:
            if self._own is None:
                self._own = self._search_again(replace(self.options, stop="full"))
            ours = self._own.search_tokens([list(sentences[i]) for i in cut])
            for i, hypotheses in zip(cut, ours, strict=True):
                found[i] = hypotheses
        return found

    def _begin(self, sentences: Sequence[Sequence[int]], limit: int) -> list[Any]:
        """Submit a batch with the longest limit of its sentences; return asynchronous results."""
        options = self.options
        never = dict.fromkeys((self._target.pad_id, self._target.bos_id))
        return self._translator.translate_batch(  # type: ignore[no-any-return]
            [[self._names[token] for token in ids] for ids in sentences],
            asynchronous=True,
            beam_size=options.beam_size,
            num_hypotheses=options.beam_size,
            length_penalty=0,
            suppress_sequences=[[self._target.vocabulary[token]] for token in never],
            max_input_length=0,
            use_vmap=self.limits.has_shortlist,
            min_decoding_length=0,
            max_decoding_length=limit + 1,  # the end of sentence counts there
            return_end_token=True,
            return_scores=self._returns_scores,
        )

    def _limit(self, ids: Sequence[int]) -> int:
        extra = self.options.max_extra_tokens
        return limit_of(len(ids), extra, self.limits.max_target_tokens)

    def _hypotheses(self, result: Any, limit: int) -> list[Hypothesis]:
        """Return the best hypotheses of a result; an empty list if a hypothesis reached the limit."""
        found = []
        eos_id = self._target.eos_id
        scores = result.scores if self._returns_scores else [math.nan]
        for tokens, log_prob in zip(result.hypotheses, scores, strict=True):
            ids = tuple(self._ids[token] for token in tokens)
            if len(ids) > limit + 1 or not ids or ids[-1] != eos_id:
                if self._returns_scores:
                    return []
                return [Hypothesis(ids[:limit], math.nan, math.nan, finish="length")]
            penalty = length_penalty(len(ids), self.options.alpha)
            found.append(Hypothesis(ids[:-1], log_prob, log_prob / penalty))
        return best_first(found)[: self.options.num_best]


def require_full_stop(options: SearchOptions) -> None:
    if options.beam_size > 1 and options.stop != "full":
        raise UsageError(
            "CTranslate2 ends a search when the beam is full of finished hypotheses: "
            f'stop must be "full", and it is "{options.stop}"'
        )


def require_beam_alone(options: SearchOptions) -> None:
    """Refuse what CTranslate2 does in another way than triptych's search."""
    if (
        options.sampling != SamplingOptions()
        or options.no_repeat_ngram_size is not None
    ):
        raise UsageError(
            "CTranslate2 searches without sampling, repetition penalty and no_repeat_ngram_size here: leave "
            "them out, or take --engine triptych"
        )
