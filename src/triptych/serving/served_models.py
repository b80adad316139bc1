"""Served models: their names, languages and jobs."""

import re
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from triptych import thresholds
from triptych.core.models import require_finite_logits
from triptych.errors import DataError, UsageError
from triptych.languages import languages_in
from triptych.model import Model, renamed, require_same_files
from triptych.running.decoding import (
    Asked,
    Continuation,
    GenerationOptions,
    Loop,
    SamplingOptions,
    TextGenerator,
    Translation,
    Translator,
)
from triptych.running.memory import give_memory_back, own_memory
from triptych.running.text import NumberedTokens
from triptych.seeing.attending import AlignedWords
from triptych.serving.exploring import Explorer
from triptych.serving.limits import Limits, RequestError
from triptych.serving.worker import Decoding, Item, Queue, QueuedJob, Worker

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Time until the cache of the page is cleared, from its last request.
SECONDS_KEPT = 60.0
# Number of cached translators, by number of alternatives.
_MOST_TRANSLATORS = 4
# Texts of different lengths, to compare results alone and in a batch.
_PROBES = (
    "1",
    "a b c",
    "2 + 2 = 4, and 3 + 5 = 8.",
    "An old man and a small dog cross the street " * 3,
)
# Reason given if another library decodes.
_ANOTHER_LIBRARY = "the library that decodes"

# Models of a worker process (`worker_processes.py`), by name: a pickled job contains the name of its model.
SERVED_HERE: dict[str, "ServedModel"] = {}


def served_here(name: str) -> "ServedModel":
    """Return the model of a job from another process."""
    return SERVED_HERE[name]


