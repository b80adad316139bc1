"""Generation: tokens a second of greedy continuations, the same checkpoints in every engine."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.page import Page, number, spread
from benchmarks.harness.race import Contender, Entry, Row, best_of

OURS = "triptych"
HUGGING = "Hugging Face generate"
CTRANSLATE2 = "CTranslate2"
LLAMA_CPP = "llama.cpp"
PRODUCTS = "products alone"
_PROMPT, _NEW = 128, 128
_LLAMA = "Llama of 100 M random parameters, 12 heads, 4 of keys and values"
# What its process needs for the larger checkpoint, about.
_MEMORY_MB = 1800.0


def measure(command: Command) -> Page:
    """Write the checkpoints, screen, race, and tell."""
    cases = _cases(command.quick)
    rows: list[list[str]] = []
    record: dict[str, Any] = {"cases": cases, "models": {}}
    for name, told in prepare(command).items():
        command.tell(name)
        found, tried = _of_model(command, told, cases)
        rows += [[name, *("" for _ in range(len(cases) + 5))], *_rows(found)]
        ours = {case: best_of(of_case, OURS) for case, of_case in found.items()}
        record["models"][name] = {
            "rows": {case: [row.record(ours[case]) for row in of_case] for case, of_case in found.items()},
            "screening": [row.record() for row in tried],
        }
    return Page(
        name="generation",
        title=f"Greedy continuations, tokens a second ({command.threads} threads)",
        columns=("engine", "setting", *cases, "ours / this", "as ours", "loading MB", "file MB"),
        rows=rows,
        notes=(
            f"{command.rounds} rounds in turns; median and range. Prompts have {_PROMPT} random tokens; "
            "'read' counts the tokens of the prompts, the others those that were made, reading included.",
            "ours / this: of the same precision, in the same rounds, for the cases in their order. as ours: "
            "first tokens of the first prompt that are those of ours in fp32, in the case of batch 1.",
            "llama.cpp: the wheel xllamacpp, built for AVX2; fp16 next to our bf16, q8_0 next to our int8.",
            "loading MB: the peak of memory while the model is loaded, beyond that of the libraries.",
            "products alone: the matrices of the model times as many tokens, and nothing else.",
        ),
        record=record,
    )


def _cases(quick: bool) -> dict[str, dict[str, int]]:
    prompt, new = (16, 8) if quick else (_PROMPT, _NEW)
    cases = {}
    for batch in (1, 4 if quick else 32):
        cases[f"batch {batch}"] = {"batch": batch, "prompt": prompt, "new": new}
        cases[f"read, batch {batch}"] = {"batch": batch, "prompt": prompt, "new": 1}
    return cases


def _of_model(
    command: Command, told: Mapping[str, Any], cases: Mapping[str, dict[str, int]]
) -> tuple[dict[str, list[Row]], list[Row]]:
    race = command.race({**told, "threads": command.threads})
    screened = next(iter(cases.values()))
    tried: list[Row] = []
    entries: list[Entry] = []
    for contender in command.chosen(_contenders(command.compiled)):
        options = contender.base
        if contender.stages:
            found = race.screen(contender, screened)
            tried += found
            best = best_of(found, contender.name)
            options = best.options if best else options
        entries.append(Entry(contender, options, _MEMORY_MB))
    ours = [entry for entry in entries if entry.contender.name == OURS]
    theirs = [entry for entry in entries if entry.contender.name != OURS]
    return race.final(ours, theirs, cases, command.rounds), tried


def _contenders(with_compiled: bool) -> list[Contender]:
    """One for each precision; Hugging Face's settings are screened in each."""
    attention = ({"attention": "sdpa"}, {"attention": "eager"})
    cache = ({"cache": "dynamic cache"}, {"cache": "static cache"})
    compiled: tuple[dict[str, Any], ...] = ({"compiled": False}, {"compiled": True})
    found = [Contender(OURS, "generation_triptych", {"precision": p}) for p in ("fp32", "bf16", "int8")]
    for precision in ("fp32", "bf16", "int8"):
        base = {"precision": precision, **attention[0], **cache[0], **compiled[0]}
        stages = (attention, cache, *((compiled,) if with_compiled and precision != "int8" else ()))
        found.append(Contender(HUGGING, "generation_hugging", base, stages))
    for precision in ("float32", "int8_float32"):
        found.append(Contender(CTRANSLATE2, "generation_ctranslate2", {"precision": precision}))
    for precision in ("fp32", "fp16", "q8_0"):
        found.append(Contender(LLAMA_CPP, "generation_llama_cpp", {"precision": precision}))
    for precision in ("fp32", "bf16"):
        found.append(Contender(PRODUCTS, "generation_products", {"precision": precision}))
    return found


