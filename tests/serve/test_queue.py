"""Texts that wait: which are computed together, which fail alone, and how many there may be."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from served import Served
from triptych.errors import UsageError
from triptych.model import Model
from triptych.running.decoding import GenerationOptions, SamplingOptions
from triptych.serving.limits import Limits, RequestError
from triptych.serving.served_models import Continuing, ServedModel
from triptych.serving.server import Visit
from triptych.serving.worker import Item, Lane, Queue, QueuedJob, Worker


def test_a_text_joins_what_is_being_decoded_and_one_that_nobody_waits_for_leaves(
    language_model: Model,
) -> None:
    served = ServedModel("gpt", language_model, Limits())
    long = GenerationOptions(40, SamplingOptions(temperature=1.0), seed=3)
    jobs = [Continuing(served, options) for options in (long, long, GenerationOptions(2))]
    given = [served.generator.encode(text) for text in ("Once upon a time", "The dog", "The cat")]
    alone = [job.compute([Item(job, ids)])[0] for job, ids in zip(jobs, given, strict=True)]
    over, told = list[Item](), [0, 0]

    def tell(part: object) -> None:
        """Other texts join when this one has begun; the first of them goes away."""
        told[0] += 1
        if told[0] == 3:
            served.queue.submit(items[1:])

    def tell_and_leave(part: object) -> None:
        told[1] += 1
        items[1].is_left = True

    items = [
        Item(job, ids, tell_)
        for job, ids, tell_ in zip(jobs, given, (tell, tell_and_leave, None), strict=True)
    ]
    for item in items:
        item.result.add_done_callback(lambda _, item=item: over.append(item))  # type: ignore[misc]
    served.queue.submit(items[:1])
    assert items[0].result.result(60) == alone[0]
    assert items[2].result.result(60) == alone[2]
    served.worker.close()
    assert over.index(items[2]) < over.index(items[0])
    assert told[1] == 1


class Doubling(QueuedJob):
    """A job of the worker alone: it fails for a text, and waits to be let go on."""

    def __init__(self) -> None:
        self.go_on, self.batches = threading.Event(), list[int]()

    def close(self) -> None:
        """Let it go on."""
        self.go_on.set()

    def compute(self, items: Sequence[Item]) -> list[Any]:
        self.go_on.wait(60)
        self.batches.append(len(items))
        if any(item.given == "bad" for item in items):
            raise UsageError("bad")
        return [item.given * 2 for item in items]


class Ending(Doubling):
    """A job whose items wait for others to end."""

    waits = True


class Staying(Doubling):
    """A job that is computed in this process alone."""

    travels = False


@contextmanager
def worked_queue(batch_items: int = 8, max_waiting: int = 8) -> Iterator[Queue]:
    queue = Queue(Limits(batch_items=batch_items, max_waiting=max_waiting, max_characters=12))
    worker = Worker("test", queue)
    try:
        yield queue
    finally:
        worker.close()


def started(queue: Queue, job: QueuedJob, given: str = "a") -> Item:
    """An item that is being computed."""
    item = Item(job, given)
    queue.submit([item])
    while queue.num_waiting:
        time.sleep(0.01)
    return item


def test_the_oldest_text_is_taken_first_and_with_it_those_of_its_length() -> None:
    queue, lane, job = Queue(Limits(batch_items=2)), Lane(), Doubling()
    queue.add(lane)
    queue.submit([Item(job, given) for given in ("aaa", "b", "cccc", "d", "e")])
    taken = list[list[str]]()
    while begun := queue.take(lane, waits=False):
        taken.append([item.given for item in begun])
        for item in begun:
            item.result.set_result(None)
    assert taken == [["aaa", "cccc"], ["b", "d"], ["e"]]


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_a_line_waits_until_most_others_have_ended_or_for_so_long(patience: float) -> None:
    queue, lane, job = Queue(Limits(batch_items=8), patience), Lane(), Ending()
    queue.add(lane)
    queue.submit([Item(job, "a") for _ in range(4)])
    begun = queue.take(lane, waits=False) or []
    queue.submit([Item(job, "b")])
    assert [item.given for item in queue.take(lane, waits=False) or []] == ([] if patience else ["b"])
    for item in begun[:3]:
        item.result.set_result(None)
    assert [item.given for item in queue.take(lane, waits=False) or []] == (["b"] if patience else [])


def test_lanes_share_what_waits_but_for_what_is_computed_here() -> None:
    queue, here, other, job = Queue(Limits(batch_items=8)), Lane(), Lane(is_here=False), Doubling()
    queue.add(here)
    queue.add(other)
    queue.submit([Item(job, "a") for _ in range(6)])
    assert [len(queue.take(lane, waits=False) or []) for lane in (other, here)] == [3, 3]
    queue.submit([Item(Staying(), "b")])
    assert [len(queue.take(lane, waits=False) or []) for lane in (other, here)] == [0, 1]


def test_a_text_that_fails_fails_alone_and_one_that_nobody_waits_for_is_not_computed() -> None:
    job = Doubling()
    with worked_queue() as queue:
        items = [started(queue, job, "first"), *(Item(job, given) for given in ("a", "bad", "left", "b"))]
        queue.submit(items[1:])
        items[3].is_left = True
        job.go_on.set()
        assert [items[place].result.result(60) for place in (0, 1, 4)] == ["firstfirst", "aa", "bb"]
        with pytest.raises(UsageError, match="bad"):
            items[2].result.result(60)
        assert not items[3].result.done()
    assert job.batches == [1, 3, 1, 1, 1]


def test_a_batch_holds_so_much_text_and_what_has_begun_is_not_told_twice() -> None:
    job, told = Doubling(), list[tuple[int, str]]()
    with worked_queue() as queue:
        started(queue, job)
        long = [Item(job, "x" * 12), Item(job, "y"), Item(job, "bad", told.append)]
        long[2].say(0, "begun")
        queue.submit(long)
        job.go_on.set()
        assert [long[0].result.result(60), long[1].result.result(60)] == ["x" * 24, "yy"]
        with pytest.raises(UsageError, match="bad"):
            long[2].result.result(60)
    assert job.batches == [1, 1, 2, 1, 1]  # the long text alone; "bad" is tried again, alone
    assert told == [(0, "begun")]


def test_a_queue_takes_in_so_much_and_no_more() -> None:
    job = Doubling()
    with worked_queue(batch_items=1, max_waiting=2) as queue:
        started(queue, job)
        queue.submit([Item(job, "b"), Item(job, "c")])
        with pytest.raises(RequestError, match="too many") as refused:
            queue.submit([Item(job, "d")])
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        job.go_on.set()


def test_a_server_that_is_full_too_slow_or_ending_says_when_to_try_again(translator: Model) -> None:
    job, fields = Doubling(), {"q": "twelve", "source": "en", "target": "de"}
    with (
        Served(
            {"en-de": translator}, Limits(max_requests=1, max_waiting=1, batch_items=1, seconds=0.3)
        ) as served,
        closing(job),
    ):
        server = served.state
        queue = server.models["en-de"].queue
        started(queue, job)
        slow, full = (served.ask("/translate", fields) for _ in range(2))
        assert (slow.status, slow.body) == (503, {"error": "no answer within 0.3 seconds"})
        assert (full.status, full.headers["retry-after"]) == (429, "1")
        other = Visit(0.0, "read")
        server._in_flight.add(other)
        crowded = served.ask("/translate", fields)
        server._in_flight.remove(other)
        assert (crowded.status, crowded.headers["retry-after"]) == (503, "1")
        assert crowded.body["error"].startswith("too many requests")
        server.is_stopping = True
        for path in ("/health", "/translate"):
            ending = served.ask(path, fields if path == "/translate" else None)
            assert (ending.status, ending.headers["retry-after"]) == (503, "5")
        assert served.ask("/metrics").status == 200
