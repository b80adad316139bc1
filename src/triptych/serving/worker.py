"""One thread per model: what requests wait for, computed in batches."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, final

from triptych.serving.limits import Limits, RequestError


class Job(ABC):
    """What is computed of items. Items of equal jobs are computed together."""

    @abstractmethod
    def compute(self, items: "Sequence[Item]") -> list[Any]:
        """The result of each item."""


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
    """Computes items in the order in which they came; items of equal jobs together.

    The results do not depend on which items are computed together: the models promise it
    (`ServedModel.check_batches` tries it).

    Attributes:
        num_running: items that are being computed.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.num_running, self._limits = 0, limits
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"triptych {name}", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

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
        while batch := self._next_batch():
            self.num_running = len(batch)
            self._compute(batch)
            self.num_running = 0

    def _next_batch(self) -> list[Item]:
        """The oldest item and others of equal jobs, within the limits; empty at the end."""
        with self._changed:
            while True:
                kept, batch, size = deque[Item](), list[Item](), 0
                for item in self._waiting:
                    if item.is_left or item.result.cancelled():
                        continue
                    fits = len(batch) < self._limits.batch_items and size < self._limits.max_characters
                    if not batch or (fits and item.job == batch[0].job):
                        batch.append(item)
                        size += item.size
                    else:
                        kept.append(item)
                self._waiting = kept
                if batch := [item for item in batch if item.result.set_running_or_notify_cancel()]:
                    return batch
                if not kept:
                    if not self._is_open:
                        return []
                    self._changed.wait()

    def _compute(self, batch: list[Item]) -> None:
        try:
            for item, result in zip(batch, batch[0].job.compute(batch), strict=True):
                item.result.set_result(result)
        except Exception as error:  # noqa: BLE001 (it belongs to the request, and the thread goes on)
            for item in batch:  # one of them may be to blame, and the others are not
                if len(batch) == 1 or item.is_left or item.has_begun:
                    item.result.set_exception(error)
                else:
                    self._compute([item])
