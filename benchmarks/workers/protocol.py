"""How a worker talks to the driver.

A worker is started as `python -m benchmarks.workers.NAME OPTIONS`, with its options as JSON. It
prepares itself and answers one line of JSON about itself. Then each line on standard input is a
request, and it answers each with one line. A line with "failed" is its last. What it or any library
prints goes to standard error, which the driver keeps in a file.
"""

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Options = dict[str, Any]
Answer = dict[str, Any]
# Says something about itself, and answers requests.
Prepared = tuple[Answer, Callable[[Options], Answer]]


def serve(prepare: Callable[[Options], Prepared]) -> None:
    """Prepare, then answer requests to the end of the input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print must not answer for us

    def say(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        about, work = prepare(json.loads(sys.argv[1]))
        say({**about, "peak_rss_mb": peak_rss_mb()})
        for line in sys.stdin:
            say({**work(json.loads(line)), "peak_rss_mb": peak_rss_mb()})
    except Exception as error:  # noqa: BLE001 - whatever it is, it becomes a row of the table
        traceback.print_exc()
        say({"failed": f"{type(error).__name__}: {first_line(error)}"})
        sys.exit(1)


def first_line(error: BaseException) -> str:
    """What an error says, in one line of bearable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else "it says nothing"


def peak_rss_mb() -> float:
    """The most memory that this process has had resident, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the parent had when it began this process
        (peak_kb,) = (line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line)
        return round(int(peak_kb) / 2**10, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
