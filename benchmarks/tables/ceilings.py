"""Ceilings: what this machine's products and memory give at best, with one thread and with all."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender

# Rows × inner × columns: of a training step of the table (3,500 tokens), of decoding 32 sentences with a
# beam of 4, and one large square.
PRODUCTS = {
    "projection, training": (3500, 256, 256),
    "feed-forward in, training": (3500, 256, 1024),
    "feed-forward out, training": (3500, 1024, 256),
    "output, 512 tokens": (512, 256, 8000),
    "output, whole batch": (3500, 256, 8000),
    "projection, decoding": (128, 256, 256),
    "output, decoding": (128, 256, 8000),
    "large square": (2048, 2048, 2048),
}


def measure(command: Command) -> Page:
    """Both numbers of threads take turns, product by product."""
    race = command.race({})
    counts = sorted({1, command.threads})
    seconds = 0.05 if command.quick else 1.0
    found: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    workers = {n: race.start(Contender("ceilings", "ceilings"), {"threads": n}) for n in counts}
    try:
        for worker in workers.values():
            worker.ready(race.prepare_limit_seconds)
        for name, (m, k, n) in PRODUCTS.items():
            request = {"m": m, "k": k, "n": n, "seconds": seconds}
            for threads, worker in workers.items():
                answer = worker.go(request, race.answer_limit_seconds)
                for dtype, samples in answer["seconds"].items():
                    found.append(
                        {"product": name, "m": m, "k": k, "n": n, "threads": threads, "dtype": dtype}
                        | _rates(samples, 2 * m * k * n)
                    )
        for threads, worker in workers.items():
            answer = worker.go({"seconds": seconds}, race.answer_limit_seconds)
            for what, samples in answer["seconds"].items():
                memory.append({"what": what, "threads": threads} | _rates(samples, answer["bytes"][what]))
    finally:
        for worker in workers.values():
            worker.close()
    columns = [(threads, dtype) for threads in counts for dtype in ("fp32", "bf16")]
    rows = []
    for name, sizes in PRODUCTS.items():
        of_product = {(f["threads"], f["dtype"]): f for f in found if f["product"] == name}
        rows.append([name, "×".join(map(str, sizes)), *(_cell(of_product[place]) for place in columns)])
    return Page(
        name="ceilings",
        title="Ceilings, GFLOP/s of single products",
        columns=("product", "rows×inner×columns", *(f"{d}, {t} thread{'s'[: t > 1]}" for t, d in columns)),
        rows=rows,
        notes=(
            "Median of the rounds, quartiles in brackets.",
            *(f"memory, {m['what']}, {m['threads']} threads: {_cell(m)} GB/s" for m in memory),
        ),
        record={"products": found, "memory": memory},
    )


def _rates(samples: Sequence[float], work: int) -> dict[str, Any]:
    rates = [work / seconds / 1e9 for seconds in samples]
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    return {"giga_per_second": middle, "low": low, "high": high, "seconds": list(samples)}


def _cell(found: dict[str, Any]) -> str:
    return f"{found['giga_per_second']:,.0f} ({found['low']:,.0f}–{found['high']:,.0f})"
