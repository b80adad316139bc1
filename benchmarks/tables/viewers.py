"""Viewers of attention: seconds, memory and size of a page of every head, at several lengths."""

import statistics
from typing import Any

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender, Race
from benchmarks.harness.turns import WorkerError

WAYS = (
    "triptych",
    "bertviz head_view",
    "bertviz model_view",
    "CircuitsVis",
    "TransformerLens + CircuitsVis",
)
LENGTHS = (128, 1024, 8192)
# What a process may allocate; the weights of all heads of 8,192 tokens are 12.9 GB in float32.
MOST_GB = 12


def measure(command: Command) -> Page:
    """From a checkpoint and a text to a file, each way in a process of its own.

    Raises:
        NotHereError: the shared checkpoint or the text is not here.
    """
    folder = command.shared / "checkpoints" / "llama-gqa"
    texts = sorted((command.shared / "data" / "tinyshakespeare").glob("input.txt"))
    if not folder.exists() or not texts:
        raise NotHereError(f"the table needs {folder} and tinyshakespeare beside it")
    race = command.race({"threads": command.threads})
    request = {
        "folder": str(folder),
        "text": str(texts[0]),
        "page": str(command.work / "viewer.html"),
        "most_gb": MOST_GB,
    }
    ways = [way for way in WAYS if not command.only or way.startswith(command.only)]
    found = [
        _measured(race, {**request, "way": way, "tokens": tokens}, command.rounds)
        for tokens in (LENGTHS[:1] if command.quick else LENGTHS)
        for way in ways
    ]
    return Page(
        name="viewers",
        title="A page of every head of llama-gqa (6 layers × 8 heads), from checkpoint to file",
        columns=("way", "tokens", "seconds", "peak MB", "page MB"),
        rows=[_cells(one) for one in found],
        notes=(
            f"Median of {command.rounds} processes each, which may allocate {MOST_GB} GB.",
            "Above 4.5 million weights, triptych's page has the 16 largest of each token and the sum of the "
            "others. The others' pages have all weights, and need the network when they are opened.",
        ),
        record={"ways": found},
        num_texts=1,
    )


def _measured(race: Race, request: dict[str, Any], rounds: int) -> dict[str, Any]:
    asked = {"way": request["way"], "tokens": request["tokens"]}
    answers = []
    for _ in range(rounds):
        try:
            with race.start(Contender("viewers", "viewers"), {}) as worker:
                worker.ready(race.prepare_limit_seconds)
                answers.append(worker.go(request, race.answer_limit_seconds))
        except WorkerError as failure:
            return {**asked, "failed": str(failure)}
    return {**asked, "answers": answers}


def _cells(found: dict[str, Any]) -> list[str]:
    start = [found["way"], f"{found['tokens']:,}"]
    if "failed" in found:
        return [*start, f"failed: {found['failed']}", "–", "–"]
    answers = found["answers"]
    seconds, peak, size = (
        statistics.median(answer[name] for answer in answers)
        for name in ("seconds", "peak_rss_mb", "page_mb")
    )
    return [*start, f"{seconds:.1f}", f"{peak:,.0f}", f"{size:,.1f}"]
