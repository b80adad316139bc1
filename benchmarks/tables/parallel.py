"""Several processes beside one: throughput, memory, collectives, saving, and from a kill to the next step."""

import json
import os
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.page import Page
from benchmarks.harness.workload import TrainingText, prepare_training

# What is compared: processes, threads of each, kind, precision.
WAYS = {
    "one process of two threads": (1, 2, None, "fp32"),
    "two processes of one thread, ddp": (2, 1, "ddp", "fp32"),
    "two processes of one thread, fsdp": (2, 1, "fsdp", "fp32"),
    "one process of two threads, bf16": (1, 2, None, "bf16"),
    "two processes of one thread, fsdp, bf16": (2, 1, "fsdp", "bf16"),
}


def measure(command: Command) -> Page:
    """Each way in processes of its own, in turns."""
    steps = 2 if command.quick else 6
    text = prepare_training(command.shared, command.work, steps + 2)
    ways = {name: way for name, way in WAYS.items() if not command.only or name.startswith(command.only)}
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in ways}
    for number in range(command.rounds):
        for name, way in ways.items():
            command.tell(f"round {number + 1}: {name}")
            found[name].append(_answers(command, text, way, steps))
    restart = None if command.quick else _restart_seconds(command)
    return Page(
        name="parallel",
        title="Training by several processes on two cores",
        columns=("way", "tokens/s", "peak MB of each", "of training, MB", "collectives, s of a step",
                 "saving: stands still, s", "saving: until complete, s"),
        rows=[_cells(name, answers) for name, answers in found.items()],
        notes=(
            f"{text.text}; d_model 256, 3 + 3 layers, vocabulary {text.vocab_size:,}; {steps} steps of about "
            f"{text.tokens_per_batch:,.0f} target tokens, medians of {command.rounds} rounds in turns.",
            "Memory is the most of a process; of training: above what it had with libraries and text. "
            "Collectives are seconds within gloo's operations, while other work may go on.",
            *([] if restart is None else [
                f"From a kill of one of two processes (ddp, recipe multi30k) to the next step: "
                f"{restart:.1f} s."
            ]),
        ),
        record={"ways": found, "restart_seconds": restart},
        num_texts=1,
    )  # fmt: skip


def _answers(
    command: Command, text: TrainingText, way: tuple[int, int, str | None, str], steps: int
) -> list[dict[str, Any]]:
    size, threads, kind, precision = way
    folder = command.work / "parallel"
    folder.mkdir(parents=True, exist_ok=True)
    options = {"threads": threads, "kind": kind, "precision": precision, "steps": steps, "text": text.path}
    given = json.dumps({**options, "folder": str(folder)})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    world |= {"LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": str(threads)}
    processes = [
        subprocess.Popen(
            [str(command.python), "-m", "benchmarks.workers.parallel", given],
            cwd=command.root,
            env={**os.environ, **(world | {"RANK": str(r), "LOCAL_RANK": str(r)} if size > 1 else {})},
        )
        for r in range(size)
    ]
    if any(process.wait(timeout=600) for process in processes):
        raise RuntimeError(f"{way}: a process failed")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def _cells(name: str, rounds: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    def middle(value: Any) -> float:
        return statistics.median(max(map(value, ranks)) for ranks in rounds)

    rates = [ranks[0]["tokens"] / sum(ranks[0]["seconds"]) for ranks in rounds]
    return [
        name,
        f"{statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f})",
        f"{middle(lambda rank: rank['peak_mb']):,.0f}",
        f"{middle(lambda rank: rank['of_training_mb']):,.0f}",
        f"{middle(lambda rank: rank['collectives_seconds_a_step']):.2f}",
        f"{middle(lambda rank: rank['saving']['stands_still']):.2f}",
        f"{middle(lambda rank: rank['saving']['until_complete']):.2f}",
    ]


def _restart_seconds(command: Command) -> float:
    """From a kill to the next step that the metrics tell of."""
    folder = command.work / "parallel-run"
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    told = ["--set=training.save_every_steps=3", "--set=training.log_every_steps=1",
            "--set=training.parallel=ddp", f"--set=data.cache={command.work / 'cache'}"]  # fmt: skip
    launcher = subprocess.Popen(
        [str(command.python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--max-restarts=1", "-m", "triptych", "train", "multi30k", "--out", str(folder), *told],
        cwd=command.root, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait(lambda: _lines(folder) >= 5)
        os.kill(_ranks(launcher.pid)[1], signal.SIGKILL)
        killed = time.monotonic()
        log = folder / "logs" / "rank-0.log"
        _wait(lambda: "resuming" in log.read_text())
        begun = _lines(folder)
        _wait(lambda: _lines(folder) > begun)
        return time.monotonic() - killed
    finally:
        for process in (*_ranks(launcher.pid), launcher.pid):
            os.kill(process, signal.SIGKILL)
        launcher.wait()


def _wait(happened: Any) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        if time.monotonic() > deadline:
            raise RuntimeError("it did not happen in time")
        time.sleep(0.02)


def _lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def _ranks(launcher: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))
