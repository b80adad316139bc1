"""A busy machine: training, decoding and inspection next to processes that compute, and how threads wait.

Neighbours are single threads that never pause. Every contender runs with OpenMP threads that spin while they
wait, with threads that sleep, and with threads that spin briefly. What the last cost on a quiet machine is
the figure that decides whether `triptych.cli.process` may set it: at most 3 %.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.figures import Summary, ratio, summarise
from benchmarks.harness.page import Page, spread
from benchmarks.harness.race import WAITING, Contender, Race
from benchmarks.harness.turns import Answer, Worker, WorkerError, take_turns
from benchmarks.harness.workload import prepare_training
from benchmarks.tables.inspection import write_checkpoint

NEIGHBOURS = (0, 1, 2, 4)
SPINNING, *_ = WAITING
# Rounds without neighbours are short, and what is looked for there is small.
_QUIET_ROUNDS = 3
_LAYERS = 2
_NUM_LINES = 64
_SPIN = "while True: pass"


@dataclass(frozen=True)
class Job:
    """One kind of work, by ours and by others.

    Attributes:
        name: in the table.
        unit: what is counted, a second.
        amount: the key of an answer that has the amount, and what it is divided by.
        told: options that every worker of it is given.
        entries: contenders with the options of their settings, ours first.
        requests: of every contender, on a quiet machine and with neighbours.
    """

    name: str
    unit: str
    amount: tuple[str, float]
    told: dict[str, Any]
    entries: Sequence[tuple[Contender, dict[str, Any]]]
    requests: tuple[dict[str, Any], dict[str, Any]]


@dataclass
class Line:
    """A contender at a setting: what it did with each number of neighbours, by round, or why it failed."""

    job: Job
    contender: str
    waiting: str
    rates: dict[int, dict[int, float]]
    failed: str | None = None

    def summary(self, neighbours: int) -> Summary | None:
        """Its rate with so many."""
        rates = self.rates.get(neighbours)
        return summarise([*rates.values()]) if rates else None


def measure(command: Command) -> Page:
    """Every job with every number of neighbours."""
    lines = [line for job in _jobs(command) for line in _race(command, job)]
    return Page(
        name="busy",
        title=f"Next to neighbours that compute ({command.threads} threads)",
        columns=("work", "contender", "threads that wait", *(f"{n} neighbours" for n in NEIGHBOURS)),
        rows=[_cells(line) for line in lines],
        notes=(
            f"Amount a second, median and range, {command.rounds} rounds in turns ({_QUIET_ROUNDS} times as "
            "many without neighbours). A neighbour is a process of one thread that never pauses.",
            *_costs(lines),
        ),
        record={"lines": [_record(line) for line in lines]},
        num_texts=3,
    )


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that compute, while entered."""
    started = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def _jobs(command: Command) -> list[Job]:
    wanted = [_training(command), _inspection(command)]
    try:
        return [wanted[0], _decoding(command), wanted[1]]
    except NotHereError as missing:
        command.tell(str(missing))
        return wanted


def _settings(contender: Contender, waiting: Sequence[str] = tuple(WAITING)) -> list[Any]:
    return [(contender, {**contender.base, "waiting": way}) for way in waiting]


def _training(command: Command) -> Job:
    text = prepare_training(command.shared, command.work, 6)
    theirs = Contender(
        "Hugging Face MarianMT",
        "training_marian",
        {"precision": "fp32", "attention": "sdpa", "optimizer": "fused"},
    )
    return Job(
        "training",
        "target tokens/s",
        ("tokens", 1.0),
        {"text": text.path, "threads": command.threads},
        [
            *_settings(Contender("triptych", "training_triptych", {"precision": "fp32"})),
            *_settings(Contender("triptych, bf16", "training_triptych", {"precision": "bf16"})),
            *_settings(theirs),
        ],
        ({"batches": 1 if command.quick else 6}, {"batches": 1}),
    )


