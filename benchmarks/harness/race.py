"""Contenders, their settings, and the race: screening, then all finalists in turns."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from benchmarks.harness.figures import Summary, ratio, summarise
from benchmarks.harness.machine import available_memory_mb
from benchmarks.harness.turns import Answer, Worker, WorkerError, take_turns
from triptych.cli.process import SPIN_BRIEFLY

Options = Mapping[str, Any]


def _others() -> dict[str, dict[str, str]]:
    """Allocators that can be put in malloc's place, as far as they are installed."""
    found = {name: find_library(name) for name in ("jemalloc", "tcmalloc", "mimalloc")}
    return {name: {"LD_PRELOAD": library} for name, library in found.items() if library}


# Variables of glibc's malloc. "no mmap" keeps every block on the heap; "thresholds" asks for the same by
# numbers, which some versions of glibc cap. Both keep freed memory instead of handing it back.
ALLOCATORS: dict[str, dict[str, str]] = {
    "malloc as it is": {},
    "malloc: no mmap": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "8000000000",
        "MALLOC_TOP_PAD_": "67108864",
    },
    "malloc: thresholds": {
        "MALLOC_MMAP_THRESHOLD_": "1000000000",
        "MALLOC_TRIM_THRESHOLD_": "1000000000",
        "MALLOC_TOP_PAD_": "268435456",
    },
    **_others(),
}
# How OpenMP's threads wait: as the runtime has it, asleep, or spinning for about a thirtieth of the
# usual time before they sleep (as `triptych.cli.process` sets it).
WAITING: dict[str, dict[str, str]] = {
    "waiting: spinning": {},
    "waiting: asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "waiting: spinning briefly": dict(SPIN_BRIEFLY),
}
# Closer than this, screening cannot tell two settings apart: both go on.
_TOO_CLOSE = 0.04
_FINALISTS = 2
# Of the memory that is free, what waiting workers may fill.
_ROOM = 0.7


@dataclass(frozen=True)
class Contender:
    """Somebody who does the work.

    Attributes:
        name: in the tables.
        worker: its module in `benchmarks.workers`.
        base: options that every setting has.
        stages: what is tried, a stage at a time: the alternatives of a stage are laid over the best of
            the stages before it.
        all_go_on: whether every setting that was tried goes to the final, not only the best.
    """

    name: str
    worker: str
    base: Options = field(default_factory=dict)
    stages: tuple[tuple[Options, ...], ...] = ()
    all_go_on: bool = False


@dataclass(frozen=True)
class Entry:
    """A contender at one setting, in the final.

    Attributes:
        contender: who.
        options: the setting.
        memory_mb: what its process needs, as far as screening showed.
    """

    contender: Contender
    options: Options
    memory_mb: float = 0.0


@dataclass(frozen=True)
class Row:
    """A contender at one setting, and what it did.

    Attributes:
        contender: its name.
        options: its setting.
        about: what it said of itself when it was ready.
        answers: by number of round.
        failed: why it gave up; None if it did not.
    """

    contender: str
    options: dict[str, Any]
    about: Answer = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    failed: str | None = None

    @property
    def setting(self) -> str:
        """The options in words."""
        return describe(self.options)

    @property
    def rates(self) -> dict[int, float]:
        """Tokens a second, by number of round."""
        return {number: answer["tokens"] / answer["seconds"] for number, answer in self.answers.items()}

    @property
    def rate(self) -> Summary | None:
        """Tokens a second; None where there was no round."""
        return summarise([*self.rates.values()]) if self.answers else None

    @property
    def peak_rss_mb(self) -> float | None:
        """The most memory its process had."""
        return max((answer["peak_rss_mb"] for answer in self.answers.values()), default=None)

    def ratio_of(self, ours: "Row | None") -> Summary | None:
        """Rate of ours / rate of this one, within rounds; None where they share none."""
        return ratio(ours.rates, self.rates) if ours else None

    def record(self, ours: "Row | None" = None) -> dict[str, Any]:
        """For a machine to read."""
        rate, behind = self.rate, self.ratio_of(ours)
        return {
            "contender": self.contender,
            "setting": self.setting,
            "options": self.options,
            "environment": environment_of(self.options),
            "failed": self.failed,
            "tokens_per_second": rate.record() if rate else None,
            "ratio_of_ours_to_this": behind.record() if behind else None,
            "peak_rss_mb": self.peak_rss_mb,
            "about": self.about,
            "rounds": self.answers,
        }


