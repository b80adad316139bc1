"""Jobs of requests, and a thread per model that decodes them side by side or computes them in batches.

Whatever fails in a batch is computed again in halves, until what fails is alone: it fails its own request.
The others go on unchanged, as an item is a function of its job and of what it was given. Text that was told
already is not told twice.
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

# Texts that wait for others to end go on when there are so few of the others.
_FEW = 2


class QueuedJob(ABC):
    """What is computed of items. Items of equal jobs are computed together.

    Attributes:
        travels: whether another process may compute it.
        waits: whether its texts wait until most of the texts that are decoded have ended. These end soon and
            at about the same step; each time that texts join others, caches are copied.
    """

    travels: ClassVar[bool] = True
    waits: ClassVar[bool] = False

    @property
    def repeats(self) -> bool:
        """True if an item gets the same result when it is computed again with other items."""
        return True

    @abstractmethod
    def compute(self, items: "Sequence[Item]") -> list[Any]:
        """The result of each item."""


class Decoding(QueuedJob):
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
        tell: called by the worker's thread with each text that a sample grows by, where somebody reads along.
        result: what was computed, or why it was not.
        is_left: nobody waits for it any more.
        when_left: called when that happens while another process computes it.
        told: characters of each sample that were told.
        was_lost: the process that computed it has died, and it is computed once more.
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
        """Characters or tokens of the text."""
        return len(self.given) if isinstance(self.given, Sized) else 1

    @property
    def can_be_repeated(self) -> bool:
        """True if computing it again gives everything that anybody has seen of its result."""
        return not self.told or self.job.repeats

    def say(self, sample: int, text: str) -> None:
        """Tell what the text of a sample grew by, if anybody listens and has not heard it before."""
        if self.tell is None or not text:
            return
        start = self._computed.get(sample, 0)
        known = self.told.get(sample, 0)
        self._computed[sample] = start + len(text)
        if new := text[max(0, known - start) :]:
            self.told[sample] = start + len(text)
            self.tell((sample, new))

    def require_waited_for(self) -> None:
        """Stop where nobody waits for the result any more; `RequestError`."""
        if self.is_left:
            raise RequestError(GONE, "the client has gone away, or its time is over")

    def begin_again(self) -> None:
        """Start the item from its beginning."""
        self._computed.clear()

    def leave(self) -> None:
        """Nobody waits for it any more."""
        self.is_left = True
        if self.when_left is not None and not self.result.done():
            self.when_left()


@final
@dataclass(eq=False)
class Lane:
    """One that computes items of a queue: a thread here, or another process.

    Attributes:
        is_here: whether it is a thread of this process.
        running: items that it computes.
        joined: when items last joined it that wait for others (`QueuedJob.waits`).
    """

    is_here: bool = True
    running: set[Item] = field(default_factory=set)
    joined: float = 0.0


@final
class Queue:
    """The items that wait for a model.

    A lane that has room takes the item that came first, and with it those that are most like it in length:
    a step of a batch reads as many tokens of each text as of the longest. So an item is begun at the latest
    when as many groups have been as there were items before it.

    Attributes:
        lanes: what computes the items.
        patience: seconds that an item waits for others to end (`QueuedJob.waits`).
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
        """Items that are being computed."""
        return sum(len(lane.running) for lane in self.lanes)

    def submit(self, items: Sequence[Item]) -> None:
        """Put items into the queue, all or none: `RequestError` if there are too many, or the server ends."""
        with self._changed:
            if not self._is_open:
                raise RequestError(503, "the server is stopping: try again later", retry_after=5)
            if len(items) > self._limits.max_waiting:
                why = f"{len(items):,} lines: at most {self._limits.max_waiting:,} in a request"
                raise RequestError(413, why)
            if self._waiting and len(self._waiting) + len(items) > self._limits.max_waiting:
                raise RequestError(429, "too many texts are waiting: try again in a moment", retry_after=1)
            self._waiting.extend(items)
            self._changed.notify_all()

    def put_back(self, item: "Item") -> None:
        """Let an item wait again, before all others."""
        with self._changed:
            self._waiting.appendleft(item)
            self._changed.notify_all()

    def close(self) -> None:
        """Take in nothing more."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def add(self, lane: Lane) -> None:
        """Let a lane take items."""
        with self._changed:
            self.lanes.append(lane)

    def remove(self, lane: Lane) -> None:
        """Let a lane take nothing more."""
        with self._changed:
            self.lanes.remove(lane)
            self._changed.notify_all()

    def take(self, lane: Lane, *, waits: bool) -> list[Item] | None:
        """Items that a lane begins now; it may wait for them. None at the end."""
        with self._changed:
            while lane in self.lanes:
                self._waiting = deque(
                    item for item in self._waiting if not (item.is_left or item.result.cancelled())
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
        share = -(-(len(self._waiting) + self.num_running) // len(self.lanes))  # of what is to do
        most = {True: min(share, self._limits.batch_items), False: self._limits.batch_items}
        others_end = len(lane.running) > _FEW and time.monotonic() < lane.joined + self.patience
        able = [
            item
            for item in self._waiting
            if (lane.is_here or item.job.travels) and not (others_end and item.job.waits)
        ]
        for item in sorted(able, key=lambda item: (item is not able[0], abs(item.size - able[0].size))):
            if len(lane.running) >= most[item.job.travels] or size >= self._limits.max_characters:
                continue
            if not isinstance(item.job, Decoding) and any(
                not isinstance(other.job, Decoding) and other.job != item.job for other in found
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
    """Items that are decoded together.

    Attributes:
        loop: decodes their texts.
        asked: the texts of each item.
        is_open: whether others may join: not where one of them is being looked for that fails.
    """

    def __init__(self, loop: Loop, *, is_open: bool) -> None:
        self.loop = loop
        self.is_open = is_open
        self.asked: dict[Item, Asked[Any]] = {}

    def add(self, item: Item) -> None:
        """Begin an item; what is wrong with it is its result."""
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
        """Lengthen all texts by a token; whether there is more to do."""
        for item, asked in self.asked.items():
            for text in asked.texts if item.is_left else ():
                text.is_over = True
        return self.loop.step()

    def give_results(self) -> None:
        """Give the results of the items whose texts are over."""
        over = [item for item, asked in self.asked.items() if all(text.is_over for text in asked.texts)]
        for item in over:
            asked = self.asked.pop(item)
            try:
                item.result.set_result(None if item.is_left else asked.result())
            except Exception as error:  # noqa: BLE001
                item.result.set_exception(error)


@final
class Worker:
    """A thread that computes the items of a queue.

    Items of a `Decoding` job join the texts that are being decoded, between two steps. Other items are
    computed between steps too, equal jobs together. The results do not depend on which items are computed
    together (`ServedModel.check_batches` tries it).
    """

    def __init__(self, name: str, queue: Queue, threads: int = 1) -> None:
        """Start it; torch computes with this number of threads."""
        self._queue, self._lane, self._num_threads = queue, Lane(), threads
        queue.add(self._lane)
        self._groups: list[tuple[type[Decoding], _Group]] = []
        self._thread = threading.Thread(target=self._run, name=f"triptych {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End when the queue is empty."""
        self._queue.close()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # of this thread alone
        while (items := self._queue.take(self._lane, waits=not self._groups)) is not None:
            if batch := [item for item in items if not self._is_decoded(item)]:
                self._compute(batch)
            for kind, group in [*self._groups]:
                self._step(kind, group)

    def _is_decoded(self, item: Item) -> bool:
        """Let an item join what is being decoded, or fail; False if it is to be computed in a batch."""
        if not isinstance(item.job, Decoding):
            return False
        kind = type(item.job)
        group = next((group for own, group in self._groups if own is kind and group.is_open), None)
        try:
            if group is None and (group := self._new_group(item.job, is_open=True)) is None:
                return False
        except Exception as error:  # noqa: BLE001
            item.result.set_exception(error)
            return True
        group.add(item)
        return True

    def _new_group(self, job: Decoding, *, is_open: bool) -> _Group | None:
        """Make a group for jobs of a class; None where they are computed in batches."""
        loop = job.loop()
        if loop is None:
            return None
        group = _Group(loop, is_open=is_open)
        self._groups.append((type(job), group))
        return group

    def _step(self, kind: type[Decoding], group: _Group) -> None:
        """Take a step of all texts of a group."""
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
        """Decode the items of a step that failed again, to find the one that it failed of."""
        open_ = [item for item in items if not item.result.done() and not item.is_left]
        for item in items:
            if not item.result.done() and (item.is_left or len(open_) == 1 or not item.can_be_repeated):
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
        """Compute items one by one: one of them may be to blame for an error, and the others are not."""
        for item in items:
            if item.result.done():
                continue
            if len(items) == 1 or item.is_left or not item.can_be_repeated:
                item.result.set_exception(error)
            else:
                self._compute([item])
