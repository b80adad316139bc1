"""Log: one JSON object a line on standard error, written by a separate thread.

The log never delays a request. If standard error is closed, its disk is full or its reader has stopped, lines
are lost and counted.
"""

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, final

# Largest number of queued lines.
_MOST_WAITING = 4096
_SECONDS_TO_END = 2.0


@final
class Log:
    """Queue of lines for standard error.

    Attributes:
        num_lost: number of lost lines.
    """

    def __init__(self) -> None:
        self.num_lost = 0
        self._lines: queue.Queue[str] = queue.Queue(_MOST_WAITING)
        self._starting = threading.Lock()
        self._writer: threading.Thread | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record to be written as a line."""
        with self._starting:
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._run, name="triptych log", daemon=True
                )
                self._writer.start()
        try:
            self._lines.put_nowait(json.dumps(record, default=repr))
        except queue.Full:
            self.num_lost += 1

    def flush(self) -> None:
        """Wait until all lines are written, at most two seconds."""
        until = time.monotonic() + _SECONDS_TO_END
        while self._lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            try:
                _write_to_standard_error(f"{line}\n")
            except (OSError, ValueError):
                self.num_lost += 1
            finally:
                self._lines.task_done()


def _write_to_standard_error(text: str) -> None:
    """Write without the buffers of `sys.stderr`, in which a failed line would stay."""
    if sys.stderr is None:
        raise OSError("standard error is closed")
    try:
        number = sys.stderr.fileno()
    except (OSError, ValueError):  # without a file descriptor, such as in a notebook
        sys.stderr.write(text)
        return
    rest = text.encode()
    while rest:
        rest = rest[os.write(number, rest) :]


_LOG = Log()


def log(record: Mapping[str, Any]) -> None:
    """Write a line of the log, JSON on standard error."""
    _LOG.write(record)


def flush_log() -> None:
    """Wait until the log is written, at most two seconds."""
    _LOG.flush()


def num_lost() -> int:
    """Return the number of lost lines of the log."""
    return _LOG.num_lost


@final
class LogHandler(logging.Handler):
    """Handler for writing a library's log records as lines of the log."""

    def emit(self, record: logging.LogRecord) -> None:
        found: dict[str, Any] = {record.levelname.lower(): record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            found["because"] = repr(record.exc_info[1])[:500]
        log(found)
