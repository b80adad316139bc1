"""A GPU: attention, training of the paper's base model and decoding in bfloat16, beside its products."""

import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender, Options

OURS = "triptych"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
_TOKENS, _NUM_HEADS, _WIDTH = 16_384, 16, 128
_PRODUCT = 8192
_BATCH, _LENGTH = 768, 32
_NUM_LINES = 1000
_CASES = {"greedy": 1, "beam 4": 4}

Ask = Callable[[Options], dict[str, Any]]


def measure(command: Command) -> Page:
    """On the first GPU; a try (`--quick`) without one runs on the processor, with figures worth nothing."""
    here = shutil.which("nvidia-smi") is not None
    if not here and not command.quick:
        raise NotHereError("the gpu table needs a GPU and its driver")
    race = command.race({"device": "cuda" if here else "cpu"})
    with race.start(Contender("gpu", "gpu"), {}) as worker:
        about = worker.ready(race.prepare_limit_seconds)

        def ask(request: Options) -> dict[str, Any]:
            seconds = 0.02 if command.quick else 1.0
            return dict(worker.go({"seconds": seconds, **request}, 4 * race.answer_limit_seconds))

        size = 256 if command.quick else _PRODUCT
        product = ask({"what": "product", "size": size})
        ceiling = 2 * size**3 / statistics.median(product["seconds"])
        found = []
        for cell in chain(_attention(ask, command), _training(ask, command), _decoding(ask, command)):
            found.append(cell)
            command.tell(" | ".join(_row(cell, ceiling)))
    return Page(
        name="gpu",
        title=f"{about['device']}, bfloat16",
        columns=("what", "ours", "of the ceiling", "ours / the peer", "peer"),
        rows=[_row(cell, ceiling) for cell in found],
        notes=(
            f"Ceiling: {ceiling / 1e12:,.1f} TFLOP/s, a product of {size:,} × {size:,} × {size:,}.",
            "Attention: 4·b·h·L²·d FLOPs forward, half of that if causal, 3.5 times as many with backward. "
            "Training: FLOPs as torch counts them in a step. Medians of the rounds; the JSON has all times.",
        ),
        record={"about": about, "product": product, "ceiling_flops_per_second": ceiling, "cells": found},
    )


def _attention(ask: Ask, command: Command) -> Iterator[dict[str, Any]]:
    tokens = 512 if command.quick else _TOKENS
    for length in (128,) if command.quick else LENGTHS:
        for causal in (False, True):
            sizes = {
                "batch": tokens // length,
                "length": length,
                "num_heads": _NUM_HEADS,
                "width": _WIDTH,
                "causal": causal,
            }
            answer = ask({"what": "attention", **sizes})
            flops = 4 * tokens * length * _NUM_HEADS * _WIDTH / (2 if causal else 1)
            for name, work in {"forward": flops, "forward + backward": 3.5 * flops}.items():
                kind = "causal" if causal else "full"
                yield _cell(f"attention, {kind}, {length:,}, {name}", answer["seconds"][name], work, work) | {
                    "sizes": sizes,
                    "unit": "FLOP/s",
                    "kernel": answer["kernel"],
                    "largest_difference": answer["largest_difference"],
                }


def _training(ask: Ask, command: Command) -> Iterator[dict[str, Any]]:
    for compiled in (False,) if command.quick else (False, True):
        sizes: dict[str, Any] = {"preset": "base", "batch": _BATCH, "length": _LENGTH}
        if command.quick:
            sizes = {"preset": "tiny", "batch": 2, "length": 8}
        answer = ask({"what": "training", "compile": compiled, **sizes})
        name = f"training, {sizes['preset']}{', compiled' if compiled else ''}"
        yield _cell(name, answer["seconds"], answer["tokens"], answer["flops"]) | {
            "sizes": sizes,
            "unit": "target tokens/s",
        }


def _decoding(ask: Ask, command: Command) -> Iterator[dict[str, Any]]:
    checkpoint = command.shared / "checkpoints" / "marian-multi30k"
    source = command.shared / "data" / "multi30k" / "test_2016_flickr.en"
    if not checkpoint.exists() or not source.exists():
        command.tell("decoding left out: it needs marian-multi30k and test_2016_flickr")
        return
    for name, beam in _CASES.items():
        sizes = {"beam": beam, "batch": 64, "num_lines": 8 if command.quick else _NUM_LINES}
        paths = {"checkpoint": str(checkpoint), "source": str(source)}
        answer = ask({"what": "decoding", **paths, **sizes, "rounds": command.rounds})
        seconds = {of: [1.0 / r for r in _rates(rounds)] for of, rounds in answer["rounds"].items()}
        yield _cell(f"decoding, {name}", seconds, 1.0, None) | {
            "sizes": sizes,
            "unit": "output tokens/s",
            "rounds": answer["rounds"],
        }


def _rates(rounds: Sequence[dict[str, float]]) -> list[float]:
    return [of_round["tokens"] / of_round["seconds"] for of_round in rounds]


def _cell(what: str, seconds: dict[str, list[float]], work: float, flops: float | None) -> dict[str, Any]:
    """How fast we do the work, at how many FLOPs a second, and how far ahead of the peer."""
    (peer,) = (name for name in seconds if name != OURS)
    median = statistics.median(seconds[OURS])
    return {
        "what": what,
        "seconds": seconds,
        "rate": work / median,
        "flops_per_second": None if flops is None else flops / median,
        "peer": peer,
        "ratio": statistics.median(t / o for t, o in zip(seconds[peer], seconds[OURS], strict=True)),
    }


def _row(cell: dict[str, Any], ceiling: float) -> tuple[str, ...]:
    flops = cell["flops_per_second"]
    rate = (
        f"{flops / 1e12:,.1f} TFLOP/s" if cell["unit"] == "FLOP/s" else f"{cell['rate']:,.0f} {cell['unit']}"
    )
    share = "–" if flops is None else f"{flops / ceiling:.0%}"
    return cell["what"], rate, share, f"{cell['ratio']:.2f}", cell["peer"]
