"""Attention: one layer of ours against everybody's, over lengths, kinds and precisions."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender, Race
from benchmarks.harness.turns import WorkerError

D_MODEL, NUM_HEADS = 512, 8
TOKENS = 8192
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK = (16, 128)
KINDS = ("self", "causal", "cross", "padded")
DTYPES = ("fp32", "bf16")
OURS = "triptych"
EAGER = "Hugging Face eager"
PEERS = (
    "torch.nn.MultiheadAttention",
    "Hugging Face sdpa",
    EAGER,
    "x-transformers flash",
)
# Written out, the weights of 8 heads take gigabytes from here on.
_LONGEST_EAGER = 2048
_SHORT = {
    "torch.nn.MultiheadAttention": "torch",
    "Hugging Face sdpa": "HF sdpa",
    "Hugging Face eager": "HF eager",
    "x-transformers flash": "x-t",
}
_CONTENDER = Contender("attention", "attention")
# All share a process, and nearly all are faster for it: memory that is freed is kept for the next call.
_OPTIONS = {"allocator": "malloc: no mmap"}


def measure(command: Command) -> Page:
    """Times in one process, memory in one each."""
    race = command.race({"d_model": D_MODEL, "num_heads": NUM_HEADS, "threads": command.threads})
    cells = _times(command, race)
    memory = _memory(command, race, max(command.lengths)) if "self" in command.kinds else []
    rows = []
    for kind in command.kinds:
        for dtype in command.dtypes:
            for name in ("forward", "forward + backward"):
                of_row = [c for c in cells if (c["kind"], c["dtype"], c["pass"]) == (kind, dtype, name)]
                by_length = {c["length"]: c for c in of_row}
                rows.append([f"{kind}, {dtype}", name, *(_cell(by_length[n]) for n in command.lengths)])
    return Page(
        name="attention" if set(command.kinds) == set(KINDS) else f"attention-{'-'.join(command.kinds)}",
        title=f"Attention, time of the best peer / ours (d_model {D_MODEL}, {NUM_HEADS} heads)",
        columns=("kind", "pass", *map(str, command.lengths)),
        rows=rows,
        notes=(
            f"About {TOKENS:,} tokens a call; at least 5 rounds in turns within a process; the median of the "
            "ratios within rounds, and who the best peer is. Above 1 ours is faster. The JSON has all times. "
            f"{_OPTIONS['allocator']}; memory below with malloc as it is.",
            *_failures(cells),
            *(_memory_note(found) for found in memory),
        ),
        record={
            "d_model": D_MODEL,
            "num_heads": NUM_HEADS,
            "threads": command.threads,
            **_OPTIONS,
            "cells": cells,
            "memory": memory,
        },
    )


def _times(command: Command, race: Race) -> list[dict[str, Any]]:
    """Every cell: its place, the seconds of everybody, and who was best."""
    cells: list[dict[str, Any]] = []
    with race.start(_CONTENDER, _OPTIONS) as worker:
        worker.ready(race.prepare_limit_seconds)
        for kind in command.kinds:
            for dtype in command.dtypes:
                for length in command.lengths:
                    peers = [name for name in PEERS if name != EAGER or length <= _LONGEST_EAGER]
                    place = {"kind": kind, "dtype": dtype, "length": length}
                    place["batch"] = _batch(command, length)
                    request = {**place, "peers": peers, "seconds": 0.02 if command.quick else 0.6}
                    found = worker.go(request, race.answer_limit_seconds)
                    cells += [_judged(place, name, found) for name in ("forward", "forward + backward")]
                command.tell(f"{kind}, {dtype}: {len(command.lengths)} lengths")
    return cells


def _failures(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Each reason once, with the places."""
    places: dict[tuple[str, str], list[str]] = {}
    for cell in cells[::2]:  # both passes of a place say the same
        for name, reason in cell["failed"].items():
            where = f"{cell['kind']} {cell['dtype']} {cell['length']}"
            places.setdefault((name, reason), []).append(where)
    return [f"failed: {name}, {', '.join(where)}: {reason}" for (name, reason), where in places.items()]


def _batch(command: Command, length: int) -> int:
    return max(1, (TOKENS // 16 if command.quick else TOKENS) // length)


def _judged(place: dict[str, Any], name: str, found: dict[str, Any]) -> dict[str, Any]:
    """One pass at one place: everybody's seconds, who was best, and how far ahead of it we are."""
    seconds: dict[str, list[float]] = found["seconds"][name]
    medians = {of: statistics.median(samples) for of, samples in seconds.items()}
    cell = {
        **place,
        "pass": name,
        "failed": found["left_out"],
        "largest_differences_of_outputs": found["largest_differences"],
        "seconds": seconds,
        "median_seconds": medians,
    }
    peers = [of for of in seconds if of != OURS]
    if not peers:
        return cell
    best = min(peers, key=lambda of: medians[of])
    ratios = [theirs / ours for theirs, ours in zip(seconds[best], seconds[OURS], strict=True)]
    return {
        **cell,
        "best_peer": best,
        "best_peer_by_ours": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4, method="inclusive"),
    }


def _cell(cell: dict[str, Any]) -> str:
    if "best_peer" not in cell:
        return "all failed"
    return f"{cell['best_peer_by_ours']:.2f} {_SHORT[cell['best_peer']]}"


def _memory(command: Command, race: Race, length: int) -> list[dict[str, Any]]:
    """How far memory rises in a process of its own, for each contender and precision, at one length."""
    found = []
    for dtype in command.dtypes:
        place = {"kind": "self", "dtype": dtype, "length": length, "batch": _batch(command, length)}
        for name in (OURS, *PEERS):
            if name == EAGER and length > _LONGEST_EAGER:
                continue
            with race.start(_CONTENDER, {}) as worker:
                try:
                    worker.ready(race.prepare_limit_seconds)
                    answer = worker.go({**place, "memory_of": name}, race.answer_limit_seconds)
                    found.append({**place, "contender": name, **answer})
                except WorkerError as failure:
                    found.append({**place, "contender": name, "failed": str(failure)})
    return found


def _memory_note(found: dict[str, Any]) -> str:
    of = f"memory at length {found['length']}, {found['dtype']}, {found['contender']}"
    if "failed" in found:
        return f"{of}: failed: {found['failed']}"
    return f"{of}: " + ", ".join(f"{name} {mb:,.0f} MB" for name, mb in found["memory_mb"].items())
