"""Commands of ours that are measured as a whole: seconds, and the most memory."""

import os
import subprocess
import time
from typing import NamedTuple

from benchmarks.harness.command import Command

_RUN = """
import sys
from pathlib import Path
from triptych.cli.main import run
peak, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = "triptych"
try:
    run()
finally:
    lines = Path("/proc/self/status").read_text().splitlines()
    Path(peak).write_text(next(line for line in lines if "VmHWM" in line))
"""


class Ended(NamedTuple):
    """A command of ours that ended."""

    code: int
    said: str
    seconds: float
    peak_bytes: int


def run_ours(
    command: Command, *arguments: str, threads: int | None = None, codes: tuple[int, ...] = (0,)
) -> Ended:
    """Run a command of ours to its end.

    `threads`: of its process; None for the default. `codes`: the exit codes that are no failure.
    """
    peak = command.work / "peak"
    more = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    started = time.perf_counter()
    child = subprocess.run(
        [str(command.python), "-c", _RUN, str(peak), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, **more},
    )
    seconds = time.perf_counter() - started
    if child.returncode not in codes:
        raise RuntimeError(f"triptych {arguments[0]} ended with {child.returncode}: {child.stdout}")
    most = int(peak.read_text(encoding="utf-8").split()[1]) * 2**10
    return Ended(child.returncode, child.stdout, seconds, most)