def describe(options: Options) -> str:
    """A setting in words: its texts as they are, its numbers with their names, its switches where on."""
    parts = []
    for name, value in options.items():
        if isinstance(value, bool):
            parts += [name] if value else []
        elif isinstance(value, str):
            parts.append(value)
        elif isinstance(value, int):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def environment_of(options: Options) -> dict[str, str]:
    """The variables that a setting asks for."""
    variables = {
        **({} if options.get("device") == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **ALLOCATORS[options.get("allocator", "malloc as it is")],
        **WAITING[options.get("waiting", "waiting: spinning")],
    }
    if "threads" in options:
        variables |= {name: str(options["threads"]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return variables


@final
@dataclass(frozen=True)
class Race:
    """Where and how long workers run.

    Attributes:
        python: of the environment with the peers.
        root: the repository.
        logs: folder for what workers print.
        told: options that every worker is given besides its own, such as where the text lies.
        prepare_limit_seconds: for a worker to get ready.
        answer_limit_seconds: for one answer.
        tell: is told how it goes.
    """

    python: Path
    root: Path
    logs: Path
    told: Options
    prepare_limit_seconds: float = 600.0
    answer_limit_seconds: float = 900.0
    tell: Callable[[str], None] = print

    def start(self, contender: Contender, options: Options) -> Worker:
        """Start the process of one setting."""
        self.logs.mkdir(parents=True, exist_ok=True)
        module = f"benchmarks.workers.{contender.worker}"
        everything = {**self.told, **options}
        name = re.sub(r"[^a-z0-9]+", "-", f"{contender.name} {describe(options)}".lower()).strip("-")
        return Worker(
            [str(self.python), "-m", module, json.dumps(everything)],
            folder=self.root,
            environment=environment_of(everything),
            log=self.logs / f"{name[:150]}.log",
        )

    def screen(self, contender: Contender, request: Options) -> list[Row]:
        """Try the settings of a contender, each alone and for one round; all that was tried."""
        best = dict(contender.base)
        tried: list[Row] = []
        for stage in contender.stages or (({},),):
            for change in stage:
                options = {**best, **change}
                if all(row.options != options for row in tried):
                    tried.append(self._alone(contender, options, request))
            done = [row for row in tried if row.rate]
            best = dict(max(done, key=_median).options) if done else best
        return tried

    def final(
        self,
        ours: Sequence[Entry],
        theirs: Sequence[Entry],
        requests: Mapping[str, Options],
        rounds: int,
    ) -> dict[str, list[Row]]:
        """All entries in turns, round by round; in several heats if memory does not hold all at once.

        Ours takes part in every heat, so that every ratio is of one round.

        Args:
            ours: in the order of the rows, first.
            theirs: after them.
            requests: what they are asked, by name: every turn of one before the next.
            rounds: of every request in every heat.

        Returns:
            For each request the rows.
        """
        together = heats(ours, theirs, _ROOM * available_memory_mb())
        rows: dict[str, dict[tuple[str, str], Row]] = {name: {} for name in requests}
        for number, heat in enumerate(together):
            self.tell(f"heat {number + 1} of {len(together)}")
            found = self._heat(heat, requests, range(number * rounds, (number + 1) * rounds))
            for name, of_heat in found.items():
                for row in of_heat:
                    key = (row.contender, row.setting)
                    rows[name][key] = _joined(rows[name].get(key), row)
        return {name: [*found.values()] for name, found in rows.items()}

    def _heat(
        self, entries: Sequence[Entry], requests: Mapping[str, Options], rounds: range
    ) -> dict[str, list[Row]]:
        with ExitStack() as stack:
            workers: list[Worker | None] = []
            rows: list[Row] = []
            for entry in entries:
                row, worker = self._entered(stack, entry)
                rows.append(row)
                workers.append(worker)
            answered = {}
            for name, request in requests.items():
                self.tell(f"all ready: {name}")
                found = take_turns(workers, request, rounds, self.answer_limit_seconds, self.tell)
                rows = [
                    replace(row, answers=answers, failed=row.failed or failed)
                    for row, (answers, failed) in zip(rows, found, strict=True)
                ]
                workers = [w if row.failed is None else None for w, row in zip(workers, rows, strict=True)]
                answered[name] = rows
        return answered

    def _entered(self, stack: ExitStack, entry: Entry) -> tuple[Row, Worker | None]:
        """A worker that is ready; none, and why, if it failed."""
        row = Row(entry.contender.name, dict(entry.options))
        worker = stack.enter_context(self.start(entry.contender, entry.options))
        try:
            row = replace(row, about=worker.ready(self.prepare_limit_seconds))
        except WorkerError as failure:
            self.tell(f"failed: {row.contender}, {row.setting}: {failure}")
            return replace(row, failed=str(failure)), None
        self.tell(f"ready: {row.contender}, {row.setting}")
        return row, worker

    def _alone(self, contender: Contender, options: Options, request: Options) -> Row:
        row = Row(contender.name, dict(options))
        with self.start(contender, options) as worker:
            try:
                row = replace(row, about=worker.ready(self.prepare_limit_seconds))
                row = replace(row, answers={0: worker.go(request, self.answer_limit_seconds)})
            except WorkerError as failure:
                row = replace(row, failed=str(failure))
        said = f"{_median(row):,.0f} tokens/s" if row.rate else f"failed: {row.failed}"
        self.tell(f"tried {contender.name}, {row.setting}: {said}")
        return row


def finalists(contender: Contender, tried: Sequence[Row]) -> list[Entry]:
    """The settings that go on: the fastest, and what is too close to it to tell; all where it says so.

    A contender none of whose settings worked goes on with its first, to fail in the table.
    """
    chosen = sorted((row for row in tried if row.rate), key=_median, reverse=True)
    if contender.all_go_on or not chosen:
        chosen = [*tried] if contender.all_go_on else [*tried[:1]]
    else:
        least = (1 - _TOO_CLOSE) * _median(chosen[0])
        chosen = [row for row in chosen if _median(row) >= least][:_FINALISTS]
    return [Entry(contender, row.options, row.peak_rss_mb or 0.0) for row in chosen]


def heats(ours: Sequence[Entry], theirs: Sequence[Entry], room_mb: float) -> list[list[Entry]]:
    """Share entries out so that each heat fits the memory; ours is in all of them."""
    needed = sum(entry.memory_mb for entry in ours)
    shared: list[list[Entry]] = [[]]
    filled = needed
    for entry in theirs:
        if shared[-1] and filled + entry.memory_mb > room_mb:
            shared.append([])
            filled = needed
        shared[-1].append(entry)
        filled += entry.memory_mb
    return [[*ours, *others] for others in shared]


def best_of(rows: Iterable[Row], contender: str) -> Row | None:
    """The fastest row of a contender; None where it has no figures."""
    return max((row for row in rows if row.contender == contender and row.rate), key=_median, default=None)


def _joined(before: Row | None, row: Row) -> Row:
    """A row with what it did in an earlier heat."""
    if before is None:
        return row
    return replace(row, answers=before.answers | row.answers, failed=before.failed or row.failed)


def _median(row: Row) -> float:
    return row.rate.median if row.rate else 0.0
