"""Jobs of requests, and a thread per model for decoding items together or computing them in batches.

If a group of decoded items fails, its items are decoded again in halves, until a failing item is alone. Only
its request fails. The other items are unaffected, because a result depends only on the item's job and input.
Streamed text is sent only once.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, final

import torch

from triptych.running.decoding import Asked, Loop
from triptych.serving.limits import GONE, Limits, RequestError

# Waiting texts join the running texts once at most this many are left.
_FEW = 2


class QueuedJob(ABC):
    """Kind of computation of items. Items of equal jobs are computed together.

    Attributes:
        travels: True if another process may compute the job.
        waits: True if the job's texts wait until most running texts have ended. Running texts end soon and at
            about the same step, and every join has to copy the caches.
    """

    travels: ClassVar[bool] = True
    waits: ClassVar[bool] = False

    @property
    def repeats(self) -> bool:
        """True if an item has the same result when computed again with other items."""
        return True

    @abstractmethod
    def compute(self, items: "Sequence[Item]") -> list[Any]:
        """Compute the result of each item."""


class Decoding(QueuedJob):
    """Job with items that join the running decoding at any step."""

    @abstractmethod
    def loop(self) -> Loop | None:
        """Make a decoding loop for jobs of this class; None if the engine computes batches instead."""

    @abstractmethod
    def begin(self, item: "Item") -> Asked[Any]:
        """Return the sequences to decode for an item."""


@dataclass(eq=False)
class Item:
    """One text of a request, in a queue or in computation.

    Attributes:
        job: job of the item.
        given: input: the text, or another input of the job.
        tell: called by the worker's thread with a sample's index and its new text; None without a stream.
        result: future of the result.
        is_left: True if the request no longer waits for the result.
        when_left: called by `leave` while another process computes the item.
        told: number of streamed characters, by sample.
        was_lost: True if a process died while it computed the item; the item is then computed once more.
    """

    job: QueuedJob
    given: Any
    tell: Callable[[tuple[int, str]], object] | None = None
    result: "Future[Any]" = field(default_factory=Future)
    is_left: bool = False
    when_left: Callable[[], object] | None = None
    told: dict[int, int] = field(default_factory=dict)
    was_lost: bool = False
    _computed: dict[int, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of characters or tokens of the input."""
        return len(self.given) if isinstance(self.given, Sized) else 1

    @property
    def can_be_repeated(self) -> bool:
        """True if a repeated computation agrees with the text streamed so far."""
        return not self.told or self.job.repeats

    def say(self, sample: int, text: str) -> None:
        """Stream new text of a sample, without characters streamed by an earlier computation."""
        if self.tell is None or not text:
            return
        start = self._computed.get(sample, 0)
        known = self.told.get(sample, 0)
        self._computed[sample] = start + len(text)
        if new := text[max(0, known - start) :]:
            self.told[sample] = start + len(text)
            self.tell((sample, new))

    def require_waited_for(self) -> None:
        """Raise `RequestError` if the request no longer waits for the result."""
        if self.is_left:
            raise RequestError(GONE, "the client has gone away, or its time is over")

    def begin_again(self) -> None:
        """Reset the computed text before a new computation."""
        self._computed.clear()

    def leave(self) -> None:
        """Mark the item as no longer needed."""
        self.is_left = True
        if self.when_left is not None and not self.result.done():
            self.when_left()


@final
@dataclass(eq=False)
class Lane:
    """Consumer of a queue: a thread of this process, or another process.

    Attributes:
        is_here: True if the lane is a thread of this process.
        running: items in computation.
        joined: time of the last start of an item with `QueuedJob.waits`.
    """

    is_here: bool = True
    running: set[Item] = field(default_factory=set)
    joined: float = 0.0


