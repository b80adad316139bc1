"""Worker processes, and whose turn it is.

Threads, allocator, precision and compilation are properties of a process, so every contender has
its own. A worker prepares itself, says that it is ready, and then computes only when it is told to:
the contenders take turns, one computes at a time, and what slows the machine for a while slows all.
"""

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, final

# OpenMP's threads spin for up to 0.2 s after their work is done; the next contender waits for that.
PAUSE_SECONDS = 0.3
_PATIENCE_SECONDS = 5

Answer = dict[str, Any]


class WorkerError(Exception):
    """A contender that could not start, or did not live to its end; the message says why, in one line."""


def turn_order(count: int, round_number: int) -> list[int]:
    """Who comes when: each round begins with another one, and every second one runs backwards."""
    start = round_number % count if count else 0
    order = [*range(start, count), *range(start)]
    return order[::-1] if round_number % 2 else order


@final
class Worker:
    """A process that prepares, waits, and answers one line for one line."""

    def __init__(
        self, command: Sequence[str], *, folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        """Start it.

        Args:
            command: the program with its arguments.
            folder: where it runs.
            environment: variables set besides those of this process.
            log: file for all that it prints besides its answers.
        """
        self.log = log
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ready(self, limit_seconds: float) -> Answer:
        """Wait until it has prepared itself; what it says of itself.

        Raises:
            WorkerError: it failed, ended, or took longer.
        """
        return self._answer(limit_seconds, "prepare")

    def go(self, request: Mapping[str, Any], limit_seconds: float) -> Answer:
        """Let it work; its answer.

        Raises:
            WorkerError: it failed, ended, or took longer.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        return self._answer(limit_seconds, "answer")

    def close(self) -> None:
        """End it: the end of its input tells it to go."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        self.process.stdout.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _answer(self, limit_seconds: float, what: str) -> Answer:
        try:
            line = self._answers.get(timeout=limit_seconds)
        except queue.Empty:
            self.process.kill()
            raise WorkerError(f"took longer than {limit_seconds:.0f} s to {what}") from None
        if line is None:
            raise WorkerError(self._last_words())
        answer: Answer = json.loads(line)
        if "failed" in answer:
            raise WorkerError(answer["failed"])
        return answer

    def _last_words(self) -> str:
        code = self.process.wait()
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with status {code}: {lines[-1].strip() if lines else 'it said nothing'}"


def take_turns(
    workers: Sequence[Worker | None],
    request: Mapping[str, Any],
    rounds: range,
    limit_seconds: float,
    tell: Callable[[str], None] = lambda line: None,
) -> list[tuple[dict[int, Answer], str | None]]:
    """Let workers answer a request, round by round.

    Args:
        workers: None for a contender that failed already: it has no turns.
        request: the same for all.
        rounds: their numbers.
        limit_seconds: for one answer.
        tell: is told when a round is over.

    Returns:
        For each worker its answers by round, and why it stopped answering if it did.
    """
    answers: list[dict[int, Answer]] = [{} for _ in workers]
    failures: list[str | None] = [None for _ in workers]
    for number in rounds:
        for place in turn_order(len(workers), number):
            worker = workers[place]
            if worker is None or failures[place] is not None:
                continue
            time.sleep(PAUSE_SECONDS)
            try:
                answers[place][number] = worker.go(request, limit_seconds)
            except WorkerError as failure:
                failures[place] = str(failure)
        tell(f"round {number + 1} is over")
    return list(zip(answers, failures, strict=True))
