"""Progress displays of a training run."""

import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from triptych.printable import printable


@dataclass(frozen=True)
class Moment:
    """Progress after a step; `loss` is in nats per target token."""

    step: int
    max_steps: int
    epoch: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    # Operations per second over the machine's peak in matrix products; None if not measured.
    peak_share: float | None = None


class Display(ABC):
    """Display of a run: a context entered before the first step and exited after the last step."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *raised: Any) -> None:
        del raised

    @abstractmethod
    def update(self, moment: Moment) -> None:
        """Show the progress after a step."""

    @abstractmethod
    def say(self, message: str) -> None:
        """Print a permanent line."""


@final
class BarDisplay(Display):
    """Progress bar on a terminal with loss, learning rate, speed and remaining time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=None, figures="", visible=False)

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._bar.stop()

    def update(self, moment: Moment) -> None:
        self._bar.update(
            self._task,
            completed=moment.step,
            total=moment.max_steps,
            figures=_state(moment),
            visible=True,
        )

    def say(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False)


@final
class LineDisplay(Display):
    """Display without a terminal: a line every few seconds."""

    def __init__(self, every_seconds: float = 10.0) -> None:
        self._every = every_seconds
        self._first_step = -1
        self._started = self._shown = 0.0

    def __enter__(self) -> "Display":
        self._started = self._shown = time.monotonic()
        return self

    def update(self, moment: Moment) -> None:
        now = time.monotonic()
        if self._first_step < 0:
            self._first_step = moment.step - 1
        if now - self._shown < self._every and moment.step < moment.max_steps:
            return
        self._shown = now
        per_step = (now - self._started) / (moment.step - self._first_step)
        left = per_step * (moment.max_steps - moment.step)
        self.say(
            f"step {moment.step:,}/{moment.max_steps:,}  {_state(moment)}  left {left / 60:.0f} min"
        )

    def say(self, message: str) -> None:
        print(printable(message, lines=True), file=sys.stderr, flush=True)


@final
class SilentDisplay(Display):
    """Silent display."""

    def update(self, moment: Moment) -> None: ...

    def say(self, message: str) -> None: ...


@final
class LoggedDisplay(Display):
    """Display that forwards to a second display, and appends lines with date and time to a file."""

    def __init__(self, path: Path, shown: Display, every_seconds: float = 10.0) -> None:
        self._path = path
        self._shown = shown
        self._every = every_seconds
        self._written = 0.0
        path.parent.mkdir(exist_ok=True)

    def __enter__(self) -> "Display":
        self._shown.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is not None:
            self._write(f"{raised[0].__name__}: {raised[1]}")
        self._shown.__exit__(*raised)

    def update(self, moment: Moment) -> None:
        self._shown.update(moment)
        now = time.monotonic()
        if now - self._written >= self._every or moment.step == moment.max_steps:
            self._written = now
            self._write(f"step {moment.step:,}/{moment.max_steps:,}  {_state(moment)}")

    def say(self, message: str) -> None:
        self._shown.say(message)
        self._write(message)

    def _write(self, message: str) -> None:
        # An error of the log must not end the run.
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(
                f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {printable(message, lines=True)}\n"
            )


def _state(moment: Moment) -> str:
    share = "" if moment.peak_share is None else f"  {moment.peak_share:.0%} of peak"
    return (
        f"epoch {moment.epoch}  loss {moment.loss:.3f}  lr {moment.learning_rate:.2e}  "
        f"{moment.tokens_per_second:,.0f} tok/s{share}"
    )


def display_for(console: Console) -> Display:
    """Return a progress bar on a terminal, and a line display elsewhere."""
    return BarDisplay(console) if console.is_terminal else LineDisplay()


def duration(seconds: float) -> str:
    """Format a time in the largest unit with a value of at least 2."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.0f} seconds"
