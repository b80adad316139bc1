"""Texts that are decoded side by side: each joins a batch, takes steps with it and leaves when it is done."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych import thresholds

ResultT = TypeVar("ResultT")


# What a model is called with: rows of equally many tokens, of an encoder-decoder first those of the source.
Read = Sequence[Sequence[Sequence[int]]]


class Text(ABC):
    """A text on its way."""

    kind: Hashable  # texts of equal kinds share a batch
    given: Sequence[int]  # the tokens that are read before the first step
    size: int  # tokens that count for the limit of a batch
    num_rows = 1  # rows of a batch that it takes
    is_over = False  # no more tokens are wanted, because it is done or because nobody waits for it

    @property
    @abstractmethod
    def read(self) -> Read:
        """What the model has read by now."""

    @abstractmethod
    def batch(self, engine: Any) -> "DecodingBatch[Any]":
        """A batch for texts of this kind."""


def require_finite_best(best: Float[Tensor, " texts"], engine: Any, texts: Sequence[Text | None]) -> None:
    """Check that the model still computes numbers: a search over NaN has no end."""
    broken = best.isnan() | (best == torch.inf)
    if bool(broken.any()):
        text = texts[int(broken.nonzero()[0])]
        raise engine.overflow(() if text is None else text.read)


@final
@dataclass(frozen=True)
class Asked(Generic[ResultT]):
    """Texts that are decoded for one result, which is there when all of them are over."""

    texts: Sequence[Text]
    result: Callable[[], ResultT]


TextT = TypeVar("TextT", bound=Text)


class DecodingBatch(ABC, Generic[TextT]):
    """Texts of one kind that take their steps together.

    Attributes:
        kind: of its texts.
        texts: in the order of their rows; None for one that is read again elsewhere. Some are over and still
            there, because to take rows out is to copy the others.
        joins: whether texts join it when it has taken steps.
        rows_apart: as many new rows, or more, begin a batch of their own.
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
        """What an engine keeps of texts that it reads, and the logits of the first token of every row."""

    @abstractmethod
    def choose(self) -> list[TextT]:
        """Choose `tokens` from `logits`; returns the texts that are to be read again before they go on."""

    @property
    def open_places(self) -> list[int]:
        """Places of the texts that go on."""
        return [place for place, text in enumerate(self.texts) if text is not None and not text.is_over]

    def step(self, new: Sequence[TextT]) -> list[TextT]:
        """Lengthen every text by a token, the new ones too; returns those that are to be read again."""
        self._drop_done(always=bool(new))
        if self.texts:
            self.logits = self.engine.step(self.tokens, self.cache)
        if new:
            cache, logits = self.open(new)
            if self.texts:
                self.cache.join(cache)
                logits = torch.cat([self.logits, logits])
            else:
                self.cache = cache
            self.logits = logits
            self.texts = [*self.texts, *new]
        return self.choose()

    def _drop_done(self, *, always: bool) -> None:
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
    """Decodes texts, as many at a time as there is room for.

    What becomes of a text does not depend on the others.
    """

    def __init__(self, engine: Any, *, most_rows: int | None = None, most_tokens: int | None = None) -> None:
        """Make room for this number of rows, and of tokens: texts times the size of the longest."""
        self.waiting: deque[Text] = deque()
        self.batches: list[DecodingBatch[Any]] = []  # of each kind, the last is the one that is joined
        self.engine = engine
        self._most_rows = most_rows
        self._most_tokens = most_tokens

    @property
    def running(self) -> list[Text]:
        """Texts in batches that are not over."""
        return [
            text for batch in self.batches for text in batch.texts if text is not None and not text.is_over
        ]

    def run(self, texts: Sequence[Text]) -> None:
        """Decode texts to their ends; those before others are begun first."""
        for _ in self.steps(texts):
            pass

    def steps(self, texts: Sequence[Text]) -> Iterator[None]:
        """As `run`, step by step."""
        self.waiting.extend(texts)
        goes_on = True
        while goes_on:
            goes_on = self.step()
            yield

    @torch.inference_mode()
    def step(self) -> bool:
        """Let waiting texts in and lengthen every text by a token; whether there is more to do."""
        joined = {batch.kind: batch for batch in self.batches}
        entering = self._entering(joined)
        for kind, new in entering.items():
            if kind not in joined or len(new) * joined[kind].width >= joined[kind].rows_apart:
                joined[kind] = new[0].batch(self.engine)
                self.batches.append(joined[kind])
        again = list[Text]()
        for batch in self.batches:
            again += batch.step(entering.get(batch.kind, []) if batch is joined[batch.kind] else [])
        self.batches = [batch for batch in self.batches if batch.open_places]
        self.waiting.extendleft(reversed(again))
        return bool(self.waiting or self.batches)

    def _entering(self, joined: Mapping[Hashable, DecodingBatch[Any]]) -> dict[Hashable, list[Text]]:
        """The waiting texts that there is room for, by kind.

        Each time, the caches of a batch are copied: they wait until they are many, or all.
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
                if self._most_tokens is not None and (longest + 1) * count > self._most_tokens:
                    is_full = True
                if count == 1 or not is_full:
                    entering.setdefault(text.kind, []).append(text)
                    continue
            left.append(text)
        if left and len(waiting) - len(left) < thresholds.SHARE_DONE * len(running):
            entering = {}
            left = waiting
        self.waiting = deque(left)
        return entering
