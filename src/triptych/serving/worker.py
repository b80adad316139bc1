"""One thread per model: what requests wait for, decoded side by side or computed in batches."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, final

from triptych.decoding import Asked, Loop
from triptych.serving.limits import Limits, RequestError


class Job(ABC):
    """What is computed of items. Items of equal jobs are computed together."""

    @abstractmethod
    def compute(self, items: "Sequence[Item]") -> list[Any]:
        """The result of each item."""


class Decoding(Job):
    """A job whose items join what is being decoded, each by itself."""

    @abstractmethod
    def loop(self) -> Loop | None:
        """A new loop for jobs of this class; None where items are computed in batches after all."""

    @abstractmethod
    def begin(self, item: "Item") -> Asked[Any]:
        """The texts that are decoded for an item."""


@dataclass(eq=False)
class Item:
    """One text of a request, on its way through the queue.

    Attributes:
        job: what is to be computed.
        given: the text, or what else the job takes.
        tell: called by the worker's thread with each part of the result, where it comes in parts.
        result: what was computed, or why it was not.
        is_left: nobody waits for it any more.
        has_begun: a part was told, so that it cannot be computed again.
    """

    job: Job
    given: Any
    tell: Callable[[Any], object] | None = None
    result: "Future[Any]" = field(default_factory=Future)
    is_left: bool = False
    has_begun: bool = False

    @property
    def size(self) -> int:
        """Characters or tokens of the text."""
        return len(self.given) if isinstance(self.given, Sized) else 1

    def say(self, part: Any) -> None:
        """Tell a part of the result, if anybody listens."""
        if self.tell is not None:
            self.has_begun = True
            self.tell(part)


@final
class Worker:
    """Computes items in the order in which they came.

    Items of a `Decoding` job join the texts that are being decoded, between two steps, where there is room.
    Other items are computed between steps too, equal jobs together. The results do not depend on
    which items are computed together: the models promise it (`ServedModel.check_batches` tries it).
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[Item] = deque()
        self._loops: dict[type[Decoding], Loop] = {}
        self._decoding: dict[Item, Asked[Any]] = {}
        self._batch: list[Item] = []
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"triptych {name}", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Items that are being computed."""
        return len(self._decoding) + len(self._batch)

    def submit(self, items: Sequence[Item]) -> None:
        """Put items into the queue, all or none: `RequestError` if there are too many, or the server ends."""
        with self._changed:
            if not self._is_open:
                raise RequestError(503, "the server is stopping: try again later", retry_after=5)
            if self._waiting and len(self._waiting) + len(items) > self._limits.max_waiting:
                raise RequestError(429, "too many texts are waiting: try again in a moment", retry_after=1)
            self._waiting.extend(items)
            self._changed.notify()

    def close(self) -> None:
        """Take in nothing more, and end when the queue is empty."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._take_in():
            batch = [item for item in self._batch if not self._is_decoded(item)]
            if batch:
                self._compute(batch)
            self._batch = []
            for kind in [*self._loops]:
                self._step(kind, self._loops[kind])

    def _take_in(self) -> bool:
        """Wait for something to do; takes the items that are begun now. False at the end."""
        with self._changed:
            while True:
                kept, size = deque[Item](), 0
                for item in self._waiting:
                    if item.is_left or item.result.cancelled():
                        continue
                    if self._fits(item, size) and item.result.set_running_or_notify_cancel():
                        self._batch.append(item)
                        size += item.size
                    else:
                        kept.append(item)
                self._waiting = kept
                if self._batch or self._loops:
                    return True
                if not kept and not self._is_open:
                    return False
                if not kept:
                    self._changed.wait()

    def _fits(self, item: Item, size: int) -> bool:
        """Whether an item is begun with the batch, which holds so much text."""
        if not self.num_running:
            return True
        if self.num_running >= self._limits.batch_items or size >= self._limits.max_characters:
            return False
        if isinstance(item.job, Decoding):
            return True
        return all(isinstance(other.job, Decoding) or other.job == item.job for other in self._batch)

    def _is_decoded(self, item: Item) -> bool:
        """Let an item join what is being decoded, or fail; False if it is to be computed in a batch."""
        if not isinstance(item.job, Decoding):
            return False
        kind = type(item.job)
        try:
            loop = self._loops.get(kind) or item.job.loop()
            if loop is None:
                return False
            asked = item.job.begin(item)
        except Exception as error:  # noqa: BLE001 (it belongs to the request, and the thread goes on)
            item.result.set_exception(error)
            return True
        self._loops[kind], self._decoding[item] = loop, asked
        loop.waiting.extend(asked.texts)
        return True

    def _step(self, kind: type[Decoding], loop: Loop) -> None:
        """Take a step of all texts of a loop."""
        items = {item: asked for item, asked in self._decoding.items() if type(item.job) is kind}
        for item, asked in items.items():
            for text in asked.texts if item.is_left else ():
                text.is_over = True
        try:
            goes_on = loop.step()
            over = [item for item, asked in items.items() if all(text.is_over for text in asked.texts)]
        except Exception as error:  # noqa: BLE001
            goes_on, over = False, [*items]
            self._compute_apart(over, error)
        for item in over:
            del self._decoding[item]
            if not item.result.done():
                self._finish(item, items[item])
        if not goes_on:
            del self._loops[kind]

    def _finish(self, item: Item, asked: Asked[Any]) -> None:
        try:
            item.result.set_result(None if item.is_left else asked.result())
        except Exception as error:  # noqa: BLE001
            item.result.set_exception(error)

    def _compute(self, batch: Sequence[Item]) -> None:
        try:
            for item, result in zip(batch, batch[0].job.compute(batch), strict=True):
                item.result.set_result(result)
        except Exception as error:  # noqa: BLE001
            self._compute_apart(batch, error)

    def _compute_apart(self, items: Sequence[Item], error: Exception) -> None:
        """Compute items one by one: one of them may be to blame for an error, and the others are not."""
        for item in items:
            if len(items) == 1 or item.is_left or item.has_begun:
                item.result.set_exception(error)
            else:
                self._compute([item])
