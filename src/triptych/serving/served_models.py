"""A model that is served: its name, its languages, and the jobs that it can do."""

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
from triptych.core.models.overflow import require_finite_logits
from triptych.errors import DataError, UsageError
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
from triptych.running.decoding.linear_maps import give_memory_back, own_memory
from triptych.running.text import NumberedTokens
from triptych.seeing.attending.alignment import AlignedWords
from triptych.serving.exploring import Explorer
from triptych.serving.limits import Limits, RequestError
from triptych.serving.worker import Decoding, Item, Queue, QueuedJob, Worker

_LANGUAGES = re.compile(r"(?:^|[-_./])([a-z]{2,3})-([a-z]{2,3})$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# What the page asked last is kept so long.
SECONDS_KEPT = 60.0
# Translators with other numbers of alternatives that are kept ready.
_MOST_TRANSLATORS = 4
# Texts of different lengths, for the comparison of one text alone with the same text in a batch.
_PROBES = ("1", "a b c", "2 + 2 = 4, and 3 + 5 = 8.", "An old man and a small dog cross the street " * 3)
# Why batches may matter where texts are decoded elsewhere.
_ANOTHER_LIBRARY = "the library that decodes"

# The models of a process that computes for another (`worker_processes.py`): a job has the name of its model.
SERVED_HERE: dict[str, "ServedModel"] = {}


def served_here(name: str) -> "ServedModel":
    """The model of a job that came from another process."""
    return SERVED_HERE[name]


@final
class ServedModel:
    """A model with a worker.

    Attributes:
        name: its name in requests.
        model: what `triptych.load` gave, under its name in requests.
        can: what it can do.
        languages: source and target of a translator; None where its name does not end in them.
        queue: the items that wait for it.
        worker: computes the items.
        desk: the questions that wait for it: what looks at the model itself takes no time of its texts.
        clerk: answers them one by one.
        explorer: answers the page at `/`.
        is_batch_invariant: whether every text has the same bits alone and in a batch, as far as
            `check_batches` can tell; None before it, and for a model that neither translates nor generates.
        batch_invariance: what `check_batches` found, for a reader; "" where nothing was compared.
        alone: what `check_batches` computed of each text alone.
    """

    def __init__(self, name: str, model: Model, limits: Limits) -> None:
        """Make a model ready to serve; `UsageError` if it does not run."""
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
        found = _LANGUAGES.search(name) if "translate" in self.can else None
        self.languages: tuple[str, str] | None = None if found is None else (found[1], found[2])
        self.is_batch_invariant: bool | None = None
        self.batch_invariance = ""
        self.alone: list[Any] = []
        self._translators: OrderedDict[int, Translator] = OrderedDict()
        if isinstance(tokenizer := model.opened.tokenizer, NumberedTokens):
            raise UsageError(f"{name} cannot be served: {tokenizer.why}")
        self.limits = limits
        self.explorer = Explorer(self.model, most_tokens=limits.max_attended)
        self.queue = Queue(limits)
        self.desk = Queue(replace(limits, batch_items=1))
        size = sum(parameter.numel() for parameter in model.opened.model.parameters())
        threads = 1 if size < thresholds.WEIGHTS_WORTH_THREADS else torch.get_num_threads()
        self.worker = Worker(name, self.queue, threads)
        self.clerk = Worker(f"{name} looked at", self.desk, threads)
        self._forgetting: threading.Timer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return served_here, (self.name,)

    @property
    def generator(self) -> TextGenerator:
        return self.model.generator()

    def close(self) -> None:
        """End when everything that was submitted is computed."""
        self.worker.close()
        self.clerk.close()
        if self._forgetting is not None:
            self._forgetting.cancel()

    def forget_soon(self) -> None:
        """Give back the memory of what the page kept, unless it asks again before."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = threading.Timer(SECONDS_KEPT, self._forget)
        self._forgetting.daemon = True
        self._forgetting.start()

    def _forget(self) -> None:
        self.explorer.forget()
        give_memory_back()

    def require_same_files(self) -> None:
        """Check that the files are those that the model was opened from."""
        try:
            require_same_files(self.model)
        except DataError as error:
            raise RequestError(
                503,
                f"the files of {self.name} were changed after it was opened: POST /admin/reload or SIGHUP "
                "opens them anew",
            ) from error

    def own_weights(self) -> None:
        """Copy the model's own weights into memory, next to what an engine made of them.

        The model itself stays in its mapped file until something looks at it.
        """
        if self._owns_weights:
            return
        self.require_same_files()
        opened = self.model.opened
        own_memory([opened.model, *opened.ensemble])
        self.require_same_files()
        self._owns_weights = True

    def translator(self, num_best: int) -> Translator:
        """The translator that gives this number of translations; the last ones used are kept."""
        if num_best not in self._translators:
            if len(self._translators) == _MOST_TRANSLATORS:
                self._translators.popitem(last=False)[1].close()
            beam = None if num_best == 1 else max(num_best, self.translator(1).options.beam_size)
            # What people write is text, whatever it spells.
            self._translators[num_best] = self.model.translator(
                num_best=num_best, beam_size=beam, special_tokens="text"
            )
        self._translators.move_to_end(num_best)
        return self._translators[num_best]

    def check_batches(self) -> None:
        """Find out on this machine whether texts have the same bits in batches: `is_batch_invariant`."""
        item = Item(Checking(self), None)
        self.queue.submit([item])
        item.result.result()

    def compare_batches(self) -> None:
        """Compare texts for `check_batches`, in the thread that decodes."""
        job: Translating | Continuing
        if not {"translate", "generate"} & {*self.can}:
            self.own_weights()  # without an engine
        if "translate" in self.can:
            job = Translating(self, 1)
            given = list[Any](_PROBES)
        elif "generate" in self.can:
            job = Continuing(self, GenerationOptions(max_new_tokens=8, sampling=SamplingOptions()))
            most = max(1, (self.generator.model.context or 64) // 2)
            given = [self.generator.encode(text)[:most] for text in _PROBES]
        else:
            return
        self.alone = alone = [job.compute([Item(job, one)])[0] for one in given]
        self.is_batch_invariant = alone == job.compute([Item(job, one) for one in given])
        if (loop := job.loop()) is not None:
            asked = [job.begin(Item(job, one)) for one in given]
            for one in asked:  # each joins when the one before has begun
                loop.waiting.extend(one.texts)
                loop.step()
            loop.run([])
            self.is_batch_invariant &= alone == [one.result() for one in asked]
        same = "the same bits" if self.is_batch_invariant else "other bits"
        self.batch_invariance = f"{len(given)} texts had {same} alone and together"
        if reason := _ANOTHER_LIBRARY if loop is None else loop.engine.why_batches_matter:
            self.is_batch_invariant = False
            self.batch_invariance += f"; not promised of every text because of {reason}"


@dataclass(frozen=True)
class ModelJob(QueuedJob):
    """A job of a model; jobs with the same options are equal."""

    model: ServedModel

    @property
    def queue(self) -> Queue:
        """The queue in which its items wait."""
        return self.model.queue

    @property
    def repeats(self) -> bool:
        return self.model.is_batch_invariant is not False


@final
@dataclass(frozen=True)
class Translating(ModelJob, Decoding):
    """Translations of lines, held to a glossary: terms and their translations."""

    waits: ClassVar[bool] = True
    num_best: int
    glossary: tuple[tuple[str, str], ...] = ()

    def loop(self) -> Loop | None:
        translator = self.model.translator(1)
        return translator.loop(self.model.limits.batch_items * translator.options.beam_size)

    def begin(self, item: Item) -> Asked[Translation]:
        # The engine is that of one translation; the options are all that differs.
        options = self.model.translator(self.num_best).options
        return self._with_terms(self.model.translator(1)).begin(item.given, options)

    def compute(self, items: Sequence[Item]) -> list[Translation]:
        translator = self._with_terms(self.model.translator(self.num_best))
        return translator.translate([item.given for item in items])

    def _with_terms(self, translator: Translator) -> Translator:
        return translator.with_glossary(dict(self.glossary)) if self.glossary else translator


@final
@dataclass(frozen=True)
class Continuing(ModelJob, Decoding):
    """Continuations of token ids; an item is told its sample's number and text as it comes."""

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
    """A job that computes one item after the other."""

    def compute(self, items: Sequence[Item]) -> list[Any]:
        self.model.own_weights()
        return [None if item.is_left else self.of(item.given) for item in items]

    @abstractmethod
    def of(self, given: Any) -> Any:
        """The result of an item."""


@final
@dataclass(frozen=True)
class Scoring(JobOfEach):
    """Log-probabilities of the tokens of texts, and the most probable tokens in their places."""

    count: int

    @torch.inference_mode()
    def of(self, given: Sequence[int]) -> "Scored":
        if len(given) < 2:
            return Scored((), ())
        model = self.model.generator.model.eval()
        read = torch.tensor([list(given[:-1])], device=model.embeddings.table.weight.device)
        logits: Tensor = model(read).logits[0]
        require_finite_logits(model, logits, partial(model, read))
        log_probs = logits.float().log_softmax(dim=-1)
        own = log_probs.gather(1, torch.tensor(given[1:], device=read.device)[:, None])[:, 0]
        best = log_probs.topk(min(self.count, log_probs.shape[1]), dim=-1)
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Scored(tuple(own.tolist()), tuple(tuple(zip(*one, strict=True)) for one in tops))


@final
@dataclass(frozen=True)
class Aligning(JobOfEach):
    """The words of a line and of its translation; None for a line that is too long to be read whole."""

    def of(self, given: tuple[str, str]) -> AlignedWords | None:
        try:
            return self.model.model.attend(*given, special_tokens="text").words()
        except UsageError:
            return None


@final
@dataclass(frozen=True)
class Checking(ModelJob):
    """The comparison of batches at the start."""

    travels: ClassVar[bool] = False

    def compute(self, items: Sequence[Item]) -> list[None]:
        self.model.compare_batches()
        return [None for _ in items]


@final
@dataclass(frozen=True)
class Asking(ModelJob):
    """Any other job: the function that an item holds is called with the served model and the item."""

    travels: ClassVar[bool] = False

    @property
    def queue(self) -> Queue:
        return self.model.desk

    def compute(self, items: Sequence[Item]) -> list[Any]:
        self.model.own_weights()
        return [self._of(item) for item in items]

    def _of(self, item: Item) -> Any:
        self.model.require_same_files()  # heads are read from them
        try:
            found = item.given(self.model, item)
        finally:
            self.model.forget_soon()
        self.model.require_same_files()
        return found


class Scored(NamedTuple):
    """The log-probability of every token but the first, and the most probable tokens in its place."""

    log_probs: tuple[float, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]
