"""Page of a study: the answer with its table and its curves, then all tables and charts."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median_high

from triptych.seeing.reports import (
    CurveChart,
    Interval,
    IntervalChart,
    Plot,
    Report,
    ScatterChart,
    write_picture,
    write_report,
)
from triptych.training.studies.comparing import NOISE, Outcome
from triptych.training.studies.compute_budget import in_words
from triptych.training.studies.statistics import estimate
from triptych.training.studies.study import HIGHER_IS_BETTER, OF_COST
from triptych.training.studies.tables import (
    compared,
    conclusions,
    history,
    mean,
    noise_floor,
    tables,
    verdict,
)

_AXES = {
    "step": "updates",
    "tokens": "target tokens",
    "flops": "operations of training (FLOPs)",
    "seconds": "seconds of training",
}
# Largest invisible relative difference of factors between two axes of a chart.
_SAME_FACTOR = 0.01
Lines = tuple[tuple[str, tuple[Interval, ...]], ...]
_COSTS = {
    "parameters": "parameters",
    "cache_bytes": "cache (bytes a token)",
    "tokens_per_second": "training (target tokens a second)",
    "memory": "peak memory of training (bytes)",
}


# Least number of points of a chart of quality against cost: two points are read better in the table.
_LEAST_DOTS = 3


def write_study_page(outcome: Outcome, path: Path) -> None:
    """Write the report of a study as one self-contained HTML file."""
    # The first table is of the deciding metric; the first curve is over the axis of equal budget.
    quality, *others = tables(outcome)
    curves = _loss_curves(outcome)
    report = Report(
        title=outcome.study.name,
        summary=verdict(outcome),
        lead=(quality, *curves[:1]),
        findings=tuple(conclusions(outcome)),
        facts=tuple(_study_facts(outcome)),
        plots=(*_differences(outcome), *curves[1:], *_scatters(outcome)),
        tables=tuple(others),
    )
    write_report(report, path)


def write_study_pictures(outcome: Outcome, folder: Path) -> list[Path]:
    """Write the first pictures of a study's report as SVG files: differences, and the first curve."""
    charts: list[tuple[str, Sequence[Plot]]] = [
        ("differences.svg", _differences(outcome)[:1]),
        ("curves.svg", _loss_curves(outcome)[:1]),
    ]
    paths = list[Path]()
    for name, found in charts:
        paths += [
            folder / name for chart in found if write_picture(chart, folder / name)
        ]
    return paths


def _differences(outcome: Outcome) -> list[IntervalChart]:
    """Return a chart for each metric of quality: each variant, and the noise floor, minus the baseline."""
    # Metrics of cost are in `_scatters`.
    charts = []
    for metric in outcome.study.metrics:
        if metric in OF_COST:
            continue
        found = {
            name: one.difference for name, one in compared(outcome, metric).items()
        }
        if floor := noise_floor(outcome, metric):
            found[NOISE] = floor
        better = "higher" if metric in HIGHER_IS_BETTER else "lower"
        words = metric.replace("_", " ")
        charts.append(
            IntervalChart(
                f"{words}: difference to {outcome.study.baseline_name}",
                f"difference in {words} ({better} is better), 95 % interval",
                tuple(
                    Interval(one.mean, one.low, one.high, name)
                    for name, one in found.items()
                ),
            )
        )
    return charts


def _study_facts(outcome: Outcome) -> list[tuple[str, str]]:
    # Training time counts trained runs only: rewritten runs repeat the figures of their trained run.
    study = outcome.study
    runs = [
        *chain.from_iterable(results.values() for results in outcome.results.values())
    ]
    trained = chain.from_iterable(
        results.values() for results in outcome.trained.values()
    )
    seconds = sum(one.seconds for one in trained)
    found = [
        ("base", study.base),
        ("baseline", study.baseline_name),
        (
            "runs",
            f"{len(runs)}"
            + (f", {len(outcome.failed)} failed" if outcome.failed else ""),
        ),
        ("training", f"{seconds / 60:.1f} min in all"),
    ]
    if study.budget.hold != "none":
        solved = outcome.variants[study.baseline_name].solved
        held = (
            study.budget.hold
            if solved is None
            else in_words(study.budget.hold, solved.amount)
        )
        found.append(("held equal", held))
    if outcome.sweep_seconds:
        found.append(
            ("choosing learning rates", f"{outcome.sweep_seconds / 60:.1f} min")
        )
    return found


def _loss_curves(outcome: Outcome) -> list[CurveChart]:
    """Return charts of validation loss against `_AXES`: a line per trained variant with its interval.

    The first chart is over the axis of equal budget, or over updates.
    """
    # A chart without points is left out: operations of a checkpoint's model are unknown.
    histories = {
        name: [
            history(
                outcome.run_folder(name, seed),
                outcome.variants[
                    outcome.study.baseline_name if name == NOISE else name
                ].flops,
            )
            for seed in results
        ]
        for name, results in outcome.trained.items()
    }
    charts = []
    drawn = list[Lines]()
    hold = outcome.study.budget.hold
    first = hold if hold in _AXES else "step"
    for key in (first, *(key for key in _AXES if key != first)):
        title = _AXES[key]
        lines = tuple((name, _line(each, key)) for name, each in histories.items())
        # Curves that differ from drawn curves in the unit of the axis only would be the same picture.
        if any(points for _, points in lines) and not any(
            _is_rescaled(lines, other) for other in drawn
        ):
            drawn.append(lines)
            named = f"Validation loss against {title}"
            charts.append(
                CurveChart(
                    named, title, "validation loss (nats a token)", lines, is_log=True
                )
            )
    return charts


def _is_rescaled(lines: Lines, other: Lines) -> bool:
    """Return True if the points of two charts differ by one factor of their x values."""
    if [len(points) for _, points in lines] != [len(points) for _, points in other]:
        return False
    points = chain.from_iterable(points for _, points in lines)
    before = chain.from_iterable(points for _, points in other)
    pairs = zip(points, before, strict=True)
    factors = [one.x / drawn.x for one, drawn in pairs if drawn.x]
    return not factors or max(factors) - min(factors) <= _SAME_FACTOR * max(factors)


def _line(histories: list[list[dict[str, float]]], key: str) -> tuple[Interval, ...]:
    """Return means over seeds of validations at the same update, at the mean of their x values."""
    by_step: dict[float, list[dict[str, float]]] = {}
    for run in histories:
        for one in run:
            by_step.setdefault(one["step"], []).append(one)
    points = []
    for _, each in sorted(by_step.items()):
        if any(key not in one for one in each):
            continue
        found = estimate([one["loss"] for one in each])
        x = sum(one[key] for one in each) / len(each)
        points.append(Interval(found.mean, found.low, found.high, x=x))
    return tuple(points)


def _scatters(outcome: Outcome) -> list[ScatterChart]:
    """Return charts of the deciding metric against each cost that differs between variants."""
    # The cost of a variant is the median over its seeds.
    metric = outcome.study.metrics[0]
    quality = outcome.values(metric)
    assert metric not in OF_COST
    charts = []
    for cost, title in _COSTS.items():
        amounts = {
            name: median_high(values.values())
            for name, values in outcome.values(cost).items()
        }
        dots = []
        for name in outcome.variants:
            if name in quality and name in amounts:
                found = mean(quality[name], metric)
                dots.append(
                    Interval(found.mean, found.low, found.high, name, amounts[name])
                )
        if len({dot.x for dot in dots}) >= _LEAST_DOTS:
            words = metric.replace("_", " ")
            charts.append(
                ScatterChart(f"{words} against {title}", title, words, tuple(dots))
            )
    return charts
