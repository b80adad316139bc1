"""Decoding: output tokens a second and BLEU, the same Marian checkpoint in every engine."""

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.figures import Summary
from benchmarks.harness.page import Page, number, spread
from benchmarks.harness.race import Contender, Entry, Options, Row, best_of

OURS = "triptych"
MARIAN = "Hugging Face generate"
CTRANSLATE2 = "CTranslate2"
_NUM_LINES = 200
CASES: dict[str, dict[str, int]] = {
    "greedy, batch 32": {"beam": 1, "batch": 32},
    "beam 4, batch 32": {"beam": 4, "batch": 32},
    "greedy, batch 1": {"beam": 1, "batch": 1},
    "beam 4, batch 1": {"beam": 4, "batch": 1},
}
_SCREENED = "beam 4, batch 32"


def measure(command: Command) -> Page:
    """Convert, screen, race, and tell."""
    told = prepare(command)
    race = command.race(told)
    cases = {_SCREENED: CASES[_SCREENED]} if command.quick else CASES
    tried: list[Row] = []
    entries: list[Entry] = []
    for contender in command.chosen(_contenders(command.threads)):
        common: Options = contender.base
        if contender.stages:
            found = race.screen(contender, CASES[_SCREENED])
            tried += found
            best = best_of(found, contender.name)
            common = best.options if best else common
        entries += [
            Entry(contender, {**common, **v}, 800.0) for v in _variants(contender.name, command.threads)
        ]
    ours = [entry for entry in entries if entry.contender.name == OURS]
    theirs = [entry for entry in entries if entry.contender.name != OURS]
    rows = race.final(ours, theirs, cases, command.rounds)
    return _page(rows, tried, command)


def _contenders(threads: int) -> tuple[Contender, ...]:
    """What they have in common at all settings; Hugging Face's is screened."""
    malloc = ({"allocator": "malloc as it is"}, {"allocator": "malloc: no mmap"})
    attention = ({"attention": "sdpa"}, {"attention": "eager"})
    base = {"precision": "fp32", "processes": 1, "threads": threads, **attention[0], **malloc[0]}
    return (
        Contender(OURS, "decoding_triptych"),
        Contender(MARIAN, "decoding_marian", base, (attention, malloc)),
        Contender(CTRANSLATE2, "decoding_ctranslate2"),
    )


def _variants(name: str, threads: int) -> Iterable[dict[str, Any]]:
    """Precisions, and ways to use the processors: threads in an operation, or workers of one thread."""
    several = "processes" if name == MARIAN else "workers"
    precisions = {
        OURS: ("fp32", "bf16", "int8"),
        MARIAN: ("fp32", "bf16"),
        CTRANSLATE2: ("float32", "int8", "int8_float32"),
    }[name]
    ways = [{several: 1, "threads": 1}]
    if threads > 1:
        ways = [{several: threads, "threads": 1}, {several: 1, "threads": threads}, *ways]
    return ({"precision": precision, **way} for precision, way in product(precisions, ways))


def prepare(command: Command) -> dict[str, Any]:
    """The text, the checkpoint, and what CTranslate2's own converter makes of it."""
    checkpoint = command.shared / "checkpoints" / "marian-multi30k"
    text = command.shared / "data" / "multi30k"
    if not checkpoint.is_dir() or not text.is_dir():
        raise NotHereError(f"decoding needs {checkpoint} and {text}, which are not here")
    converted = command.work / "marian-multi30k-ctranslate2"
    shutil.rmtree(converted, ignore_errors=True)
    converted.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(str(command.python), "-m", "ctranslate2.converters.transformers"),
            *("--model", str(checkpoint), "--output_dir", str(converted)),
        ],
        check=True,
        capture_output=True,
    )
    return {
        "source": str(text / "test_2016_flickr.en"),
        "target": str(text / "test_2016_flickr.de"),
        "num_lines": 32 if command.quick else _NUM_LINES,
        "checkpoint": str(checkpoint),
        "converted": str(converted),
    }


def _page(rows: Mapping[str, list[Row]], tried: list[Row], command: Command) -> Page:
    ours = {case: best_of(found, OURS) for case, found in rows.items()}
    first = next(iter(rows.values()))
    cells = []
    for place, row in enumerate(first):
        of_cases = {case: found[place] for case, found in rows.items()}
        cells.append([row.contender, row.setting, *_cells(of_cases)])
    for name in (MARIAN, CTRANSLATE2):
        best = {case: best_of(found, name) for case, found in rows.items()}
        behind = [found.ratio_of(ours[case]) if found else None for case, found in best.items()]
        cells.append(
            ["ours / theirs, each at its best", name, *(spread(ratio, 2) for ratio in behind), "", ""]
        )
    return Page(
        name="decoding",
        title="Decoding, output tokens a second (marian-multi30k on test_2016_flickr)",
        columns=("engine", "setting", *rows, "BLEU", "peak MB"),
        rows=cells,
        notes=(
            f"{command.rounds} rounds in turns; median and range; from text to text; tokens counted in the "
            "output, </s> included. BLEU of the cases in their order, against the reference.",
            "Ratios are of the same rounds.",
        ),
        record={
            "cases": dict(CASES),
            "rows": {case: [row.record(ours[case]) for row in found] for case, found in rows.items()},
            "screening": [row.record() for row in tried],
        },
    )


def _cells(of_cases: Mapping[str, Row]) -> list[str]:
    failed = next((row.failed for row in of_cases.values() if row.failed), None)
    rates: list[Summary | None] = [row.rate for row in of_cases.values()]
    answers = [answer for row in of_cases.values() for answer in [*row.answers.values()][:1]]
    bleu = " ".join(f"{answer['bleu']:.2f}" for answer in answers)
    peaks = [answer["all_processes_peak_rss_mb"] for answer in answers if answer["all_processes_peak_rss_mb"]]
    shown = [spread(rate) for rate in rates]
    if failed:
        shown = [f"failed: {failed}", *shown[1:]]
    return [*shown, bleu or "–", number(max(peaks, default=None))]
