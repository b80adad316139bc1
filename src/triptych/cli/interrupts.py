"""Ctrl-C: one line and exit code 130, whenever it comes."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from triptych.launch import speaks

_STDERR = 2


def end_interrupted(
    number: int = signal.SIGINT, frame: FrameType | None = None
) -> NoReturn:
    """End this process at once: no traceback, and no clean-up of the interpreter, which takes a second."""
    if speaks():
        os.write(
            _STDERR, (b"\n" if os.isatty(_STDERR) else b"") + b"triptych: interrupted\n"
        )
    os._exit(128 + number)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """While entered, the first Ctrl-C raises KeyboardInterrupt, so that no file is left half-written.

    Then the process ends, whatever has become of the exception: an import that it cuts off may raise an error
    of its own. A second Ctrl-C ends it at once. Where `end_interrupted` is not the handler, nothing changes.
    """
    if signal.getsignal(signal.SIGINT) is not end_interrupted:
        yield
        return
    signal.signal(signal.SIGINT, _raise_once)
    try:
        yield
    except BaseException as error:
        if (
            isinstance(error, KeyboardInterrupt)
            or signal.getsignal(signal.SIGINT) is end_interrupted
        ):
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            end_interrupted()
        raise
    finally:
        signal.signal(signal.SIGINT, end_interrupted)


def _raise_once(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, end_interrupted)
    raise KeyboardInterrupt