def prepare(command: Command) -> dict[str, dict[str, Any]]:
    """The checkpoints by their names, and what CTranslate2 and llama.cpp read of each."""
    gpt2 = command.shared / "checkpoints" / "gpt2"
    if not gpt2.is_dir():
        raise NotHereError(f"generation needs {gpt2}, which is not here")
    llama = command.work / "llama-100m"
    if not command.quick and not (llama / "config.json").exists():
        shutil.rmtree(llama, ignore_errors=True)
        _write(command, "llama", str(llama))
    told = {}
    checkpoints = {"gpt2 of ../shared": gpt2} if command.quick else {_LLAMA: llama, "gpt2 of ../shared": gpt2}
    for name, checkpoint in checkpoints.items():
        converted, gguf = (command.work / f"{checkpoint.name}-{kind}" for kind in ("ctranslate2", "gguf"))
        for kind, folder in {"ctranslate2": converted, "gguf": gguf}.items():
            shutil.rmtree(folder, ignore_errors=True)
            _write(command, kind, str(checkpoint), str(folder))
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        told[name] = {
            "checkpoint": str(checkpoint),
            "converted": str(converted),
            "gguf": str(gguf),
            "positions": 2 * (_PROMPT + _NEW),  # of a slot in llama.cpp; as many as the shared gpt2 has
            "vocab_size": config["vocab_size"],
            "file_bytes": sum(path.stat().st_size for path in Path(checkpoint).glob("*.safetensors")),
        }
    return told


def _write(command: Command, *arguments: str) -> None:
    module = "benchmarks.workers.generation_checkpoint"
    subprocess.run(
        [str(command.python), "-m", module, *arguments], check=True, capture_output=True, cwd=command.root
    )


# The precision of ours that each of theirs is compared with.
_WIDTHS = {"float32": "fp32", "int8_float32": "int8", "fp16": "bf16", "q8_0": "int8"}


def _rows(found: Mapping[str, Sequence[Row]]) -> list[list[str]]:
    """A row for each engine at each setting; all cases of it beside each other."""
    first = next(iter(found.values()))
    exact = _ours(first, "fp32")
    lines = []
    for place, row in enumerate(first):
        of_cases = [of_case[place] for of_case in found.values()]
        precision = _WIDTHS.get(row.options["precision"], row.options["precision"])
        ours = [_ours(of_case, precision) for of_case in found.values()]
        behind = [one.ratio_of(own) for one, own in zip(of_cases, ours, strict=True)]
        failed = next((one.failed for one in of_cases if one.failed), None)
        rates = [spread(one.rate) for one in of_cases]
        lines.append(
            [
                row.contender,
                row.setting,
                *([f"failed: {failed}", *rates[1:]] if failed else rates),
                " ".join("–" if one is None else f"{one.median:.2f}" for one in behind),
                _alike(row, exact),
                number(row.about.get("loading_mb")),
                number(row.about.get("file_mb")),
            ]
        )
    return lines


def _ours(rows: Sequence[Row], precision: str) -> Row | None:
    own = (row for row in rows if row.contender == OURS)
    return next((row for row in own if row.options["precision"] == precision), None)


def _alike(row: Row, exact: Row | None) -> str:
    """Tokens before the first one that differs."""
    made = [next(iter(one.answers.values()), {}).get("row") for one in (row, exact) if one is not None]
    if len(made) < 2 or not all(made):
        return "–"
    same = [one == other for one, other in zip(*made, strict=False)]
    return f"{same.index(False) if False in same else len(same)} of {len(same)}"
