"""Training: target tokens a second of whole steps, all contenders over the same batches."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.page import Page, number, spread
from benchmarks.harness.race import ALLOCATORS, Contender, Entry, Row, best_of, finalists
from benchmarks.harness.workload import BATCH_TOKENS, TrainingText, prepare_training
from triptych.core.models.device import has_fast_bf16

OURS = "triptych"
NARROW = " (bf16 weights)"


def _peer(name: str, worker: str, *axes: tuple[Mapping[str, Any], ...]) -> Contender:
    """A peer with float32 weights, and how its best setting is looked for.

    Precision and allocator depend on each other, so all pairs are tried; the axes of its own before
    that and again after it, since the best of them may depend on the precision.
    """
    precisions = ("fp32", "fp32 with bf16 products", "bf16 autocast")
    pairs: tuple[Mapping[str, Any], ...] = tuple(
        {"precision": p, "allocator": a} for p in precisions for a in ALLOCATORS
    )
    stages: tuple[tuple[Mapping[str, Any], ...], ...] = (
        *(*axes, pairs, *axes),
        ({"optimizer": "fused"}, {"optimizer": "foreach"}),
        ({"compiled": False}, {"compiled": True}),
    )
    base = {option: value for stage in (pairs, *stages) for option, value in stage[0].items()}
    return Contender(name, worker, base, stages)


def _uncompiled(contender: Contender) -> Contender:
    return replace(
        contender, stages=tuple(s for s in contender.stages if all("compiled" not in c for c in s))
    )


def _where_fast(contender: Contender) -> Contender:
    """Without bfloat16 on CPUs that have no products in it: a round would take minutes."""
    if has_fast_bf16("cpu"):
        return contender
    stages = (tuple(c for c in stage if "bf16" not in c.get("precision", "")) for stage in contender.stages)
    return replace(contender, stages=tuple(stages))


def _further(contender: Contender, tried: Sequence[Row]) -> list[Entry]:
    """Beside a peer's best setting: its best in plain float32, and its best with bfloat16 weights.

    The latter cost quality (see the curves); they are set as the best with float32 weights are.
    """
    best = best_of(tried, contender.name)
    if best is None or contender.name == OURS or not has_fast_bf16("cpu"):
        return []
    found = []
    plain = [row for row in tried if row.options.get("precision") == "fp32"]
    if best.options["precision"] != "fp32" and (in_float32 := best_of(plain, contender.name)):
        found.append(Entry(contender, in_float32.options, in_float32.peak_rss_mb or 0.0))
    narrow = replace(contender, name=contender.name + NARROW)
    return [*found, Entry(narrow, {**best.options, "precision": "bf16 weights"}, best.peak_rss_mb or 0.0)]


_KERNEL = ({"kernel": "torch's choice of kernel"}, {"kernel": "math kernel"})
CONTENDERS = (
    # With whatever the command itself sets up: no allocator is chosen for it here.
    Contender(
        OURS, "training_triptych", stages=(({"precision": "fp32"}, {"precision": "bf16"}),), all_go_on=True
    ),
    _peer("Hugging Face MarianMT", "training_marian", ({"attention": "sdpa"}, {"attention": "eager"})),
    _peer("torch.nn.Transformer", "training_torch", _KERNEL),
    _peer(
        "x-transformers", "training_x_transformers", ({"attention": "flash"}, {"attention": "written out"})
    ),
    _peer("JoeyNMT", "training_joeynmt", ({"loss": "torch's loss"}, {"loss": "own loss"})),
    _peer("eole", "training_eole", _KERNEL),
)


def measure(command: Command) -> Page:
    """Screen, race, and tell."""
    batches, screened = (4, 1) if command.quick else (24, 4)
    text = prepare_training(command.shared, command.work, batches)
    race = command.race({"text": text.path, "threads": command.threads})
    tried: list[Row] = []
    entries: list[Entry] = []
    for contender in command.chosen(CONTENDERS):
        contender = _where_fast(contender if command.compiled else _uncompiled(contender))
        found = race.screen(contender, {"batches": screened})
        tried += found
        entries += [*finalists(contender, found), *_further(contender, found)]
    ours = [entry for entry in entries if entry.contender.name == OURS]
    theirs = [entry for entry in entries if entry.contender.name != OURS]
    raced = race.final(ours, theirs, {"steps": {"batches": batches}}, command.rounds)
    return _page(raced["steps"], tried, text, command)


def _page(rows: list[Row], tried: list[Row], text: TrainingText, command: Command) -> Page:
    ours = best_of(rows, OURS)
    compiled = "" if command.compiled else ", none compiled"
    shown = sorted(rows, key=lambda row: -(row.rate.median if row.rate else 0.0))
    record: dict[str, Any] = {
        "workload": asdict(text) | {"path": None, "batch_tokens": BATCH_TOKENS, "threads": command.threads},
        "rows": [row.record(ours) for row in rows],
        "screening": [row.record() for row in tried],
    }
    return Page(
        name="training",
        title=f"Training, target tokens a second ({text.text}; {command.threads} threads)",
        columns=("contender", "setting", "tokens/s (range)", "ours / this (range)", "peak MB", "parameters"),
        rows=[_cells(row, ours) for row in shown],
        notes=(
            f"{text.num_train} batches of {text.tokens_per_batch:,.0f} target tokens on average "
            f"({text.padding:.1%} padding), {command.rounds} rounds in turns; median and range. ",
            f"Ratios are of the same round, to {ours.setting if ours else 'ours, which failed'}. "
            f"Settings were screened first ({len(tried)} tried{compiled}); "
            "their figures are in the JSON.",
        ),
        record=record,
    )


def _cells(row: Row, ours: Row | None) -> tuple[str, ...]:
    if row.failed:
        return (row.contender, row.setting, f"failed: {row.failed}", "–", "–", "–")
    return (
        row.contender,
        row.setting,
        spread(row.rate),
        spread(row.ratio_of(ours), 2),
        number(row.peak_rss_mb),
        number(row.about.get("parameters")),
    )
