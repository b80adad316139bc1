"""Reading ahead of a stream without waiting for it."""

import queue
import threading
from collections.abc import Iterable
from typing import Generic, TypeVar, final

Item = TypeVar("Item")


@final
class _End:
    """Behind the last item."""


@final
class Ahead(Generic[Item]):
    """Items of a stream, read by a thread of its own up to `depth` ahead.

    Unlike the batches of training, which are always there to be made, lines may be slow to come:
    `has_more` tells whether asking would mean waiting.
    """

    def __init__(self, items: Iterable[Item], depth: int) -> None:
        self._arrived: queue.Queue[Item | Exception | _End] = queue.Queue(maxsize=depth)
        self._closed = False
        self._ended = False
        self._items = items
        # It may sit in a read that never ends, so nobody waits for it.
        threading.Thread(target=self._read, name="triptych-lines", daemon=True).start()

    @property
    def has_more(self) -> bool:
        """Whether an item, the end or an error has arrived that was not taken."""
        return not self._ended and not self._arrived.empty()

    def next(self) -> Item | None:
        """The next item, waited for; None at the end."""
        if self._ended:
            return None
        item = self._arrived.get()
        if isinstance(item, _End | Exception):
            self._ended = True
            if isinstance(item, Exception):
                raise item
            return None
        return item

    def close(self) -> None:
        """Take nothing more."""
        self._closed = self._ended = True
        while not self._arrived.empty():  # lets the thread see that it is over
            self._arrived.get_nowait()

    def _read(self) -> None:
        ending: Exception | _End = _End()
        try:
            for item in self._items:
                self._arrived.put(item)
                if self._closed:
                    return
        except Exception as error:  # noqa: BLE001 (raised again by the one who asks)
            ending = error
        self._arrived.put(ending)
