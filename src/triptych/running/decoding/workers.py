"""Single-threaded worker processes for searching batches in parallel.

Threads within a product do not pay off at the sizes of a decoding step; parallel batches do. The calling
process searches, too, so that the first results need not wait until workers have started.
"""

import contextlib
import multiprocessing
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, final

import torch

from triptych import user_code
from triptych.running.decoding.decoder import Hypotheses

Sentences = Sequence[Sequence[int]]
# Search of a batch of sentences.
Searcher = Callable[[Sentences], Hypotheses]

# Number of batches assigned to a process: a batch in work and a batch in reserve.
_IN_HAND = 2


@final
class Helper:
    """A single-threaded process, started with `spawn`, and its connection."""

    def __init__(self, work: Callable[..., None], arguments: bytes) -> None:
        """Start `work(connection, *arguments)` with pickled arguments.

        Tensors are sent by value because shared memory is small in containers. Exceptions of `work` are sent
        over the connection.
        """
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        given = theirs, work, user_code.executed_paths()
        self.process: BaseProcess = context.Process(
            target=_run_helper, args=given, daemon=True
        )
        # Ctrl-C signals every process of a terminal, but only this process shall handle it: the new process
        # inherits the blocked signal. Python's resource tracker would otherwise start with the first process
        # and unblock the signal.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        # The process takes seconds until it reads, so a thread sends the arguments.
        self._sender = threading.Thread(
            target=_send, args=(self.connection, arguments), daemon=True
        )
        self._sender.start()

    def close(self) -> None:
        """Kill the process and close its connection."""
        self.process.kill()
        self.process.join()
        self._sender.join()  # sending fails at once when the reader is gone
        self.connection.close()


@final
@dataclass
class _Worker:
    helper: Helper
    ready: bool = False
    in_hand: deque[tuple[Any, Sentences]] = field(default_factory=deque)


@final
class WorkerPool:
    """Pool of helpers that search batches, in any order.

    Helpers start with `spawn`, so a script must guard its main part with `if __name__ == "__main__"`.
    """

    def __init__(
        self, make_searcher: Callable[..., Searcher], arguments: tuple[Any, ...]
    ) -> None:
        self._make_searcher = make_searcher
        self._arguments = arguments
        self._workers: list[_Worker] = []
        self._waiting: deque[tuple[Any, Sentences]] = deque()
        self._found: deque[tuple[Any, Hypotheses]] = deque()
        self._own: Searcher | None = None

    def start(self, count: int) -> None:
        """Start helpers unless they are running; they need a few seconds until they are ready."""
        if self._workers:
            return
        arguments = pickle.dumps((self._make_searcher, self._arguments))
        self._workers = [_Worker(Helper(_search, arguments)) for _ in range(count)]

    def wait_until_ready(self) -> None:
        while any(not worker.ready for worker in self._workers):
            self._listen(timeout=None)

    def submit(self, key: Any, sentences: Sentences) -> None:
        """Submit a batch; `key` stays in this process and is returned with the results."""
        self._waiting.append((key, sentences))

    @property
    def busy(self) -> bool:
        return bool(
            self._waiting
            or self._found
            or any(worker.in_hand for worker in self._workers)
        )

    def next(self) -> tuple[Any, Hypotheses]:
        """Return the key and results of a submitted batch; waiting batches are searched here, too."""
        while not self._found:
            self._hand_out()
            self._listen(timeout=0.0)
            if self._found:
                break
            # Search here rather than wait for the helpers.
            if self._waiting:
                key, sentences = self._waiting.popleft()
                if self._own is None:
                    self._own = self._make_searcher(*self._arguments)
                self._found.append((key, self._own(sentences)))
            else:
                self._listen(timeout=None)
        return self._found.popleft()

    def close(self) -> None:
        """Stop the helpers and drop their batches."""
        for worker in self._workers:
            worker.helper.close()
        self._workers = []

    def _hand_out(self) -> None:
        for round_ in range(_IN_HAND):
            for worker in self._workers:
                # The last waiting batch is left to this process, which would otherwise be idle.
                if (
                    worker.ready
                    and len(worker.in_hand) == round_
                    and len(self._waiting) > round_
                ):
                    task = self._waiting.popleft()
                    worker.in_hand.append(task)
                    with contextlib.suppress(OSError):  # `_listen` detects dead workers
                        worker.helper.connection.send(task[1])

    def _listen(self, timeout: float | None) -> None:
        by_connection = {worker.helper.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                message = worker.helper.connection.recv()
            except (EOFError, OSError):
                # The worker was killed, perhaps for lack of memory: put its batches back into the queue.
                self._workers.remove(worker)
                self._waiting.extendleft(reversed(worker.in_hand))
                continue
            if message is None:
                worker.ready = True
            elif isinstance(message, Exception):
                raise message
            else:
                self._found.append((worker.in_hand.popleft()[0], message))


def _send(connection: Connection, arguments: bytes) -> None:
    with contextlib.suppress(OSError):  # `_listen` detects dead workers
        connection.send_bytes(arguments)


def _run_helper(
    connection: Connection, work: Callable[..., None], code: Sequence[Path]
) -> None:
    """Run `work` in a helper until the connection is closed."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        try:
            for path in code:
                user_code.execute(path)
            work(connection, *pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 (raised again by the process that asked)
            connection.send(error)


def _search(
    connection: Connection,
    make_searcher: Callable[..., Searcher],
    arguments: Sequence[Any],
) -> None:
    searcher = make_searcher(*arguments)
    connection.send(None)
    while True:
        connection.send(searcher(connection.recv()))
