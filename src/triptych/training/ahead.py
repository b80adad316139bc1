"""Making the next things while the present one is used."""

from collections.abc import Generator, Iterable
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """The items in their order, made in a thread of their own up to `depth` ahead of their use.

    The thread lives from the first item asked for until the last one is taken, an error, or `close`, which
    waits for the item being made. Who may stop before the end should close, with `contextlib.closing`.
    """
    made: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    room, closed = Semaphore(depth), Event()

    def make() -> None:
        ending: BaseException | None = None
        try:
            iterator = iter(items)
            while room.acquire() and not closed.is_set():
                made.put((next(iterator),))
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised where the item is used
            ending = error
        made.put(ending)

    maker = Thread(target=make, name="triptych-ahead", daemon=True)
    maker.start()
    try:
        while isinstance(item := made.get(), tuple):
            room.release()
            yield item[0]
        if item is not None:
            raise item
    finally:
        closed.set()
        room.release()
        maker.join()
