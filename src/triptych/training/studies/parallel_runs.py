"""Parallel runs of a study in one process per run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from triptych.errors import TriptychError, UsageError
from triptych.files import write_text
from triptych.launch import environment_alone, num_on_machine, place_on_machine
from triptych.processes import Turns, World
from triptych.training.machine import StopRequest
from triptych.training.metrics import read_metrics
from triptych.training.studies.study_job import Result, StudyJob, read_result

# Command of a job's process; its argument is the job's file.
_COMMAND = (sys.executable, "-m", "triptych.cli.job")
_LOOK_EVERY = 0.2  # seconds
ALONE = World()


@final
@dataclass
class StudyProgress:
    """Progress of the runs of a study."""

    variants: dict[str, str]  # variant of each run, by the run's name
    # Results by name, including results of earlier calls.
    done: dict[str, Result] = field(default_factory=dict)
    earlier: frozenset[str] = frozenset()  # names of runs finished by earlier calls
    failed: dict[str, str] = field(default_factory=dict)  # error messages by name
    # Finished share of the steps of each running run, by name.
    running: dict[str, float] = field(default_factory=dict)
    seconds_left: float | None = (
        None  # estimate of the remaining time; None before the first steps
    )


@final
class StudyStoppedError(TriptychError):
    """Error after a signal stopped a study; the states of its runs are saved."""

    def __init__(self, signal_number: int, folder: Path) -> None:
        super().__init__(
            f"stopped; everything is saved: the same command goes on in {folder}"
        )
        self.exit_code = 128 + signal_number


def run_all(
    planned: Sequence[StudyJob],
    folder: Path,
    workers: int,
    tell: Callable[[StudyProgress], None],
    world: World = ALONE,
) -> tuple[dict[str, Result], dict[str, str]]:
    """Make all runs without a result; returns the results of all runs, and failures, by name."""
    places = own_places(workers)
    turns = world.turns(len(planned))
    if not any(world.gathered(len(places))):
        raise UsageError(
            "no process would make a run: the launcher has to say how many processes this machine has "
            "(LOCAL_WORLD_SIZE) and the number of each (LOCAL_RANK), as torchrun does"
        )

    def make_own() -> tuple[dict[str, Result], dict[str, str]]:
        with turns.given_up_on_error():
            return _make(planned, folder, places, tell, turns)

    # Every process returns the results of all processes.
    found, failed = world.on_all(make_own)
    results = dict[str, Result]()
    for records, complaints in world.gathered((found, failed)):
        results |= records
        failed |= complaints
    return results, failed


def own_places(workers: int) -> range:
    """Return this process's share of the slots for parallel runs on its machine."""
    number = place_on_machine()
    count = num_on_machine()
    return range(workers * number // count, workers * (number + 1) // count)


def _make(
    planned: Sequence[StudyJob],
    folder: Path,
    places: range,
    tell: Callable[[StudyProgress], None],
    turns: Turns,
) -> tuple[dict[str, Result], dict[str, str]]:
    """Make runs in this process's slots until all processes are done; returns results and failures."""
    held = {
        one.name: found
        for one in planned
        if (found := read_result(one.result)) is not None
    }
    waiting = {
        one.name: one for one in planned if one.name not in held
    }  # runs not started by this process
    variants = {one.name: one.variant for one in planned}
    progress = StudyProgress(variants, {**held}, frozenset(held))
    results = dict[str, Result]()
    running: list[_Process] = []
    to_make = sum(one.steps for one in waiting.values())
    finished = 0.0
    started = time.monotonic()
    with StopRequest() as stop:
        try:
            while True:
                while (
                    len(running) < len(places) and (number := turns.take()) is not None
                ):
                    one = planned[number]
                    if one.name in held:
                        results[one.name] = held[one.name]
                        turns.end_one()
                        continue
                    del waiting[one.name]
                    taken = {process.place for process in running}
                    place = next(place for place in places if place not in taken)
                    running.append(_Process(one, place))
                if turns.are_over:
                    break
                time.sleep(_LOOK_EVERY)
                if stop.signal_number is not None:
                    raise StudyStoppedError(stop.signal_number, folder)
                for process in [one for one in running if one.popen.poll() is not None]:
                    running.remove(process)
                    job = process.job
                    finished = finished + process.job.steps
                    result = (
                        read_result(job.result)
                        if process.popen.returncode == 0
                        else None
                    )
                    if result is None:
                        progress.failed[job.name] = process.complaint()
                    else:
                        results[job.name] = progress.done[job.name] = result
                    turns.end_one()
                for one in [*waiting.values()]:
                    if (found := read_result(one.result)) is None:
                        continue
                    del waiting[one.name]  # made by another process
                    progress.done[one.name] = found
                    finished += one.steps
                progress.running = {one.job.name: one.share_done() for one in running}
                made = finished + sum(
                    progress.running[one.job.name] * one.job.steps for one in running
                )
                if made > 0:
                    rate = made / (time.monotonic() - started)
                    progress.seconds_left = max(to_make - made, 0.0) / rate
                tell(progress)
        finally:  # running processes save their state and end
            for process in running:
                process.popen.send_signal(signal.SIGTERM)
            for process in running:
                process.popen.wait()
    return results, progress.failed


@final
class _Process:
    """Process of a job; its output goes to a file."""

    def __init__(self, job: StudyJob, place: int) -> None:
        self.job = job
        self.place = place
        jobs = job.folder.parent / "jobs"
        jobs.mkdir(parents=True, exist_ok=True)
        job_file = jobs / f"{job.name}.json"
        write_text(job_file, job.model_dump_json(indent=2) + "\n")
        self.log = jobs / f"{job.name}.log"
        # Limit the threads of libraries other than torch too.
        environment = {
            **environment_alone(),
            "OMP_NUM_THREADS": str(job.threads),
            **_own_gpu(place),
        }
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [*_COMMAND, str(job_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                process_group=0,  # Ctrl-C reaches only this process, which then stops its jobs
            )

    def share_done(self) -> float:
        try:
            records = read_metrics(self.job.folder / "metrics.jsonl")
        except (OSError, TriptychError):
            return 0.0
        last = max((int(record["step"]) for record in records), default=0)
        return min(last / self.job.steps, 1.0)

    def complaint(self) -> str:
        """Return the exit code or signal of the process, and its last line of output."""
        lines = (
            self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        )
        last = lines[-1].removeprefix("triptych: ") if lines else "it printed nothing"
        code = self.popen.returncode
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {last} (all of it in {self.log})"


def _own_gpu(place: int) -> dict[str, str]:
    """Return the environment variable that limits a process to one GPU; empty on a machine without GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return {}
    visible = os.environ.get(
        "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))
    ).split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[place % count]}
