"""Processes that serve the same models: each computes a share of what waits."""

import contextlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, final

from triptych.decoding.workers import Helper
from triptych.errors import TriptychError
from triptych.face import Model
from triptych.serving.limits import Limits, RequestError
from triptych.serving.models import SERVED_HERE, ServedModel
from triptych.serving.server import log
from triptych.serving.worker import Item, Lane

_DIED = "the process that computed this has ended: send it again"
_SECONDS_TO_END = 10.0


@final
class ServingProcess:
    """Another process with the models. One that dies fails its items, and is started again."""

    def __init__(self, served: Sequence[ServedModel], arguments: bytes) -> None:
        """Start it; `arguments` are pickled, for `_serve`."""
        self._served, self._arguments = served, arguments
        self._helper = Helper(_serve, arguments)
        self._numbers, self._items = count(), dict[int, Item]()
        self._lock, self._is_open, self._is_closed = threading.Lock(), False, False

    @property
    def pid(self) -> int | None:
        return self._helper.process.pid

    def start(self) -> None:
        """Wait until it can compute, and let it take what waits."""
        threading.Thread(target=self._run, args=(self._open(),), daemon=True).start()

    def close(self) -> None:
        """End it; what it computes is lost."""
        self._is_closed = True
        if self._is_open:  # else it still opens the models, and would not listen
            with contextlib.suppress(OSError):
                self._send(self._helper, None)
            self._helper.process.join(_SECONDS_TO_END)
        self._helper.close()

    def _open(self) -> dict[ServedModel, Lane]:
        """Compare what it computes with what is computed here, and let it take what waits."""
        found = self._helper.connection.recv()
        if isinstance(found, Exception):
            raise found
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
        while True:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._receive(*self._helper.connection.recv())
            for model, lane in lanes.items():
                model.queue.remove(lane)
            self._fail([*self._items])
            if self._is_closed:
                return
            self._helper.close()
            log({"error": f"process {self.pid} has ended ({self._helper.process.exitcode})"})
            self._helper = Helper(_serve, self._arguments)
            try:
                lanes = self._open()
            except Exception as error:  # noqa: BLE001 (the other processes go on)
                log({"error": f"a process cannot be started again: {error!r}"[:500]})
                return

    def _give(self, model: ServedModel, lane: Lane, helper: Helper) -> None:
        """Give a process, and not one that takes its place, what the lane takes."""
        while items := model.queue.take(lane, waits=True):
            numbered = {next(self._numbers): item for item in items}
            self._items |= numbered
            for number, item in numbered.items():
                item.when_left = partial(self._leave, helper, number)
            given = [(n, item.job, item.given, item.tell is not None) for n, item in numbered.items()]
            try:
                self._send(helper, (model.name, given))
            except Exception as error:  # noqa: BLE001 (one that has died, or what cannot be sent)
                self._fail([*numbered], None if isinstance(error, OSError) else error)
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
                item.say(found)
        elif kind == "result":
            self._items.pop(number).result.set_result(found)
        else:
            self._items.pop(number).result.set_exception(found)

    def _fail(self, numbers: Sequence[int], error: Exception | None = None) -> None:
        for number in numbers:
            if (item := self._items.pop(number, None)) is not None:
                item.result.set_exception(error or RequestError(503, _DIED, retry_after=1))


def _serve(connection: Connection, models: Mapping[str, Model], limits: Limits) -> None:
    """What the process does: compute what comes, until the other end is closed or says so."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process that asked finishes its requests first
    served, items, lock = dict[str, ServedModel](), dict[int, Item](), threading.Lock()
    for name, model in models.items():
        served[name] = SERVED_HERE[name] = ServedModel(name, model, limits)
        served[name].queue.patience = 0.0  # the items have waited where they come from
        served[name].check_batches()

    def say(*message: object) -> None:
        with lock, contextlib.suppress(OSError):  # nobody is there any more
            connection.send(message)

    def tell(number: int, _: object) -> None:
        result = items.pop(number).result
        if result.cancelled():
            say(number, "result", None)
        elif (error := result.exception()) is None:
            say(number, "result", result.result())
        else:
            say(number, "error", error if isinstance(error, TriptychError) else RuntimeError(repr(error)))

    connection.send({name: (model.is_batch_invariant, model.alone) for name, model in served.items()})
    with contextlib.suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
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
