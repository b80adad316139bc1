"""How many threads torch computes with, how many there is room for, and one that works ahead."""

import os
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

import torch

Item = TypeVar("Item")

# The name of threads for which nobody waits when the process ends.
LEFT = "triptych left"


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Compute with this many threads inside the block; None changes nothing.

    The number holds for the whole process, so other threads have it too until the block ends.
    """
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def are_left() -> bool:
    """Return True if threads named `LEFT` still work: beside torch in one, a usual end may abort."""
    return any(thread.name == LEFT for thread in threading.enumerate())


@final
class Ahead(Iterator[Item]):
    """Items of a stream, made by a thread of their own up to `depth` ahead of their use."""

    def __init__(self, items: Iterable[Item], depth: int) -> None:
        self._made: queue.SimpleQueue[tuple[Item] | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._is_over = False
        name = "triptych-ahead"
        self._maker = threading.Thread(target=self._make, args=(items,), name=name, daemon=True)
        self._maker.start()

    @property
    def has_more(self) -> bool:
        """Whether an item, the end or an error is there that was not taken: asking does not mean waiting."""
        return not self._is_over and not self._made.empty()

    def __next__(self) -> Item:
        item = None if self._is_over else self._made.get()
        if isinstance(item, tuple):
            self._room.release()
            return item[0]
        self._is_over = True
        raise StopIteration if item is None else item

    def close(self, *, waits: bool = True) -> None:
        """Take nothing more, and wait for the item being made unless that may never come."""
        self._is_over = True
        self._room.release()
        if waits:
            self._maker.join()

    def _make(self, items: Iterable[Item]) -> None:
        ending: BaseException | None = None
        try:
            iterator = iter(items)
            while self._room.acquire() and not self._is_over:
                self._made.put((next(iterator),))
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again in `__next__`)
            ending = error
        self._made.put(ending)
