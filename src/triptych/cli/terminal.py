"""Standard input, standard output, and what a person reads on a terminal."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from triptych.cli.failures import is_given, say
from triptych.errors import DataError, UsageError
from triptych.launch import speaks
from triptych.printable import printable
from triptych.seeing.reports import Table, render_table
from triptych.untrusted import LONGEST_TEXT

if TYPE_CHECKING:
    from triptych.training.progress import Display

# A word with a folder in it, or with an ending of a few letters.
_FILE_NAME = re.compile(r"[^\s]*(?:/[^\s]*[^\s.!?/]|[^\s.]\.[a-z0-9]{1,7})")


_SECONDS_OF_A_LINE = 60.0


@final
class Terminal(Console):
    """A console of rich for plain text: markup is not interpreted, and control characters become escapes."""

    def __init__(
        self, *, stderr: bool = False, soft_wrap: bool = False, quiet: bool = False
    ) -> None:
        super().__init__(
            stderr=stderr,
            soft_wrap=soft_wrap,
            quiet=quiet,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def on_broken_pipe(self) -> None:
        """Re-raise the error, from which the command ends."""
        raise  # rich calls this method while it handles the error

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_text = not segment.control
            yield (
                Segment(printable(segment.text, lines=True), segment.style)
                if is_text
                else segment
            )


def write_output(text: str) -> None:
    """Write text to standard output at once, in UTF-8. Control characters become escapes on a terminal."""
    if sys.stdout.isatty():
        text = printable(text, lines=True)
    sys.stdout.buffer.write(text.encode(errors="backslashreplace"))
    sys.stdout.buffer.flush()


def print_json(record: Any, *, indent: int | None = None) -> None:
    """Print a record as JSON."""
    write_output(json_text(record, indent=indent) + "\n")


def json_text(record: Any, *, indent: int | None = None) -> str:
    """Return a record as JSON; raise `DataError` for infinity and NaN, unknown to JSON."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError:
        raise DataError(
            "a figure of the result is infinite or not a number, which JSON cannot hold: leave out --json"
        ) from None


def standard_input() -> BufferedIOBase:
    """Return standard input, opened anew.

    A thread reading ahead may still own the lock of a stream when the process ends, and Python aborts if
    that stream is `sys.stdin`.
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed: give the text, or a file with it")
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # not a file, for example in a notebook
        return cast(BufferedIOBase, sys.stdin.buffer)


def read_text(given: str, what: str) -> str:
    """Return a text of the command line; "-" reads all of standard input, without the last line end."""
    try:
        if given != "-":
            return _as_utf8(given)
        content = standard_input().read(LONGEST_TEXT + 1)
        if len(content) > LONGEST_TEXT:
            raise UsageError(
                f"the {what} has more than {LONGEST_TEXT:,} bytes: give a part of it"
            )
        return content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeError:
        raise UsageError(
            f"the {what} is not UTF-8: convert it first (iconv -t UTF-8)"
        ) from None


def _as_utf8(given: str) -> str:
    """Return an argument decoded as UTF-8, whatever the encoding of the locale is."""
    try:
        return os.fsencode(given).decode()
    except UnicodeError:
        return given.encode().decode()  # fails for surrogates (other bytes)


def text_or_file(given: str, what: str) -> str | Path:
    """Return the path of an existing file, or otherwise the text itself, "-" included.

    A word with the form of a file name is refused if the file does not exist.
    """
    with suppress(OSError, ValueError):  # longer than a name may be
        if (path := Path(given)).exists() and not path.is_dir():
            return path
    if _FILE_NAME.fullmatch(given):
        raise UsageError(
            f"there is no file {given}; if it is the {what} itself, give it on standard input with -"
        )
    return given if given == "-" else read_text(given, what)


@contextmanager
def progress_bar(
    text: str, first: str = "", *, of_bytes: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a bar inside the block; yield a function of the current action, the amount done and the total.

    Only the first process reports, on standard error: a bar on a terminal, elsewhere a line a minute.
    """
    is_told = speaks() and not is_given("--quiet", "-q")
    if is_told and not sys.stderr.isatty():
        yield _line_a_minute(text)
        return
    middle = [DownloadColumn()] if of_bytes else []
    columns = (
        TextColumn(text, markup=False),
        BarColumn(),
        *middle,
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Terminal(stderr=True), disable=not is_told, transient=True
    ) as bar:
        task = bar.add_task(first, total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def _line_a_minute(text: str) -> Callable[..., None]:
    """Return a function to print progress, at most a line a minute."""
    # Short operations end before the first line.
    begun = last = time.monotonic()

    def tell(what: str, done: int, total: int | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _SECONDS_OF_A_LINE:
            return
        last = now
        line = text.replace("{task.description}", what)
        if done and total:
            left = timedelta(seconds=round((now - begun) * (total - done) / done))
            line += f": {done / total:.0%}, about {left} left"
        say(line)

    return tell


def training_display() -> "Display":
    """Return the display of a run: a bar on a terminal, lines elsewhere, a silent display with --quiet."""
    # Most commands do not train: without this import they begin 0.3 seconds sooner.
    from triptych.training.progress import SilentDisplay, display_for

    return (
        SilentDisplay()
        if is_given("--quiet", "-q")
        else display_for(Terminal(stderr=True))
    )


def print_table(table: Table, console: Console) -> None:
    """Print a table with its title and its caption."""
    console.print(table.title)
    print_whole(table, console)
    console.print(f"{table.caption}\n", soft_wrap=True)


# Heads shown in the terminal unless they are chosen, or all are wanted.
MOST_HEADS = 10


def print_cut(num_heads: int, console: Console) -> None:
    """Print the number of all heads below a table with `MOST_HEADS` heads."""
    console.print(
        f"The {MOST_HEADS} of {num_heads} heads that tell most; --all shows every head."
    )


def refuse_all(show_all: bool, *, as_json: bool) -> None:
    """Refuse `--all` with `--json`."""
    if show_all and as_json:
        raise UsageError("--all is for the terminal: --json has every head")


def print_written(paths: Iterable[Path | None], console: Console) -> None:
    """Print the paths of the written files."""
    for path in paths:
        if path is not None:
            console.print(f"written: {path}")


def print_whole(table: Table, console: Console) -> None:
    """Print a table without truncation: a narrow terminal gets the columns in parts, a file all at once."""
    rendered = render_table(table)
    width = console.measure(
        rendered, options=console.options.update(max_width=1000)
    ).maximum
    if not console.is_terminal:
        console.width = max(console.width, width)
    if width <= console.width or len(table.columns) <= 2:
        console.print(rendered)
        return
    middle = (len(table.columns) + 1) // 2
    for part in (range(1, middle), range(middle, len(table.columns))):
        print_whole(table.part((0, *part)), console)
