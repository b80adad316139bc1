"""A model that people use: what a person waits for on SmolLM2-135M (270 heads), next to `transformers`."""

import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender, Race
from benchmarks.harness.turns import WorkerError

# Variable of the environment with the folder of the model in Hugging Face's format.
MODEL = "SMOLLM2"
# What is done, by whom, and what is aimed at in seconds; None without an aim.
TASKS: tuple[tuple[str, str, float | None], ...] = (
    ("inspect", "triptych", 5),
    ("attend, 400 tokens", "triptych", 5),
    ("attend, 400 tokens", "transformers", None),
    ("one head's step page, 400 tokens", "triptych", 3),
    ("explore: a click on a row", "triptych", 0.15),
    ("explore: a click on a head", "triptych", 0.15),
    ("attend --over, 60 kB", "triptych", 60),
    ("sweep of all heads, one pair", "triptych", 20),
    ("--worth of all heads, 500 tokens", "triptych", None),
    ("evaluate, windows of 512", "triptych", None),
    ("evaluate, windows of 512", "transformers", None),
    ("evaluate, windows of 2,048", "triptych", None),
    ("evaluate, windows of 2,048", "transformers", None),
)


def measure(command: Command) -> Page:
    """Each task in a process of its own; commands from their call to their end, imports included.

    Raises:
        NotHereError: the model or the text is not here.
    """
    folder = Path(os.environ.get(MODEL, ""))
    text = command.shared / "data" / "wikitext2" / "test.txt"
    if not (folder / "config.json").is_file() or not text.is_file():
        raise NotHereError(
            f"the table needs {text}, and {MODEL}=FOLDER of SmolLM2-135M-Instruct in the environment"
        )
    race = command.race({"threads": command.threads})
    tasks = [task for task in TASKS if not command.only or task[0].startswith(command.only)]
    request = {"folder": str(folder), "text": str(text), "work": str(command.work)}
    found = [
        _measured(race, {**request, "task": task, "way": way}, command.rounds) | {"aim": aim}
        for task, way, aim in tasks
    ]
    return Page(
        name="real",
        title="What a person waits for on SmolLM2-135M (30 layers × 9 heads)",
        columns=("task", "way", "seconds", "aim", "peak MB"),
        rows=[_cells(one) for one in found],
        notes=(
            f"Median of {command.rounds} processes each. Commands are measured from their call to their end, "
            "with the import of torch; clicks, sweep and evaluation in a process that has opened the model.",
        ),
        record={"tasks": found},
    )


def _measured(race: Race, request: dict[str, Any], rounds: int) -> dict[str, Any]:
    asked = {"task": request["task"], "way": request["way"]}
    answers = []
    for _ in range(rounds):
        try:
            with race.start(Contender("real", "real"), {}) as worker:
                worker.ready(race.prepare_limit_seconds)
                answers.append(worker.go(request, race.answer_limit_seconds))
        except WorkerError as failure:
            return {**asked, "failed": str(failure)}
    return {**asked, "answers": answers}


def _cells(found: dict[str, Any]) -> list[str]:
    aim = "" if found["aim"] is None else f"{found['aim']:g}"
    start = [found["task"], found["way"]]
    if "failed" in found:
        return [*start, f"failed: {found['failed']}", aim, "–"]
    seconds, peak = (
        statistics.median(answer[name] for answer in found["answers"]) for name in ("seconds", "peak_rss_mb")
    )
    return [*start, f"{seconds:.2f}", aim, f"{peak:,.0f}"]
