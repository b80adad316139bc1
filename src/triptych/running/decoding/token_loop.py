"""Continuous batching: texts join a running batch, take steps with it and leave when they are done."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych import thresholds

ResultT = TypeVar("ResultT")


# Arguments of a model call, as rows of equal length; an encoder-decoder takes source and target rows.
Read = Sequence[Sequence[Sequence[int]]]


class Text(ABC):
    """Base class of texts in decoding."""

    kind: Hashable  # texts of equal kind share a batch
    given: Sequence[int]  # tokens read before the first step
    size: int  # number of tokens counted for the limit of a batch
    num_rows = 1  # number of batch rows
    is_over = False  # True once the text is finished or its request is cancelled

    @property
    @abstractmethod
    def read(self) -> Read:
        """Arguments of a model call with all tokens read so far."""

    @abstractmethod
    def batch(self, engine: Any) -> "DecodingBatch[Any]":
        """Return an empty batch for texts of this kind."""


def require_finite_best(
    best: Float[Tensor, " texts"], engine: Any, texts: Sequence[Text | None]
) -> None:
    """Check that the best scores are finite: a search over NaN would never end."""
    broken = best.isnan() | (best == torch.inf)
    if bool(broken.any()):
        text = texts[int(broken.nonzero()[0])]
        raise engine.overflow(() if text is None else text.read)


@final
@dataclass(frozen=True)
class Asked(Generic[ResultT]):
    """A request: its texts, and the result once all have finished."""

    texts: Sequence[Text]
    result: Callable[[], ResultT]


TextT = TypeVar("TextT", bound=Text)


class DecodingBatch(ABC, Generic[TextT]):
    """Base class of batches: texts of the same kind that take steps together.

    Attributes:
        kind: kind of the texts.
        texts: texts in the order of their rows; None for a text taken out of the batch to be read again.
            Finished texts stay for a while, since removing rows is expensive.
        joins: True if texts can join after the first step.
        rows_apart: minimum number of new rows that start a new batch instead of joining.
    """

    rows_apart = math.inf

    def __init__(self, engine: Any, kind: Hashable, width: int, *, joins: bool) -> None:
        self.engine = engine
        self.kind = kind
        self.width = width
        self.joins = joins
        self.texts: list[TextT | None] = []
        self.cache: Any = None
        self.logits = torch.empty(0)
        self.tokens = torch.empty(0)

    @abstractmethod
    def open(self, texts: Sequence[TextT]) -> tuple[Any, Tensor]:
        """Prefill with texts; return the cache and the first logits of every row."""

    @abstractmethod
    def choose(self) -> list[TextT]:
        """Choose `tokens` from `logits`; return the texts to read again before their next step."""

    @property
    def open_places(self) -> list[int]:
        """Indices of unfinished texts."""
        return [
            place
            for place, text in enumerate(self.texts)
            if text is not None and not text.is_over
        ]

    def step(self, new: Sequence[TextT]) -> list[TextT]:
        """Admit new texts and extend every text by a token; return the texts to read again."""
        self._drop_done(always=bool(new))
        if self.texts:
            self.logits = self.engine.step(self.tokens, self.cache)
        if new:
            # New texts have read their last token already, so they join after the step of the present texts.
            cache, logits = self.open(new)
            if self.texts:
                self.cache.join(cache)
                logits = torch.cat([self.logits, logits])
            else:
                self.cache = cache
            self.logits = logits
            self.texts = [*self.texts, *new]
        # Cancelled texts end between steps; an empty batch chooses no tokens.
        return self.choose() if self.texts else []

    def _drop_done(self, *, always: bool) -> None:
        # Removing rows is expensive: finished texts stay until they are many or new texts join.
        kept = self.open_places
        num_done = len(self.texts) - len(kept)
        if not kept:
            self.texts = []
            self.cache = None
        elif (
            num_done
            and (always or num_done >= thresholds.SHARE_DONE * len(self.texts))
            and not self.engine.fixed
        ):
            places = torch.tensor(kept, device=self.tokens.device)
            self.texts = [self.texts[place] for place in kept]
            self.tokens = self.tokens.view(-1, self.width)[places].flatten()
            self.cache.select(places)


@final
class Loop:
    """Scheduler for decoding texts in batches of limited size.

    The output of a text does not depend on the other texts.
    """

    def __init__(
        self,
        engine: Any,
        *,
        most_rows: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """Limit batches to `most_rows` rows and `most_tokens` padded tokens in total."""
        self.waiting: deque[Text] = deque()
        self.batches: list[
            DecodingBatch[Any]
        ] = []  # new texts join the last batch of their kind
        self.engine = engine
        self._most_rows = most_rows
        self._most_tokens = most_tokens

    @property
    def running(self) -> list[Text]:
        """Unfinished texts in batches."""
        found = list[Text]()
        for batch in self.batches:
            found += [
                text for text in batch.texts if text is not None and not text.is_over
            ]
        return found

    def run(self, texts: Sequence[Text]) -> None:
        """Decode texts until all have finished, starting in the given order."""
        for _ in self.steps(texts):
            pass

    def run_requests(self, asked: Sequence[Asked[ResultT]]) -> list[ResultT]:
        """Decode the texts of requests until all have finished; return the results of the requests."""
        self.run([*chain.from_iterable(one.texts for one in asked)])
        return [one.result() for one in asked]

    def steps(self, texts: Sequence[Text]) -> Iterator[None]:
        """Yield after every step; see `run`."""
        self.waiting.extend(texts)
        goes_on = True
        while goes_on:
            goes_on = self.step()
            yield

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit waiting texts and extend every text by a token; return True if unfinished texts remain."""
        joined = {batch.kind: batch for batch in self.batches}
        entering = self._entering(joined)
        for kind, new in entering.items():
            if (
                kind not in joined
                or len(new) * joined[kind].width >= joined[kind].rows_apart
            ):
                joined[kind] = new[0].batch(self.engine)
                self.batches.append(joined[kind])
        # Texts to read again go to the front of the queue in the same order.
        again = list[Text]()
        for batch in self.batches:
            again += batch.step(
                entering.get(batch.kind, []) if batch is joined[batch.kind] else []
            )
        self.batches = [batch for batch in self.batches if batch.open_places]
        self.waiting.extendleft(reversed(again))
        return bool(self.waiting or self.batches)

    def _entering(
        self, joined: Mapping[Hashable, DecodingBatch[Any]]
    ) -> dict[Hashable, list[Text]]:
        """Remove from the queue the texts that fit, and return them by kind.

        Joining is expensive, since the cache is copied. Texts wait until many can join, or all.
        """
        running = self.running
        rows = sum(text.num_rows for text in running)
        count = len(running)
        longest = max((text.size for text in running), default=0)
        entering = dict[Hashable, list[Text]]()
        left = list[Text]()
        waiting = [text for text in self.waiting if not text.is_over]
        is_full = False
        for text in waiting:
            batch = joined.get(text.kind)
            if not is_full and (batch is None or batch.joins):
                rows = rows + text.num_rows
                count = count + 1
                longest = max(longest, text.size)
                is_full = self._most_rows is not None and rows > self._most_rows
                if (
                    self._most_tokens is not None
                    and (longest + 1) * count > self._most_tokens
                ):
                    is_full = True
                # A single text is admitted even if it exceeds the limits.
                if count == 1 or not is_full:
                    entering.setdefault(text.kind, []).append(text)
                    continue
            left.append(text)
        if left and len(waiting) - len(left) < thresholds.SHARE_DONE * len(running):
            entering = {}
            left = waiting
        self.waiting = deque(left)
        return entering
