"""Handling of SIGHUP: a ready server reloads its models."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def are_heard() -> bool:
    """Return True if SIGHUP means a reload: at a terminal it ends the process."""
    is_main = threading.current_thread() is threading.main_thread()
    return (
        is_main and hasattr(signal, "SIGHUP") and not (sys.stdin and sys.stdin.isatty())
    )


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore SIGHUP inside the block, before the server handles it."""
    if not are_heard():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
