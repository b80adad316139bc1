"""Worker processes with the same models; each computes a share of the items."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, final

from triptych.errors import TriptychError
from triptych.model import Model, require_same_files
from triptych.running.decoding import Helper
from triptych.serving.limits import Limits, RequestError
from triptych.serving.logs import log
from triptych.serving.served_models import SERVED_HERE, ModelJob, ServedModel
from triptych.serving.worker import Item, Lane

_DIED = "the processes that computed this have ended: send it again"
_SECONDS_TO_END = 10.0
# Interval of pings to a process, and the time without a message before it is killed.
SECONDS_BETWEEN_PINGS = 2.0
SECONDS_SILENT = 30.0
# Pause before a process is restarted, doubled after each failed start.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 60.0
_PING = "ping"


class _FailedToOpenError(Exception):
    """Error of another process that failed to open the models."""


@final
class ServingProcess:
    """Another process with the models.

    A dead or silent process is restarted. Its items are computed once more, by any process: a job computes
    the same result each time.
    """

    def __init__(self, served: Sequence[ServedModel], arguments: bytes) -> None:
        """Start the process; `arguments` are the pickled arguments of `_serve`."""
        self._served = served
        self._arguments = arguments
        self._helper = Helper(_serve, arguments)
        self._numbers, self._items = count(), dict[int, Item]()
        self._lock = threading.Lock()
        self._is_open = False
        self._closed = threading.Event()

    @property
    def pid(self) -> int | None:
        return self._helper.process.pid

    def start(self) -> None:
        """Wait until the process is ready, and let it take items."""
        lanes = self._open_until_it_stays(raises=True)
        threading.Thread(target=self._run, args=(lanes,), daemon=True).start()

    def close(self) -> None:
        """End the process; results of its running items are lost."""
        self._closed.set()
        if (
            self._is_open
        ):  # otherwise the process is opening its models and does not read messages
            with contextlib.suppress(OSError):
                self._send(self._helper, None)
            self._helper.process.join(_SECONDS_TO_END)
        self._helper.close()

    def _open_until_it_stays(self, *, raises: bool) -> dict[ServedModel, Lane]:
        """Open the process, and restart it until it succeeds.

        With `raises`, an error in the models is raised; a dead process is restarted all the same. Returns {}
        if the process is closed meanwhile.
        """
        pause = _FIRST_PAUSE
        while True:
            try:
                return self._open()
            except (EOFError, OSError):
                log(
                    {
                        "error": f"process {self.pid} has ended while it opened the models"
                    }
                )
            except _FailedToOpenError as error:
                if raises:
                    cause = error.__cause__
                    assert isinstance(cause, Exception)
                    raise cause from None
                log({"error": f"a process cannot be started again: {error}"[:500]})
            self._helper.close()
            if self._closed.wait(pause):
                return {}
            pause = min(2 * pause, _LONGEST_PAUSE)
            self._helper = Helper(_serve, self._arguments)

    def _open(self) -> dict[ServedModel, Lane]:
        """Compare the process's results of `check_batches` with this process's, and let it take items."""
        # A model is batch-invariant only if all processes compute the same bits.
        found = self._helper.connection.recv()
        if isinstance(found, Exception):
            raise _FailedToOpenError(repr(found)) from found
        for model in self._served:
            is_invariant, alone = found[model.name]
            if model.is_batch_invariant is not None:
                model.is_batch_invariant &= is_invariant and alone == model.alone
                if not (is_invariant and alone == model.alone):
                    model.batch_invariance = (
                        "a process computed other bits than the first"
                    )
        self._is_open = True
        lanes = {model: Lane(is_here=False) for model in self._served}
        for model, lane in lanes.items():
            model.queue.add(lane)
            threading.Thread(
                target=self._give, args=(model, lane, self._helper), daemon=True
            ).start()
        return lanes

    def _run(self, lanes: dict[ServedModel, Lane]) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(EOFError, OSError):
                self._listen()
            self._is_open = False
            for model, lane in lanes.items():
                model.queue.remove(lane)
            self._compute_elsewhere([*self._items])
            if self._closed.is_set():
                return
            self._helper.close()
            log(
                {
                    "error": f"process {self.pid} has ended ({self._helper.process.exitcode})"
                }
            )
            self._helper = Helper(_serve, self._arguments)
            lanes = self._open_until_it_stays(raises=False)

    def _listen(self) -> None:
        """Receive messages until the process ends, fails or is killed for silence."""
        # Pings are sent only after a quiet interval.
        connection = self._helper.connection
        heard = time.monotonic()
        while True:
            if connection.poll(SECONDS_BETWEEN_PINGS):
                message = connection.recv()
                heard = time.monotonic()
                if isinstance(message, Exception):
                    log({"error": f"process {self.pid} has failed: {message!r}"[:500]})
                    return
                if message != _PING:
                    self._receive(*message)
            elif time.monotonic() - heard > SECONDS_SILENT:
                log({"error": f"process {self.pid} does not answer and is ended"})
                self._helper.process.kill()
                return
            else:
                self._ping()

    def _ping(self) -> None:
        """Send a ping if the connection is writable: a full connection would block the sender."""
        if self._lock.acquire(blocking=False):
            try:
                if select.select([], [self._helper.connection], [], 0)[1]:
                    self._helper.connection.send(_PING)
            finally:
                self._lock.release()

    def _give(self, model: ServedModel, lane: Lane, helper: Helper) -> None:
        """Send the lane's items to a process, until its lane is removed.

        `helper` is fixed: a restarted process gets another thread.
        """
        while items := model.queue.take(lane, waits=True):
            numbered = {next(self._numbers): item for item in items}
            self._items |= numbered
            for number, item in numbered.items():
                item.begin_again()
                item.when_left = partial(self._leave, helper, number)
            given = [
                (n, item.job, item.given, item.tell is not None)
                for n, item in numbered.items()
            ]
            try:
                self._send(helper, (model.name, given))
            except OSError:  # the process has died
                self._compute_elsewhere([*numbered])
            except Exception as error:  # noqa: BLE001 (an item that cannot be pickled)
                self._fail([*numbered], error)
            # An item may have been left before `when_left` was set.
            for item in items:
                if item.is_left:
                    item.leave()

    def _send(self, helper: Helper, message: object) -> None:
        with self._lock:
            helper.connection.send(message)

    def _leave(self, helper: Helper, number: int) -> None:
        with contextlib.suppress(OSError):  # `_listen` handles a dead process
            self._send(helper, number)

    def _receive(self, number: int, kind: str, found: Any) -> None:
        if kind == "part":
            if not (item := self._items[number]).is_left:
                item.say(*found)
        elif kind == "result":
            self._items.pop(number).result.set_result(found)
        else:
            self._items.pop(number).result.set_exception(found)

    def _compute_elsewhere(self, numbers: Sequence[int]) -> None:
        """Put the items of a dead process back into their queue, once per item."""
        for number in numbers:
            if (item := self._items.pop(number, None)) is None:
                continue
            item.when_left = None
            if item.was_lost or not item.can_be_repeated or self._closed.is_set():
                item.result.set_exception(RequestError(503, _DIED, retry_after=1))
            else:
                item.was_lost = True
                assert isinstance(item.job, ModelJob)
                item.job.queue.put_back(item)

    def _fail(self, numbers: Sequence[int], error: Exception) -> None:
        for number in numbers:
            if (item := self._items.pop(number, None)) is not None:
                item.result.set_exception(error)


def _serve(connection: Connection, models: Mapping[str, Model], limits: Limits) -> None:
    """Compute received items in the worker process, until the connection is closed or sends None."""
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # the main process handles signals for all
        signal.signal(number, signal.SIG_IGN)
    served = dict[str, ServedModel]()
    items = dict[int, Item]()
    lock = threading.Lock()
    limits = replace(
        limits, max_waiting=sys.maxsize
    )  # the main process has checked the limit
    for name, model in models.items():
        served[name] = SERVED_HERE[name] = ServedModel(name, model, limits)
        served[name].queue.patience = 0.0  # the items have waited in the main process
        served[name].check_batches()
        require_same_files(
            model
        )  # changed files would give other weights than in the main process

    def say(*message: object) -> None:
        with (
            lock,
            contextlib.suppress(OSError),
        ):  # the main process has closed the connection
            connection.send(message)

    def say_ping() -> None:
        with lock, contextlib.suppress(OSError):
            connection.send(_PING)

    def tell(number: int, _: object) -> None:
        result = items.pop(number).result
        if result.cancelled():
            say(number, "result", None)
        elif (error := result.exception()) is None:
            say(number, "result", result.result())
        else:
            is_told = isinstance(error, TriptychError | RequestError)
            say(number, "error", error if is_told else RuntimeError(repr(error)))

    connection.send(
        {name: (m.is_batch_invariant, m.alone) for name, m in served.items()}
    )
    with contextlib.suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
            if message == _PING:
                say_ping()
                continue
            if isinstance(message, int):
                if (left := items.get(message)) is not None:
                    left.is_left = True
                    left.result.cancel()  # an item that still waits is not computed
                continue
            name, given = message
            for number, job, text, is_told in given:
                items[number] = Item(
                    job, text, partial(say, number, "part") if is_told else None
                )
                items[number].result.add_done_callback(partial(tell, number))
            served[name].queue.submit([items[number] for number, *_ in given])
    os._exit(0)  # without waiting for running items