@final
class ServedModel:
    """Model with its queues and workers.

    Attributes:
        name: name in requests.
        model: loaded model, renamed to its name in requests.
        can: abilities of the model.
        languages: codes of source and target of a translator: the ending of its name, or the model's
            languages; None if unknown.
        queue: queue of items.
        worker: worker of the queue.
        desk: queue of questions about the model itself, separate so that texts do not wait for them.
        clerk: worker of the desk, one question at a time.
        explorer: answers for the page at `/`.
        is_batch_invariant: True if every text has the same bits alone and in a batch, as far as
            `check_batches` can tell; None before the check, and for a model that neither translates nor
            generates.
        batch_invariance: result of `check_batches` in words; "" without a comparison.
        alone: results of `check_batches` for each text alone.
    """

    def __init__(self, name: str, model: Model, limits: Limits) -> None:
        """Prepare a model to be served; raise `UsageError` if it does not run, or its name is not valid."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be the name of a served model: use letters, digits, '.', '_' and '-'"
            )
        self.name = name
        self.model = renamed(model, name, is_mapped=False)
        if self.model.why_not_run:
            raise UsageError(f"{name} cannot be served: {self.model.why_not_run}")
        self._owns_weights = False
        self.can = self.model.can
        self.languages: tuple[str, str] | None = None
        if "translate" in self.can:
            self.languages = languages_in(name) or self.model.reader.decoding.languages
        self.is_batch_invariant: bool | None = None
        self.batch_invariance = ""
        self.alone: list[Any] = []
        self._translators: OrderedDict[int, Translator] = OrderedDict()
        if isinstance(tokenizer := model.reader.tokenizer, NumberedTokens):
            raise UsageError(f"{name} cannot be served: {tokenizer.why}")
        self.limits = limits
        self.explorer = Explorer(self.model, most_tokens=limits.max_attended)
        self.queue = Queue(limits)
        self.desk = Queue(replace(limits, batch_items=1))
        # Small models are faster with one thread.
        size = sum(parameter.numel() for parameter in model.reader.model.parameters())
        threads = (
            1 if size < thresholds.WEIGHTS_WORTH_THREADS else torch.get_num_threads()
        )
        self.worker = Worker(name, self.queue, threads)
        self.clerk = Worker(f"{name} looked at", self.desk, threads)
        self._forgetting: threading.Timer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return served_here, (self.name,)

    @property
    def generator(self) -> TextGenerator:
        return self.model.generator()

    def close(self) -> None:
        """Close the workers once all submitted items are computed."""
        self.worker.close()
        self.clerk.close()
        if self._forgetting is not None:
            self._forgetting.cancel()

    def forget_soon(self) -> None:
        """Clear the page's cache after a while, unless the page sends another request before."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = threading.Timer(SECONDS_KEPT, self._forget)
        self._forgetting.daemon = True
        self._forgetting.start()

    def _forget(self) -> None:
        self.explorer.forget()
        give_memory_back()

    def require_same_files(self) -> None:
        """Raise `RequestError` if the model's files have changed since it was opened."""
        try:
            require_same_files(self.model)
        except DataError as error:
            raise RequestError(
                503,
                f"the files of {self.name} were changed after it was opened: POST /admin/reload or SIGHUP "
                "opens them anew",
            ) from error

    def own_weights(self) -> None:
        """Copy the model's weights into memory, besides an engine's converted weights.

        The weights stay in their mapped file until a job first needs the model itself.
        """
        if self._owns_weights:
            return
        self.require_same_files()
        opened = self.model.reader
        own_memory([opened.model, *opened.ensemble])
        self.require_same_files()
        self._owns_weights = True

    def translator(self, num_best: int) -> Translator:
        """Return the translator with this number of alternatives, from a cache of the last ones used."""
        if num_best not in self._translators:
            if len(self._translators) == _MOST_TRANSLATORS:
                self._translators.popitem(last=False)[1].close()
            beam = (
                None
                if num_best == 1
                else max(num_best, self.translator(1).options.beam_size)
            )
            # Special tokens in a request are plain text.
            self._translators[num_best] = self.model.translator(
                num_best=num_best, beam_size=beam, special_tokens="text"
            )
        self._translators.move_to_end(num_best)
        return self._translators[num_best]

    def check_batches(self) -> None:
        """Set `is_batch_invariant` by a test on this machine."""
        item = Item(Checking(self), None)
        self.queue.submit([item])
        item.result.result()

    def compare_batches(self) -> None:
        """Compare texts alone and in batches for `check_batches`, in the decoding thread."""
        job: Translating | Continuing
        if not {"translate", "generate"} & {*self.can}:
            self.own_weights()  # without an engine
        if "translate" in self.can:
            job = Translating(self, 1)
            given = list[Any](_PROBES)
        elif "generate" in self.can:
            job = Continuing(
                self, GenerationOptions(max_new_tokens=8, sampling=SamplingOptions())
            )
            most = max(1, (self.generator.model.context or 64) // 2)
            given = [self.generator.encode(text)[:most] for text in _PROBES]
        else:
            return
        self.alone = alone = [job.compute([Item(job, one)])[0] for one in given]
        self.is_batch_invariant = alone == job.compute(
            [Item(job, one) for one in given]
        )
        if (loop := job.loop()) is not None:
            asked = [job.begin(Item(job, one)) for one in given]
            for one in asked:  # each text joins after a step of the texts before it
                loop.waiting.extend(one.texts)
                loop.step()
            loop.run([])
            self.is_batch_invariant &= alone == [one.result() for one in asked]
        same = "the same bits" if self.is_batch_invariant else "other bits"
        self.batch_invariance = f"{len(given)} texts had {same} alone and together"
        if (
            reason := _ANOTHER_LIBRARY
            if loop is None
            else loop.engine.why_batches_matter
        ):
            self.is_batch_invariant = False
            self.batch_invariance += f"; not promised of every text because of {reason}"


@dataclass(frozen=True)
class ModelJob(QueuedJob):
    """Job of a model; jobs with the same options are equal."""

    model: ServedModel

    @property
    def queue(self) -> Queue:
        """Queue of the job's items."""
        return self.model.queue

    @property
    def repeats(self) -> bool:
        return self.model.is_batch_invariant is not False


@final
@dataclass(frozen=True)
class Translating(ModelJob, Decoding):
    """Translation of lines, constrained by a glossary of terms and their translations."""

    waits: ClassVar[bool] = True
    num_best: int
    glossary: tuple[tuple[str, str], ...] = ()

    def loop(self) -> Loop | None:
        translator = self.model.translator(1)
        return translator.loop(
            self.model.limits.batch_items * translator.options.beam_size
        )

    def begin(self, item: Item) -> Asked[Translation]:
        # All numbers of alternatives share the engine of one translation; only the options differ.
        options = self.model.translator(self.num_best).options
        return self._with_terms(self.model.translator(1)).begin(item.given, options)

    def compute(self, items: Sequence[Item]) -> list[Translation]:
        translator = self._with_terms(self.model.translator(self.num_best))
        return translator.translate([item.given for item in items])

    def _with_terms(self, translator: Translator) -> Translator:
        return (
            translator.with_glossary(dict(self.glossary))
            if self.glossary
            else translator
        )


@final
@dataclass(frozen=True)
class Continuing(ModelJob, Decoding):
    """Continuation of token ids; an item is passed each sample's index and new text during decoding."""

    options: GenerationOptions

    def loop(self) -> Loop | None:
        limits = self.model.limits
        return self.model.generator.loop(limits.batch_items, limits.batch_tokens)

    def begin(self, item: Item) -> Asked[list[Continuation]]:
        return self.model.generator.begin(item.given, self.options, item.say)

    def compute(self, items: Sequence[Item]) -> list[list[Continuation]]:
        def tell(row: int, text: str) -> None:
            number, sample = divmod(row, self.options.num_samples)
            items[number].say(sample, text)

        texts = [item.given for item in items]
        return self.model.generator.continue_tokens(texts, self.options, tell)


class JobOfEach(ModelJob):
    """Job for computing items one at a time."""

    def compute(self, items: Sequence[Item]) -> list[Any]:
        self.model.own_weights()
        return [None if item.is_left else self.of(item.given) for item in items]

    @abstractmethod
    def of(self, given: Any) -> Any:
        """Compute the result of an item."""


@final
@dataclass(frozen=True)
class Scoring(JobOfEach):
    """Scoring of texts: log-probabilities of their tokens, and the most probable tokens at each position."""

    count: int

    @torch.inference_mode()
    def of(self, given: Sequence[int]) -> "Scored":
        if len(given) < 2:
            return Scored((), ())
        model = self.model.generator.model.eval()
        read = torch.tensor(
            [list(given[:-1])], device=model.embeddings.table.weight.device
        )
        logits: Tensor = model(read).logits[0]
        require_finite_logits(model, logits, partial(model, read))
        log_probs = logits.float().log_softmax(dim=-1)
        own = log_probs.gather(1, torch.tensor(given[1:], device=read.device)[:, None])[
            :, 0
        ]
        best = log_probs.topk(min(self.count, log_probs.shape[1]), dim=-1)
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Scored(
            tuple(own.tolist()), tuple(tuple(zip(*one, strict=True)) for one in tops)
        )


@final
@dataclass(frozen=True)
class Aligning(JobOfEach):
    """Word alignment of sentences and their translations; None if a sentence exceeds the model's limit."""

    def of(self, given: Sequence[tuple[str, str]]) -> AlignedWords | None:
        try:
            return AlignedWords.join(
                [
                    self.model.model.attend(*pair, special_tokens="text").words()
                    for pair in given
                ]
            )
        except UsageError:
            return None


@final
@dataclass(frozen=True)
class Checking(ModelJob):
    """Comparison of batches at the start."""

    travels: ClassVar[bool] = False

    def compute(self, items: Sequence[Item]) -> list[None]:
        self.model.compare_batches()
        return [None for _ in items]


@final
@dataclass(frozen=True)
class Asking(ModelJob):
    """Any other job: calls the function given with an item, with the served model and the item."""

    travels: ClassVar[bool] = False

    @property
    def queue(self) -> Queue:
        return self.model.desk

    def compute(self, items: Sequence[Item]) -> list[Any]:
        self.model.own_weights()
        return [self._of(item) for item in items]

    def _of(self, item: Item) -> Any:
        self.model.require_same_files()  # weights of heads are read from the files
        try:
            found = item.given(self.model, item)
        finally:
            self.model.forget_soon()
        self.model.require_same_files()
        return found


class Scored(NamedTuple):
    """Log-probabilities of all tokens except the first, and the most probable tokens at each position."""

    log_probs: tuple[float, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]
