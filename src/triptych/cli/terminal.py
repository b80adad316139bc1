"""Standard input, standard output, and what a person reads on a terminal."""

import os
import sys
from collections.abc import Iterable
from io import BufferedIOBase
from typing import cast, final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from triptych.errors import UsageError
from triptych.printable import printable


@final
class Terminal(Console):
    """A console of rich that shows text as it is: no markup, and control characters as escapes."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False, quiet: bool = False) -> None:
        super().__init__(
            stderr=stderr, soft_wrap=soft_wrap, quiet=quiet, highlight=False, markup=False, emoji=False
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_text = not segment.control
            yield Segment(printable(segment.text, lines=True), segment.style) if is_text else segment


def say(message: str) -> None:
    """Print a message to standard error."""
    print(printable(message, lines=True), file=sys.stderr)


def write_output(text: str) -> None:
    """Write text to standard output at once, in UTF-8. On a terminal, control characters become escapes."""
    if sys.stdout.isatty():
        text = printable(text, lines=True)
    sys.stdout.buffer.write(text.encode(errors="backslashreplace"))
    sys.stdout.buffer.flush()


def standard_input() -> BufferedIOBase:
    """Standard input, opened anew.

    A thread that reads ahead may still hold the lock of a stream when the process ends, and Python aborts if
    that stream is `sys.stdin`.
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed: give the text, or a file with it")
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # replaced by something that is no file, as in a notebook
        return cast(BufferedIOBase, sys.stdin.buffer)


def read_text(given: str, what: str) -> str:
    """A text of the command line; for "-" all of standard input, without the end of its last line."""
    try:
        if given != "-":
            return given.encode().decode()  # bytes that are not UTF-8 came as surrogates
        return standard_input().read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeError:
        raise UsageError(f"the {what} is not UTF-8: convert it first (iconv -t UTF-8)") from None
