"""Processes of one thread each that search side by side.

Threads inside one product do not pay at the sizes of a decoding step; whole batches side by side do.
The process that asks searches too, so the first results do not wait for the others to start.
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
from triptych.running.decoding.search import Hypothesis

Sentences = Sequence[Sequence[int]]
Hypotheses = list[list[Hypothesis]]
# Searches for a batch of sentences.
Searcher = Callable[[Sentences], Hypotheses]

# Batches a process holds: one to work on, one to go on with.
_IN_HAND = 2


@final
class Helper:
    """A process of one thread, started with `spawn`, and the connection to it."""

    def __init__(self, work: Callable[..., None], arguments: bytes) -> None:
        """Start `work(connection, *arguments)`; the arguments are pickled, tensors by value.

        The shared memory that torch would use for tensors is small in containers. What `work` raises comes
        over the connection.
        """
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        given = theirs, work, user_code.executed_paths()
        self.process: BaseProcess = context.Process(target=_run_helper, args=given, daemon=True)
        # Ctrl-C goes to every process of a terminal, and this one decides: the other inherits the mask.
        # Python's tracker of shared memory, which starts with the first process, would lift it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        # It takes seconds before it reads, and the bytes wait for it in a thread of their own.
        self._sender = threading.Thread(target=_send, args=(self.connection, arguments), daemon=True)
        self._sender.start()

    def close(self) -> None:
        """Stop it."""
        self.process.kill()
        self.process.join()
        self._sender.join()  # nobody reads any more, so it has ended or ends now
        self.connection.close()


@final
@dataclass
class _Worker:
    helper: Helper
    ready: bool = False
    in_hand: deque[tuple[Any, Sentences]] = field(default_factory=deque)


@final
class WorkerPool:
    """Searches for batches, in any order, with helpers.

    Started with `spawn`: a script that uses it must guard its main part with `if __name__ == "__main__"`.
    """

    def __init__(self, make_searcher: Callable[..., Searcher], arguments: tuple[Any, ...]) -> None:
        self._make_searcher = make_searcher
        self._arguments = arguments
        self._workers: list[_Worker] = []
        self._waiting: deque[tuple[Any, Sentences]] = deque()
        self._found: deque[tuple[Any, Hypotheses]] = deque()
        self._own: Searcher | None = None

    def start(self, count: int) -> None:
        """Start helpers, if there are none yet. They take a few seconds to be of use."""
        if self._workers:
            return
        arguments = pickle.dumps((self._make_searcher, self._arguments))
        self._workers = [_Worker(Helper(_search, arguments)) for _ in range(count)]

    def wait_until_ready(self) -> None:
        while any(not worker.ready for worker in self._workers):
            self._listen(timeout=None)

    def submit(self, key: Any, sentences: Sentences) -> None:
        """Ask for a batch; `key`, which stays in this process, comes back with its results."""
        self._waiting.append((key, sentences))

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._found or any(worker.in_hand for worker in self._workers))

    def next(self) -> tuple[Any, Hypotheses]:
        """The results of a batch asked for; searches here too while there is something to do."""
        while not self._found:
            self._hand_out()
            self._listen(timeout=0.0)
            if self._found:
                break
            if self._waiting:
                key, sentences = self._waiting.popleft()
                if self._own is None:
                    self._own = self._make_searcher(*self._arguments)
                self._found.append((key, self._own(sentences)))
            else:
                self._listen(timeout=None)
        return self._found.popleft()

    def close(self) -> None:
        """Stop the helpers; what they have in hand is lost."""
        for worker in self._workers:
            worker.helper.close()
        self._workers = []

    def _hand_out(self) -> None:
        for round_ in range(_IN_HAND):
            for worker in self._workers:
                # The last batch waiting is for this process, which would have nothing else to do.
                if worker.ready and len(worker.in_hand) == round_ and len(self._waiting) > round_:
                    task = self._waiting.popleft()
                    worker.in_hand.append(task)
                    with contextlib.suppress(OSError):  # one that has died is noticed when listened to
                        worker.helper.connection.send(task[1])

    def _listen(self, timeout: float | None) -> None:
        by_connection = {worker.helper.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                message = worker.helper.connection.recv()
            except (EOFError, OSError):
                # Killed from outside, or out of memory: its batches are for the others.
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
    with contextlib.suppress(OSError):  # one that has died is noticed when listened to
        connection.send_bytes(arguments)


def _run_helper(connection: Connection, work: Callable[..., None], code: Sequence[Path]) -> None:
    """What a helper does, until the other end is closed."""
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


def _search(connection: Connection, make_searcher: Callable[..., Searcher], arguments: Sequence[Any]) -> None:
    searcher = make_searcher(*arguments)
    connection.send(None)
    while True:
        connection.send(searcher(connection.recv()))
