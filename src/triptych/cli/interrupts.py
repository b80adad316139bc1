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
    """End this process at once, without a traceback and without the interpreter's clean-up of a second."""
    if speaks():
        os.write(
            _STDERR, (b"\n" if os.isatty(_STDERR) else b"") + b"triptych: interrupted\n"
        )
    os._exit(128 + number)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """While entered, the first Ctrl-C raises KeyboardInterrupt, so that no file is left half-written.

    Then the process ends, even if the exception was replaced: an interrupted import may raise another error.
    A second Ctrl-C ends it at once. Another handler than `end_interrupted` stays in use.
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
