"""Number of torch's threads, number of cores, and a thread to compute items ahead of their use."""

import os
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

Item = TypeVar("Item")

# Name of threads left running when the process ends.
LEFT = "triptych left"


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the block; None keeps the number.

    The setting is global: until the block ends, it also applies to other threads of the process.
    """
    import torch  # slow to import; the other functions do without

    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


def num_cores() -> int:
    """Return the number of processors available to this process."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def are_left() -> bool:
    """Return True if threads named `LEFT` are running; a normal exit may abort if they use torch."""
    return any(thread.name == LEFT for thread in threading.enumerate())


@final
class Ahead(Iterator[Item]):
    """Iterator over a stream; a thread computes the items, up to `depth` ahead of their use."""

    def __init__(self, items: Iterable[Item], depth: int) -> None:
        self._made: queue.SimpleQueue[tuple[Item] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._room = threading.Semaphore(depth)
        self._is_over = False
        name = "triptych-ahead"
        self._maker = threading.Thread(
            target=self._make, args=(items,), name=name, daemon=True
        )
        self._maker.start()

    @property
    def has_more(self) -> bool:
        """Return True if an item, an error or the end is ready, so that `next` does not wait."""
        return not self._is_over and not self._made.empty()

    def __next__(self) -> Item:
        item = None if self._is_over else self._made.get()
        if isinstance(item, tuple):
            self._room.release()
            return item[0]
        self._is_over = True
        raise StopIteration if item is None else item

    def close(self, *, waits: bool = True) -> None:
        """Stop the thread after its current item; wait for it if `waits`."""
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
