"""Processes that serve the same models: each computes a share of what waits."""

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
from triptych.running.decoding.workers import Helper
from triptych.serving.limits import Limits, RequestError
from triptych.serving.logs import log
from triptych.serving.served_models import SERVED_HERE, ModelJob, ServedModel
from triptych.serving.worker import Item, Lane

_DIED = "the processes that computed this have ended: send it again"
_SECONDS_TO_END = 10.0
# A process is asked so often whether it is there; one that says nothing for so long is ended.
SECONDS_BETWEEN_PINGS = 2.0
SECONDS_SILENT = 30.0
# Before a process is started again, doubled each time that it does not come up.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 60.0
_PING = "ping"


class _FailedToOpenError(Exception):
    """A failure to open the models, in the words of another process."""


@final
class ServingProcess:
    """Another process with the models.

    One that dies, or no longer answers, is started again. What it had is computed once more, by it or by
    others: a job gives an item the same result each time.
    """

    def __init__(self, served: Sequence[ServedModel], arguments: bytes) -> None:
        """Start it; `arguments` are pickled, for `_serve`."""
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
        """Wait until it can compute, and let it take what waits."""
        lanes = self._open_until_it_stays(raises=True)
        threading.Thread(target=self._run, args=(lanes,), daemon=True).start()

    def close(self) -> None:
        """End it; what it computes is lost."""
        self._closed.set()
        if self._is_open:  # else it still opens the models, and would not listen
            with contextlib.suppress(OSError):
                self._send(self._helper, None)
            self._helper.process.join(_SECONDS_TO_END)
        self._helper.close()

    def _open_until_it_stays(self, *, raises: bool) -> dict[ServedModel, Lane]:
        """Open it, and again if it dies on the way; what it says is wrong is raised at the first start."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return self._open()
            except (EOFError, OSError):
                log({"error": f"process {self.pid} has ended while it opened the models"})
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
        """Compare what it computes with what is computed here, and let it take what waits."""
        found = self._helper.connection.recv()
        if isinstance(found, Exception):
            raise _FailedToOpenError(repr(found)) from found
        for model in self._served:
            is_invariant, alone = found[model.name]
            if model.is_batch_invariant is not None:
                model.is_batch_invariant &= is_invariant and alone == model.alone
                if not (is_invariant and alone == model.alone):
                    model.batch_invariance = "a process computed other bits than the first"
        self._is_open = True
        lanes = {model: Lane(is_here=False) for model in self._served}
        for model, lane in lanes.items():
            model.queue.add(lane)
            threading.Thread(target=self._give, args=(model, lane, self._helper), daemon=True).start()
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
            log({"error": f"process {self.pid} has ended ({self._helper.process.exitcode})"})
            self._helper = Helper(_serve, self._arguments)
            lanes = self._open_until_it_stays(raises=False)

    def _listen(self) -> None:
        """Take what the process says until it ends, or says nothing for so long that it is ended."""
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
        """Ask the process to answer; one that reads nothing would hold up whoever sends."""
        if self._lock.acquire(blocking=False):
            try:
                if select.select([], [self._helper.connection], [], 0)[1]:
                    self._helper.connection.send(_PING)
            finally:
                self._lock.release()

    def _give(self, model: ServedModel, lane: Lane, helper: Helper) -> None:
        """Give a process, and not one that takes its place, what the lane takes."""
        while items := model.queue.take(lane, waits=True):
            numbered = {next(self._numbers): item for item in items}
            self._items |= numbered
            for number, item in numbered.items():
                item.begin_again()
                item.when_left = partial(self._leave, helper, number)
            given = [(n, item.job, item.given, item.tell is not None) for n, item in numbered.items()]
            try:
                self._send(helper, (model.name, given))
            except OSError:  # one that has died
                self._compute_elsewhere([*numbered])
            except Exception as error:  # noqa: BLE001 (what cannot be sent)
                self._fail([*numbered], error)
            for item in items:
                if item.is_left:
                    item.leave()

    def _send(self, helper: Helper, message: object) -> None:
        with self._lock:
            helper.connection.send(message)

    def _leave(self, helper: Helper, number: int) -> None:
        with contextlib.suppress(OSError):  # one that has died is noticed by who listens
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
        """Let items of a process that has died wait again, once."""
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
    """What the process does: compute what comes, until the other end is closed or says so."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # which the process that asked follows for all
        signal.signal(number, signal.SIG_IGN)
    served = dict[str, ServedModel]()
    items = dict[int, Item]()
    lock = threading.Lock()
    limits = replace(limits, max_waiting=sys.maxsize)  # the items have been let in where they come from
    for name, model in models.items():
        served[name] = SERVED_HERE[name] = ServedModel(name, model, limits)
        served[name].queue.patience = 0.0  # the items have waited where they come from
        served[name].check_batches()
        require_same_files(model)  # else it has other numbers than the first process

    def say(*message: object) -> None:
        with lock, contextlib.suppress(OSError):  # nobody is there any more
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

    connection.send({name: (m.is_batch_invariant, m.alone) for name, m in served.items()})
    with contextlib.suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
            if message == _PING:
                say_ping()
                continue
            if isinstance(message, int):
                if (left := items.get(message)) is not None:
                    left.is_left = True
                    left.result.cancel()  # one that waits is not computed, and is over
                continue
            name, given = message
            for number, job, text, is_told in given:
                items[number] = Item(job, text, partial(say, number, "part") if is_told else None)
                items[number].result.add_done_callback(partial(tell, number))
            served[name].queue.submit([items[number] for number, *_ in given])
    os._exit(0)  # whatever is still computed
