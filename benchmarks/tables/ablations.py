"""Ablations: what each choice is worth; everything on but one, in turns."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.figures import Summary
from benchmarks.harness.page import Page, number, spread
from benchmarks.harness.race import Contender, Entry, Race, Row
from benchmarks.harness.workload import prepare_training
from benchmarks.tables import decoding
from benchmarks.workers import decoding_ablation, training_ablation

_ALL_ON = "nothing"
_DECODING = decoding.CASES["beam 4, batch 32"]


def measure(command: Command) -> Page:
    """Training, then decoding where the checkpoint is here."""
    batches = 4 if command.quick else 24
    text = prepare_training(command.shared, command.work, batches)
    told = {"text": text.path, "threads": command.threads, "precision": "bf16"}
    trained = _without_each(
        command.race(told), "training_ablation", training_ablation.LEVERS, {"batches": batches}, command
    )
    decoded: list[Row] = []
    if (command.shared / "checkpoints" / "marian-multi30k").is_dir():
        told = {**decoding.prepare(command), "threads": 1, "workers": command.threads}
        decoded = _without_each(
            command.race(told), "decoding_ablation", decoding_ablation.LEVERS, _DECODING, command
        )
    return Page(
        name="ablations",
        title=f"One lever off at a time, tokens a second ({command.threads} processors)",
        columns=("of", "off (instead)", "tokens/s (range)", "all on / this (range)", "peak MB", "BLEU"),
        rows=[
            *(_cells("training, bf16", row, trained[0]) for row in trained),
            *(_cells("decoding, beam 4, batch 32", row, decoded[0]) for row in decoded),
        ],
        notes=(
            f"{command.rounds} rounds in turns; median and range; ratios within rounds. The training is that "
            "of the table `training`, the decoding that of `decoding`.",
        ),
        record={
            "workload": asdict(text) | {"path": None},
            "training": [row.record(trained[0]) for row in trained],
            "decoding": [row.record(decoded[0]) for row in decoded],
        },
    )


def _without_each(
    race: Race, worker: str, levers: Sequence[str], request: dict[str, Any], command: Command
) -> list[Row]:
    """With everything on first, then without each lever; each in a process of its own."""
    contender = Contender("triptych", worker)
    everything, *others = [Entry(contender, {"off": off}, 1500.0) for off in (_ALL_ON, *levers)]
    return race.final(
        [everything], others[:2] if command.quick else others, {"all": request}, command.rounds
    )["all"]


def _cells(of: str, row: Row, everything: Row) -> tuple[str, ...]:
    off = row.options["off"]
    if row.failed:
        return (of, off, f"failed: {row.failed}", "–", "–", "–")
    behind: Summary | None = row.ratio_of(everything)
    bleu = [answer["bleu"] for answer in row.answers.values() if "bleu" in answer]
    return (
        of,
        off,
        spread(row.rate),
        spread(behind, 2),
        number(row.peak_rss_mb),
        number(bleu[0], 2) if bleu else "–",
    )
