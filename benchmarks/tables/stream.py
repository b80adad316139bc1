"""Streams: first line, lines a second and peak memory of `triptych translate` on ever longer files."""

import os
import subprocess
import tempfile
import threading
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.page import Page

LENGTHS = (1_000, 10_000, 100_000)
_QUICK_LENGTHS = (20, 200)
_WATCHED_EVERY_SECONDS = 0.2


def measure(command: Command) -> Page:
    """The whole command, from a file to a pipe, at each length of the file."""
    checkpoint = command.shared / "checkpoints" / "marian-multi30k"
    text = command.shared / "data" / "multi30k" / "train.en"
    if not checkpoint.is_dir() or not text.exists():
        raise NotHereError(f"streams need {checkpoint} and {text}, which are not here")
    record = []
    for num_lines in _QUICK_LENGTHS if command.quick else LENGTHS:
        found = _translate(command.python, checkpoint, text, num_lines)
        record.append(found)
        command.tell(" ".join(_cells(found)))
    return Page(
        name="stream",
        title="Streams: `triptych translate` on a file, greedy, int8",
        columns=("lines", "first line, s", "all, s", "lines/s", "peak memory, MB"),
        rows=[_cells(found) for found in record],
        notes=(
            "The whole process, from its start; lines of Multi30k's training text in their order, again "
            "and again. Memory is the sum of the proportional set sizes of the command and its workers, "
            f"looked at every {_WATCHED_EVERY_SECONDS} s.",
        ),
        record={"rows": record},
        num_texts=0,
    )


def _translate(python: Path, checkpoint: Path, text: Path, num_lines: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".en", encoding="utf-8") as source:
        with text.open(encoding="utf-8") as lines:
            source.writelines(islice(cycle(lines.readlines()), num_lines))
        source.flush()
        options = ("--beam", "1", "--precision", "int8")
        started = time.perf_counter()
        process = subprocess.Popen(
            [str(python.parent / "triptych"), "translate", *options, str(checkpoint), source.name],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        peak = _Peak(process.pid)
        assert process.stdout is not None
        seconds = [time.perf_counter() - started for _ in process.stdout]
        if process.wait() or len(seconds) != num_lines:
            raise RuntimeError(f"{len(seconds)} of {num_lines} lines, exit status {process.returncode}")
    return {
        "lines": num_lines,
        "first_line_seconds": seconds[0],
        "seconds": seconds[-1],
        "lines_per_second": num_lines / seconds[-1],
        "peak_mb": peak.stop() / 1e6,
    }


class _Peak:
    """The most memory that the processes of a session held together, in bytes; Linux only."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(_WATCHED_EVERY_SECONDS):
            held = 0
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    if os.getsid(int(folder.name)) == self._session:
                        held += _proportional_bytes(folder / "smaps_rollup")
                except (ProcessLookupError, FileNotFoundError):  # it has just ended
                    continue
            self._bytes = max(self._bytes, held)

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._bytes


def _proportional_bytes(path: Path) -> int:
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0


def _cells(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['lines']:,}",
        f"{found['first_line_seconds']:.2f}",
        f"{found['seconds']:.1f}",
        f"{found['lines_per_second']:.0f}",
        f"{found['peak_mb']:.0f}",
    ]