@final
class Queue:
    """Queue of the items for a model.

    A lane with capacity takes the oldest item, and the items closest to it in length, because padding makes
    every text of a batch as long as the longest. If n items are before an item, it starts after at most n
    groups.

    Attributes:
        lanes: consumers of the queue.
        patience: longest wait in seconds of an item with `QueuedJob.waits` for running items to end.
    """

    def __init__(self, limits: Limits, patience: float = 1.0) -> None:
        self._limits, self.patience, self.lanes = limits, patience, list[Lane]()
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_open = True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of items in computation."""
        return sum(len(lane.running) for lane in self.lanes)

    def submit(self, items: Sequence[Item]) -> None:
        """Add all items to the queue; raise `RequestError` if too many wait, or the server is stopping."""
        with self._changed:
            # An empty queue accepts any allowed number of items; 429 requires that other items wait.
            if not self._is_open:
                raise RequestError(
                    503, "the server is stopping: try again later", retry_after=5
                )
            if len(items) > self._limits.max_waiting:
                why = f"{len(items):,} lines: at most {self._limits.max_waiting:,} in a request"
                raise RequestError(413, why)
            if (
                self._waiting
                and len(self._waiting) + len(items) > self._limits.max_waiting
            ):
                raise RequestError(
                    429,
                    "too many texts are waiting: try again in a moment",
                    retry_after=1,
                )
            self._waiting.extend(items)
            self._changed.notify_all()

    def put_back(self, item: "Item") -> None:
        """Put an item back at the front of the queue."""
        with self._changed:
            self._waiting.appendleft(item)
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse new items."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def add(self, lane: Lane) -> None:
        """Add a lane, and allow it to take items."""
        with self._changed:
            self.lanes.append(lane)

    def remove(self, lane: Lane) -> None:
        """Remove a lane; it does not get further items."""
        with self._changed:
            self.lanes.remove(lane)
            self._changed.notify_all()

    def take(self, lane: Lane, *, waits: bool) -> list[Item] | None:
        """Return the items that a lane starts now, after a wait for them if `waits`; None at the end."""
        # Items of disconnected clients are dropped.
        with self._changed:
            while lane in self.lanes:
                self._waiting = deque(
                    item
                    for item in self._waiting
                    if not (item.is_left or item.result.cancelled())
                )
                if (begun := self._begun(lane)) or not waits:
                    return begun
                if not self._is_open and not self._waiting:
                    break
                self._changed.wait(self.patience / 4 if self._waiting else None)
        return None

    def _begun(self, lane: Lane) -> list[Item]:
        found = list[Item]()
        size = 0
        share = -(
            -(len(self._waiting) + self.num_running) // len(self.lanes)
        )  # items per lane
        most = {
            True: min(share, self._limits.batch_items),
            False: self._limits.batch_items,
        }
        others_end = (
            len(lane.running) > _FEW and time.monotonic() < lane.joined + self.patience
        )
        able = [
            item
            for item in self._waiting
            if (lane.is_here or item.job.travels)
            and not (others_end and item.job.waits)
        ]
        for item in sorted(
            able, key=lambda item: (item is not able[0], abs(item.size - able[0].size))
        ):
            if (
                len(lane.running) >= most[item.job.travels]
                or size >= self._limits.max_characters
            ):
                continue
            if not isinstance(item.job, Decoding) and any(
                not isinstance(other.job, Decoding) and other.job != item.job
                for other in found
            ):
                continue
            self._waiting.remove(item)
            if item.result.running() or item.result.set_running_or_notify_cancel():
                lane.running.add(item)
                item.result.add_done_callback(partial(self._over, lane, item))
                found.append(item)
                size += item.size
        if any(item.job.waits for item in found):
            lane.joined = time.monotonic()
        return found

    def _over(self, lane: Lane, item: Item, _: object) -> None:
        with self._changed:
            lane.running.discard(item)
            self._changed.notify_all()


@final
class _Group:
    """Items decoded together.

    Attributes:
        loop: decoding loop.
        asked: sequences of each item.
        is_open: True if new items may join; False during the search for a failing item.
    """

    def __init__(self, loop: Loop, *, is_open: bool) -> None:
        self.loop = loop
        self.is_open = is_open
        self.asked: dict[Item, Asked[Any]] = {}

    def add(self, item: Item) -> None:
        """Start an item; an error becomes its result."""
        assert isinstance(item.job, Decoding)
        item.begin_again()
        try:
            asked = item.job.begin(item)
        except Exception as error:  # noqa: BLE001 (it belongs to the request, and the thread goes on)
            item.result.set_exception(error)
            return
        self.asked[item] = asked
        self.loop.waiting.extend(asked.texts)

    def step(self) -> bool:
        """Decode one token of all sequences; returns False once all have finished."""
        for item, asked in self.asked.items():
            for text in asked.texts if item.is_left else ():
                text.is_over = True
        return self.loop.step()

    def give_results(self) -> None:
        """Set the results of finished items."""
        over = [
            item
            for item, asked in self.asked.items()
            if all(text.is_over for text in asked.texts)
        ]
        for item in over:
            asked = self.asked.pop(item)
            try:
                item.result.set_result(None if item.is_left else asked.result())
            except Exception as error:  # noqa: BLE001
                item.result.set_exception(error)


@final
class Worker:
    """Thread for computing the items of a queue.

    Items of a `Decoding` job join the running sequences between two steps. Other items are computed between
    steps, items of equal jobs together. Results should not depend on the other items of a batch
    (`ServedModel.check_batches` tests it).
    """

    def __init__(self, name: str, queue: Queue, threads: int = 1) -> None:
        """Start the thread; `threads` is torch's number of threads."""
        self._queue, self._lane, self._num_threads = queue, Lane(), threads
        queue.add(self._lane)
        self._groups: list[tuple[type[Decoding], _Group]] = []
        self._thread = threading.Thread(
            target=self._run, name=f"triptych {name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the queue, and wait until all items are computed."""
        self._queue.close()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # applies to this thread only
        while (
            items := self._queue.take(self._lane, waits=not self._groups)
        ) is not None:
            if batch := [item for item in items if not self._is_decoded(item)]:
                self._compute(batch)
            for kind, group in [*self._groups]:
                self._step(kind, group)

    def _is_decoded(self, item: Item) -> bool:
        """Add an item to the running decoding, or set its error; False if it must be computed in a batch."""
        if not isinstance(item.job, Decoding):
            return False
        kind = type(item.job)
        group = next(
            (group for own, group in self._groups if own is kind and group.is_open),
            None,
        )
        try:
            if (
                group is None
                and (group := self._new_group(item.job, is_open=True)) is None
            ):
                return False
        except Exception as error:  # noqa: BLE001
            item.result.set_exception(error)
            return True
        group.add(item)
        return True

    def _new_group(self, job: Decoding, *, is_open: bool) -> _Group | None:
        """Make a group for jobs of a class; None if they are computed in batches."""
        loop = job.loop()
        if loop is None:
            return None
        group = _Group(loop, is_open=is_open)
        self._groups.append((type(job), group))
        return group

    def _step(self, kind: type[Decoding], group: _Group) -> None:
        """Decode one step of a group."""
        try:
            goes_on = group.step()
        except Exception as error:  # noqa: BLE001
            self._groups.remove((kind, group))
            self._begin_in_halves([*group.asked], error)
            return
        group.give_results()
        if not goes_on:
            self._groups.remove((kind, group))

    def _begin_in_halves(self, items: Sequence[Item], error: Exception) -> None:
        """Decode the items of a failed step again in two halves, to isolate the failing item."""
        open_ = [item for item in items if not item.result.done() and not item.is_left]
        for item in items:
            if not item.result.done() and (
                item.is_left or len(open_) == 1 or not item.can_be_repeated
            ):
                item.result.set_exception(error)
        again = [item for item in open_ if not item.result.done()]
        middle = -(-len(again) // 2)
        for half in (again[:middle], again[middle:]):
            if half:
                self._begin_together(half)

    def _begin_together(self, items: Sequence[Item]) -> None:
        job = items[0].job
        assert isinstance(job, Decoding)
        try:
            group = self._new_group(job, is_open=False)
            assert group is not None, "its jobs are decoded"
        except Exception as error:  # noqa: BLE001
            for item in items:
                item.result.set_exception(error)
            return
        for item in items:
            group.add(item)

    def _compute(self, batch: Sequence[Item]) -> None:
        for item in batch:
            item.begin_again()
        try:
            for item, result in zip(batch, batch[0].job.compute(batch), strict=True):
                item.result.set_result(result)
        except Exception as error:  # noqa: BLE001
            self._compute_apart(batch, error)

    def _compute_apart(self, items: Sequence[Item], error: Exception) -> None:
        """Compute the items of a failed batch one at a time, so that only failing items have an error."""
        for item in items:
            if item.result.done():
                continue
            if len(items) == 1 or item.is_left or not item.can_be_repeated:
                item.result.set_exception(error)
            else:
                self._compute([item])
