"""A progress bar on standard error, where that is a terminal; of several processes the first has one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from triptych.cli.terminal import Terminal
from triptych.launch import speaks


@contextmanager
def progress_bar(text: str, first: str = "", *, of_bytes: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar inside the block; call what it gives with what is done now, how far, and of how much."""
    middle = [DownloadColumn()] if of_bytes else []
    columns = TextColumn(text, markup=False), BarColumn(), *middle, TimeRemainingColumn()
    shown = sys.stderr.isatty() and speaks()
    with Progress(*columns, console=Terminal(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(first, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
