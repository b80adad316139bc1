"""Parameterisations: what folding saves, and what a smaller cache saves, measured beside counted."""

from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender

D_MODEL, NUM_HEADS = 512, 8
_FOLDED = (("fp32", 16), ("fp32", 128), ("fp32", 512), ("bf16", 128))
_CACHED = ("factored", "key_value", "grouped", "latent", "shared")
_CONTEXTS = (512, 2048, 8192)
_BATCHES = (32, 1)
_TOKENS = 4096
# Both passes of a decoding table's specs that are not looked at are kept short.
_SHORT = 16


def measure(command: Command) -> Page:
    """Every spec in turn; within one, the parameterisations take turns round by round."""
    race = command.race({"threads": command.threads})
    seconds = 0.05 if command.quick else 1.0
    rows: list[list[str]] = []
    reports: list[dict[str, Any]] = []
    with race.start(Contender("parameterisations", "parameterisations"), {}) as worker:
        worker.ready(race.prepare_limit_seconds)

        def report(**spec: Any) -> dict[str, Any]:
            spec |= {"d_model": D_MODEL, "num_heads": NUM_HEADS}
            found = worker.go({"spec": spec, "seconds": seconds}, race.answer_limit_seconds)
            reports.append({"spec": spec, **found})
            command.tell(", ".join(f"{name} {value}" for name, value in spec.items()))
            return found

        folded = worker.go({"fold": D_MODEL, "heads": NUM_HEADS}, race.answer_limit_seconds)["folded"]
        for dtype, length in _FOLDED[:1] if command.quick else _FOLDED:
            batch = max(1, _TOKENS // length)
            found = report(
                dtype=dtype, length=length, batch=batch, context=512, parameterisations=["stacked", folded]
            )
            for what in ("training", "decode"):
                where = (
                    f"length {length}, batch {batch}" if what == "training" else f"context 512, batch {batch}"
                )
                rows.append(
                    [f"folded ({folded})", "stacked", what, f"{dtype}, {where}", *_gain(found, what, 0, 1)]
                )
        for batch in _BATCHES:
            for context in _CONTEXTS[:1] if command.quick else _CONTEXTS:
                found = report(
                    dtype="fp32", length=_SHORT, batch=batch, context=context, parameterisations=[*_CACHED]
                )
                for place, name in enumerate(_CACHED[1:], start=1):
                    where = f"fp32, context {context}, batch {batch}"
                    rows.append([name, "factored", "decode", where, *_gain(found, "decode", 0, place)])
    return Page(
        name="parameterisations",
        title=f"Parameterisations, times faster (d_model {D_MODEL}, {NUM_HEADS} heads, the layer alone)",
        columns=("this", "than", "pass", "where", "measured (quartiles)", "counted", "bytes", "FLOPs"),
        rows=rows,
        notes=(
            "Measured: median seconds of the other by this one's; the quartiles are of this one's seconds.",
            "Counted: the same of the roofline's seconds, the larger of FLOPs and bytes at this machine's "
            "rates. Bytes, FLOPs: of what counting says is moved and computed.",
        ),
        record={"threads": command.threads, "folded": folded, "reports": reports},
        num_texts=4,
    )


def _gain(found: dict[str, Any], what: str, base: int, place: int) -> list[str]:
    """How many times less the row at `place` needs than that at `base`: measured, counted, bytes, FLOPs."""
    times, costs = found["times"]["rows"], found["cost"]["rows"]
    this, other = times[place][what], times[base][what]
    measured = [other["seconds"] / this[key] for key in ("seconds", "high_seconds", "low_seconds")]
    work = {"training": ("prefill_bytes", "training_flops"), "decode": ("decode_bytes", "decode_flops")}
    counted = [other["predicted_seconds"] / this["predicted_seconds"]]
    counted += [costs[base][key] / costs[place][key] for key in work[what]]
    return [
        f"{measured[0]:.2f} ({measured[1]:.2f}–{measured[2]:.2f})",
        *(f"{value:.2f}" for value in counted),
    ]
