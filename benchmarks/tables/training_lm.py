"""Training of language models: tokens a second of whole steps, all contenders over the same windows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.page import Page, number, spread
from benchmarks.harness.race import ALLOCATORS, Contender, Entry, Row, best_of, finalists

OURS = "triptych"
HUGGING = "Hugging Face GPT-2"
NANOGPT = "nanoGPT"
# The characters of one text: nanoGPT's setting for processors, and its setting for GPUs in smaller batches.
_SIZES: dict[str, dict[str, int]] = {
    "4 layers of 128, 12 × 64 tokens": {
        **{"num_layers": 4, "d_model": 128, "num_heads": 4},
        **{"context": 64, "batch": 12},
    },
    "6 layers of 384, 8 × 256 tokens": {
        **{"num_layers": 6, "d_model": 384, "num_heads": 6},
        **{"context": 256, "batch": 8},
    },
}


def measure(command: Command) -> Page:
    """Screen, race, and tell."""
    text = command.shared / "data" / "tinyshakespeare" / "input.txt"
    if not text.is_file():
        raise NotHereError(f"training-lm needs {text}, which is not here")
    vocab_size = len(np.unique(np.frombuffer(text.read_bytes(), dtype=np.uint8)))
    checkout = command.root / ".bench" / "nanoGPT"
    told = {"text": str(text), "vocab_size": vocab_size, "threads": command.threads}
    sizes = dict([next(iter(_SIZES.items()))]) if command.quick else _SIZES
    lines: list[list[str]] = []
    record: dict[str, Any] = {"sizes": sizes, "rows": {}, "screening": {}}
    for name, size in sizes.items():
        command.tell(name)
        rows, tried = _of_size(command, {**told, **size, "checkout": str(checkout)})
        ours = best_of(rows, OURS)
        lines += [[name, "", "", "", "", ""], *_rows(rows, ours)]
        record["rows"][name] = [row.record(ours) for row in rows]
        record["screening"][name] = [row.record() for row in tried]
    return Page(
        name="training-lm",
        title=f"Training of language models, tokens a second (tinyshakespeare; {command.threads} threads)",
        columns=("contender", "setting", "tokens/s (range)", "ours / this (range)", "peak MB", "parameters"),
        rows=lines,
        notes=(
            f"{command.rounds} rounds in turns; median and range. GPT-2's structure without dropout; "
            "AdamW with decay on matrices, gradients clipped.",
            "Ratios are of the same round, to the faster of ours. Settings were screened first.",
            f"nanoGPT is a checkout in {checkout.relative_to(command.root)}.",
        ),
        record=record,
    )


def _of_size(command: Command, told: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
    race = command.race(told)
    steps = 5 if command.quick else 200 if told["d_model"] < 200 else 20
    tried: list[Row] = []
    entries: list[Entry] = []
    for contender in command.chosen(_contenders(command.compiled)):
        found = race.screen(contender, {"steps": max(2, steps // 4)})
        tried += found
        entries += finalists(contender, found)
    ours = [entry for entry in entries if entry.contender.name == OURS]
    theirs = [entry for entry in entries if entry.contender.name != OURS]
    return race.final(ours, theirs, {"steps": {"steps": steps}}, command.rounds)["steps"], tried


def _contenders(with_compiled: bool) -> list[Contender]:
    precisions = ({"precision": "fp32"}, {"precision": "bf16 autocast"})
    allocators = tuple({"allocator": name} for name in ALLOCATORS)
    compiled: tuple[dict[str, Any], ...] = ({"compiled": False}, {"compiled": True})
    last = (compiled,) if with_compiled else ()
    hugging = (
        ({"attention": "sdpa"}, {"attention": "eager"}),
        precisions,
        allocators,
        ({"optimizer": "fused"}, {"optimizer": "foreach"}),
        *last,
    )
    nano = (precisions, allocators, *last)

    def first(stages: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        return {name: value for stage in stages for name, value in stage[0].items()}

    return [
        # With whatever the command itself sets up: no allocator is chosen for it here.
        Contender(
            OURS,
            "training_lm_triptych",
            stages=(({"precision": "fp32"}, {"precision": "bf16"}),),
            all_go_on=True,
        ),
        Contender(HUGGING, "training_lm_hugging", first(hugging), hugging),
        Contender(NANOGPT, "training_lm_nanogpt", first(nano), nano),
    ]


def _rows(rows: Sequence[Row], ours: Row | None) -> list[list[str]]:
    shown = sorted(rows, key=lambda row: -(row.rate.median if row.rate else 0.0))
    return [
        [row.contender, row.setting, f"failed: {row.failed}", "–", "–", "–"]
        if row.failed
        else [
            row.contender,
            row.setting,
            spread(row.rate),
            spread(row.ratio_of(ours), 2),
            number(row.peak_rss_mb),
            number(row.about.get("parameters")),
        ]
        for row in shown
    ]