def _decoding(command: Command) -> Job:
    checkpoint = command.shared / "checkpoints" / "marian-multi30k"
    text = command.shared / "data" / "multi30k"
    if not checkpoint.is_dir() or not text.is_dir():
        raise NotHereError(f"decoding is left out: it needs {checkpoint} and {text}")
    threads = command.threads
    told = {
        "source": str(text / "test_2016_flickr.en"),
        "target": str(text / "test_2016_flickr.de"),
        "num_lines": 16 if command.quick else _NUM_LINES,
        "checkpoint": str(checkpoint),
    }
    ours = {"precision": "fp32", "workers": 1, "threads": threads}
    theirs = {"precision": "fp32", "processes": 1, "threads": threads, "attention": "sdpa"}
    request = {"beam": 4, "batch": 32}
    return Job(
        "decoding, beam 4",
        "output tokens/s",
        ("tokens", 1.0),
        told,
        [
            *_settings(
                Contender(
                    "triptych, as the command",
                    "decoding_triptych",
                    {**ours, "workers": threads, "threads": 1},
                )
            ),
            *_settings(Contender("triptych, one process", "decoding_triptych", ours)),
            *_settings(Contender("Hugging Face generate", "decoding_marian", theirs)),
        ],
        (request, request),
    )


def _inspection(command: Command) -> Job:
    folder = command.work / "busy-inspected"
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, _LAYERS)
    request = {"way": "triptych", "folder": str(folder)}
    return Job(
        "inspection",
        "MB of attention/s",
        ("bytes", 1e6),
        {"threads": command.threads},
        _settings(Contender("triptych", "inspection")),
        (request, request),
    )


def _race(command: Command, job: Job) -> list[Line]:
    race = command.race(job.told)
    chosen = {contender.name for contender in command.chosen([contender for contender, _ in job.entries])}
    entries = [entry for entry in job.entries if entry[0].name in chosen]
    lines = [Line(job, contender.name, options["waiting"], {}) for contender, options in entries]
    with ExitStack() as stack:
        workers = [_started(race, stack, line, *entry) for line, entry in zip(lines, entries, strict=True)]
        for count in NEIGHBOURS:
            command.tell(f"{job.name} with {count} neighbours")
            rounds = command.rounds * (1 if count or command.quick else _QUIET_ROUNDS)
            request = job.requests[bool(count)]
            with neighbours(count):
                found = take_turns(workers, request, range(rounds), race.answer_limit_seconds)
            for place, (answers, failed) in enumerate(found):
                lines[place].rates[count] = {number: _rate(job, answer) for number, answer in answers.items()}
                if failed is not None:
                    lines[place].failed, workers[place] = failed, None
    return lines


def _started(
    race: Race, stack: ExitStack, line: Line, contender: Contender, options: Mapping[str, Any]
) -> Worker | None:
    worker = stack.enter_context(race.start(contender, dict(options)))
    try:
        worker.ready(race.prepare_limit_seconds)
    except WorkerError as failure:
        line.failed = str(failure)
        return None
    return worker


def _rate(job: Job, answer: Answer) -> float:
    key, unit = job.amount
    return float(answer[key] / unit / answer["seconds"])


def _costs(lines: Sequence[Line]) -> list[str]:
    """What sleeping costs without neighbours and gains with most, within rounds."""
    said = []
    for line in lines:
        spinning = next(
            (x for x in lines if (x.job, x.contender, x.waiting) == (line.job, line.contender, SPINNING)),
            None,
        )
        if spinning is None or line is spinning:
            continue
        found = [
            ratio(line.rates.get(count, {}), spinning.rates.get(count, {})) for count in (0, NEIGHBOURS[-1])
        ]
        quiet, busy = spread(found[0], 3), spread(found[1], 2)
        said.append(
            f"{line.job.name}, {line.contender}, {line.waiting}, compared with {SPINNING}: {quiet} "
            f"times as fast without neighbours, {busy} times with {NEIGHBOURS[-1]}."
        )
    return said


def _cells(line: Line) -> list[str]:
    told = [spread(line.summary(count)) for count in NEIGHBOURS]
    if line.failed:
        told[0] = f"failed: {line.failed}"
    return [f"{line.job.name} ({line.job.unit})", line.contender, line.waiting.partition(": ")[2], *told]


def _record(line: Line) -> dict[str, Any]:
    return {
        "work": line.job.name,
        "unit": line.job.unit,
        "contender": line.contender,
        "waiting": line.waiting,
        "environment": WAITING[line.waiting],
        "failed": line.failed,
        "rates": line.rates,
    }
