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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, final

import torch

from triptych import user_code
from triptych.decoding.search import Hypothesis

Sentences = Sequence[Sequence[int]]
Hypotheses = list[list[Hypothesis]]
# Searches for a batch of sentences.
Searcher = Callable[[Sentences], Hypotheses]

# Batches a process holds: one to work on, one to go on with.
_IN_HAND = 2


@final
@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    sender: threading.Thread
    ready: bool
    in_hand: deque[tuple[Any, Sentences]]


@final
class WorkerPool:
    """Searches for batches, in any order, with helpers.

    Started with `spawn`: a script that uses it must guard its main part with
    `if __name__ == "__main__"`.
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
        context = multiprocessing.get_context("spawn")
        # Pickled here, tensors by value: the shared memory that torch would use is small in containers.
        arguments = pickle.dumps(self._arguments)
        for _ in range(count):
            ours, theirs = context.Pipe()
            given = theirs, self._make_searcher, user_code.paths()
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            # A helper takes seconds before it reads, and so many bytes wait for it in a thread of their own.
            sender = threading.Thread(target=_send, args=(ours, arguments), daemon=True)
            sender.start()
            self._workers.append(_Worker(process, ours, sender, ready=False, in_hand=deque()))

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
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
            worker.sender.join()  # nobody reads any more, so it has ended or ends now
            worker.connection.close()
        self._workers = []

    def _hand_out(self) -> None:
        for round_ in range(_IN_HAND):
            for worker in self._workers:
                # The last batch waiting is for this process, which would have nothing else to do.
                if worker.ready and len(worker.in_hand) == round_ and len(self._waiting) > round_:
                    task = self._waiting.popleft()
                    worker.in_hand.append(task)
                    with contextlib.suppress(OSError):  # one that has died is noticed when listened to
                        worker.connection.send(task[1])

    def _listen(self, timeout: float | None) -> None:
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                message = worker.connection.recv()
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


def _serve(connection: Connection, make_searcher: Callable[..., Searcher], code: Sequence[Path]) -> None:
    """What a helper does: search for what comes, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked decides
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        try:
            for path in code:
                user_code.use_code(path)
            searcher = make_searcher(*pickle.loads(connection.recv_bytes()))
            connection.send(None)
            while True:
                connection.send(searcher(connection.recv()))
        except (EOFError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 (raised again by the process that asked)
            connection.send(error)
