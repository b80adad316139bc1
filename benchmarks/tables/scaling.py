"""Scaling: how our times grow with every size, beside how the counted FLOPs do."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.figures import exponent
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender
from triptych import CostSpec, cost

Point = dict[str, Any]

NUM_LAYERS = 3
# From what is held still, and the sizes each axis goes through; exponents are of the upper half.
BASES: dict[str, Point] = {
    "step": {"length": 24, "d_model": 256, "num_heads": 4, "batch": 64, "vocab": 8000},
    "attention": {"length": 256, "d_model": 512, "num_heads": 8, "batch": 8},
}
AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "step": {
        "length": (16, 32, 64, 128, 256, 512),
        "d_model": (64, 128, 256, 512, 768),
        "num_heads": (1, 2, 4, 8, 16),
        "batch": (8, 16, 32, 64, 128, 256),
        "vocab": (2000, 4000, 8000, 16_000, 32_000, 64_000),
    },
    "attention": {
        "length": (64, 128, 256, 512, 1024, 2048, 4096),
        "d_model": (128, 256, 512, 1024, 2048),
        "num_heads": (1, 2, 4, 8, 16, 32),
        "batch": (1, 2, 4, 8, 16, 32),
    },
}


def measure(command: Command) -> Page:
    """Every axis in every precision; the sizes of an axis take turns."""
    rows: list[list[str]] = []
    record: list[dict[str, Any]] = []
    for precision in command.dtypes:
        race = command.race({"threads": command.threads, "precision": precision})
        with race.start(Contender("scaling", "scaling"), {}) as worker:
            worker.ready(race.prepare_limit_seconds)
            for what, axes in AXES.items():
                for axis, sizes in axes.items():
                    points = [_point(what, axis, size) for size in (sizes[:2] if command.quick else sizes)]
                    request = {"points": points, "seconds": 0.02 if command.quick else 1.0}
                    answer = worker.go(request, 4 * race.answer_limit_seconds)
                    found = _fitted(what, axis, points, answer["seconds"])
                    record.append({"what": what, "axis": axis, "precision": precision, **found})
                    rows.append(_cells(record[-1]))
                    command.tell(" ".join(rows[-1]))
    return Page(
        name="scaling",
        title="Scaling: time ~ size^exponent, forward and backward",
        columns=(
            "of",
            "with",
            "precision",
            "from – to",
            "measured",
            "counted",
            "seconds, smallest – largest",
        ),
        rows=rows,
        notes=(
            "Exponents: least squares through the medians on a log-log scale, over the upper half of sizes; "
            "counted: the same of the FLOPs of all matrix products. A head gets narrower as the number of "
            "heads grows; with d_model, d_ff = 4 d_model grows too.",
        ),
        record={"threads": command.threads, "bases": BASES, "axes": record},
        num_texts=4,
    )


def flops(point: Point) -> int:
    """Of one training step, or of one layer of self-attention, forward and backward; products alone."""
    tokens = point["batch"] * point["length"]
    attention = _attention_flops(point)
    if point["what"] == "attention":
        return tokens * attention
    d_model = point["d_model"]
    feed_forward = 3 * 2 * 2 * d_model * 4 * d_model
    output = 3 * 2 * d_model * point["vocab"]
    # Source and target are equally long: cross-attention costs what self-attention does.
    return tokens * (3 * NUM_LAYERS * attention + 2 * NUM_LAYERS * feed_forward + output)


def _attention_flops(point: Point) -> int:
    """A token's, by `triptych cost`."""
    spec = CostSpec(
        d_model=point["d_model"],
        num_heads=point["num_heads"],
        length=point["length"],
        parameterisations=("factored",),
    )
    return cost(spec).rows[0].training_flops


def _point(what: str, axis: str, size: int) -> Point:
    point: Point = {"what": what, **BASES[what], axis: size}
    if axis == "d_model":
        point["num_heads"] = max(1, size // 64)
    return point


def _fitted(
    what: str, axis: str, points: Sequence[Point], seconds: Sequence[Sequence[float]]
) -> dict[str, Any]:
    sizes = [point[axis] for point in points]
    medians = [statistics.median(samples) for samples in seconds]
    counted = [flops(point) for point in points]
    upper = slice(min(len(sizes) // 2, len(sizes) - 2), None)
    return {
        "base": BASES[what],
        "sizes": sizes,
        "seconds": list(map(list, seconds)),
        "median_seconds": medians,
        "flops": counted,
        "fitted_sizes": sizes[upper],
        "measured_exponent": exponent(sizes[upper], medians[upper]),
        "counted_exponent": exponent(sizes[upper], counted[upper]),
    }


def _cells(found: dict[str, Any]) -> list[str]:
    sizes, medians = found["fitted_sizes"], found["median_seconds"]
    return [
        "training step" if found["what"] == "step" else "attention layer",
        found["axis"],
        found["precision"],
        f"{sizes[0]:,} – {sizes[-1]:,}",
        f"{found['measured_exponent']:.2f}",
        f"{found['counted_exponent']:.2f}",
        f"{medians[0]:.4f} – {medians[-1]:.4f}",
    ]
