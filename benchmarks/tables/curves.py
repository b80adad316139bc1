"""Loss curves: what the speed of the training table is worth, on the same batches at the same rates."""

import json
import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender, Options, Race, describe, environment_of
from benchmarks.harness.turns import WorkerError
from benchmarks.harness.workload import prepare_training
from benchmarks.tables.training import CONTENDERS, NARROW, OURS

_SEEDS = (1, 2)


def measure(command: Command) -> Page:
    """Train every contender for as many steps, at the setting that won the training table."""
    steps, every = (6, 2) if command.quick else (command.steps, max(1, command.steps // 3))
    text = prepare_training(command.shared, command.work, steps)
    race = command.race({"text": text.path, "threads": command.threads, "warm_up": False})
    won = _winners(command)
    judged_at = range(every, steps + 1, every)
    rows, record = [], []
    for contender in command.chosen(CONTENDERS):
        settings = won.get(contender.name) or _first_settings(contender)
        for name, options in [
            *((contender.name, options) for options in settings),
            *((contender.name + NARROW, options) for options in won.get(contender.name + NARROW, [])),
        ]:
            curves = [_curve(race, contender, {**options, "seed": seed}, steps, every) for seed in _SEEDS]
            rows.append([name, describe(options), *_cells(curves, judged_at)])
            record.append(
                {
                    "contender": name,
                    "setting": describe(options),
                    "options": dict(options),
                    "environment": environment_of(options),
                    "curves": curves,
                }
            )
            command.tell(" ".join(rows[-1]))
    return Page(
        name="curves",
        title=f"Validation loss in nats a token, float32 ({text.text})",
        columns=("contender", "setting", *(f"step {step}" for step in judged_at)),
        rows=rows,
        notes=(
            f"Mean of {len(_SEEDS)} seeds, half their distance; the same batches and the same schedule for "
            "all (100 steps up to 7e-4, then falling as 1/√step), no smoothing in what is judged.",
            "Settings are the fastest of training.json." if won else "No training.json: first settings.",
        ),
        record={"workload": asdict(text) | {"path": None}, "steps": steps, "rows": record},
    )


def _winners(command: Command) -> dict[str, list[Options]]:
    """The fastest setting of each contender in the training table, all of ours; nothing if it never ran."""
    path = command.results / "training.json"
    if not path.exists():
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        if row["tokens_per_second"]:
            found.setdefault(row["contender"], []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: -row["tokens_per_second"]["median"])
    return {
        name: [row["options"] for row in (rows if name == OURS else rows[:1])] for name, rows in found.items()
    }


def _first_settings(contender: Contender) -> list[Options]:
    if contender.all_go_on:
        return [{**contender.base, **change} for change in contender.stages[0]]
    return [contender.base]


def _curve(race: Race, contender: Contender, options: Options, steps: int, every: int) -> dict[str, Any]:
    """Validation losses by step, or why there are none."""
    with race.start(contender, options) as worker:
        try:
            worker.ready(race.prepare_limit_seconds)
            found = worker.go({"curve": steps, "every": every}, 4 * race.answer_limit_seconds)
        except WorkerError as failure:
            return {"seed": options["seed"], "failed": str(failure), "valid_loss": {}}
    losses = {int(step): loss for step, loss in found["valid_loss"].items()}
    return {"seed": options["seed"], "failed": None, "valid_loss": losses}


def _cells(curves: list[dict[str, Any]], judged_at: range) -> list[str]:
    if failures := [curve["failed"] for curve in curves if curve["failed"]]:
        return [f"failed: {failures[0]}", *["–"] * (len(judged_at) - 1)]
    cells = []
    for step in judged_at:
        losses = [curve["valid_loss"][step] for curve in curves]
        cells.append(f"{statistics.mean(losses):.3f} ± {(max(losses) - min(losses)) / 2:.3f}")
    return cells
