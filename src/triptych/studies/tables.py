"""What a study shows, as tables, sentences and rows."""

import csv
import io
import math
from collections.abc import Sequence
from statistics import median_high
from typing import Any

from triptych.reports import Table
from triptych.studies.comparing import NOISE, Outcome
from triptych.studies.job import HEAD_MEASURES
from triptych.studies.statistics import CONFIDENCE, Comparison, Estimate, compare, estimate
from triptych.studies.study import HIGHER_IS_BETTER, OF_COST

_DIGITS = {
    "loss": 4,
    "bits_per_byte": 4,
    "bleu": 2,
    "chrf": 2,
    "exact_match": 3,
    "tokens_per_second": 0,
    "memory": 0,
    "parameters": 0,
    "cache_bytes": 0,
}


def compared(outcome: Outcome, metric: str) -> dict[str, Comparison]:
    """Each variant against the baseline, by one metric; the baseline again is not among them."""
    values = outcome.values(metric)
    baseline = values.pop(outcome.study.baseline_name, {})
    values.pop(NOISE, None)
    return compare(values, baseline)


def noise_floor(outcome: Outcome, metric: str) -> Estimate | None:
    """The baseline again minus the baseline, on the same text; None if it was not trained again."""
    values = outcome.values(metric)
    pairs = compare({NOISE: values.get(NOISE, {})}, values.get(outcome.study.baseline_name, {}))
    return pairs[NOISE].difference if NOISE in pairs else None


def quality_table(outcome: Outcome, metric: str) -> Table:
    """The means of a metric, and each variant's difference to the baseline."""
    baseline, differences = outcome.study.baseline_name, compared(outcome, metric)
    rows = []
    for name, values in outcome.values(metric).items():
        mean = estimate(list(values.values()))
        cells = (f"{name} *" if name == baseline else name, str(mean.count), number(mean.mean, metric))
        against: tuple[str, ...] = ("",) * 5
        if name in differences:
            against = _difference(differences[name], metric)
        elif name == NOISE and (floor := noise_floor(outcome, metric)):
            against = _signed(floor.mean, metric), _interval(floor, metric), "", "", ""
        rows.append((*cells, _interval(mean, metric), *against))
    better = "higher" if metric in HIGHER_IS_BETTER else "lower"
    return Table(
        f"{title(metric)} ({better} is better)",
        (
            "variant",
            "seeds",
            "mean",
            f"{CONFIDENCE * 100:g} % interval",
            "difference",
            f"its {CONFIDENCE * 100:g} % interval",
            "p (Holm)",
            "effect",
            "seeds needed",
        ),
        tuple(rows),
        "* the baseline. Differences are paired by seed."
        + (f" {NOISE}: the noise floor." if NOISE in outcome.results else ""),
        numeric=(1, 2, 3, 4, 5, 6, 7, 8),
    )


def cost_table(outcome: Outcome) -> Table:
    """Medians of what the variants cost, their budget and their learning rate."""
    rows = []
    metrics = [metric for metric in _DIGITS if metric in OF_COST]
    for name, variant in outcome.variants.items():
        cells = []
        for metric in metrics:
            values = outcome.values(metric).get(name)
            cells.append(number(median_high(values.values()), metric) if values else "")
        held = "" if variant.solved is None else variant.solved.describe(outcome.study.budget.hold)
        rate = variant.recipe.training.learning_rate
        rows.append((name, *cells, "" if rate is None else f"{rate:g}", held))
    columns = ("variant", *(title(metric) for metric in metrics), "learning rate", "budget")
    rewritten = [f"{name} from {outcome.study.parent_of(name)}" for name in outcome.study.rewritten]
    caption = f"Rewritten: {', '.join(rewritten)}; rate, memory and learning rate are those of training."
    numeric = tuple(range(1, len(metrics) + 2))
    return Table("What it costs", columns, tuple(rows), caption if rewritten else "", numeric=numeric)


def heads_table(outcome: Outcome) -> Table:
    """What the heads became: means over heads and seeds."""
    rows = []
    for name, results in outcome.results.items():
        cells = []
        for measure in HEAD_MEASURES:
            values = [one.heads[measure] for one in results.values() if measure in one.heads]
            cells.append(f"{sum(values) / len(values):.3g}" if values else "")
        rows.append((name, *cells))
    return Table(
        "What the heads became",
        ("variant", *HEAD_MEASURES),
        tuple(rows),
        "Means over heads and seeds of measures of triptych inspect; times_chance: 1 is what chance gives.",
        numeric=tuple(range(1, len(HEAD_MEASURES) + 1)),
    )


def conclusions(outcome: Outcome) -> list[str]:
    """A sentence for each variant, by the metric that decides."""
    metric = outcome.study.metrics[0]
    found = []
    for name, one in compared(outcome, metric).items():
        difference = f"{_signed(one.difference.mean, metric)} [{_interval(one.difference, metric)}]"
        if not one.is_seen:
            needed = one.seeds_needed
            more = f"; about {needed} seeds would show a difference of this size" if needed else ""
            found.append(f"{name}: no difference seen ({difference}, p = {one.corrected:.2g}{more})")
            continue
        better = (one.difference.mean > 0) == (metric in HIGHER_IS_BETTER)
        found.append(
            f"{name}: {'better' if better else 'worse'} by {difference} in {title(metric)}, "
            f"p = {one.corrected:.2g} after correction"
        )
    return found


def runs_csv(outcome: Outcome) -> str:
    """Every run in a row, all its figures."""
    metrics = list(_DIGITS)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "seed", *metrics, "seconds", "steps", "tokens", *HEAD_MEASURES])
    for name, results in outcome.results.items():
        for seed, one in sorted(results.items()):
            figures = [one.figures.get(metric, "") for metric in metrics]
            heads = [one.heads.get(measure, "") for measure in HEAD_MEASURES]
            writer.writerow([name, seed, *figures, one.seconds, one.steps, one.tokens, *heads])
    return text.getvalue()


def markdown(outcome: Outcome) -> str:
    """The whole report as Markdown."""
    study = outcome.study
    parts = [f"# {study.name}", "", *(f"- {line}" for line in conclusions(outcome)), ""]
    for table in tables(outcome):
        parts += [f"## {table.title}", "", *_markdown_rows(table), "", table.caption, ""]
    if outcome.failed:
        parts += ["## Failed", "", *(f"- {name}: {what}" for name, what in outcome.failed.items()), ""]
    return "\n".join(parts).rstrip() + "\n"


def tables(outcome: Outcome) -> list[Table]:
    """All tables of a report."""
    found = [quality_table(outcome, metric) for metric in outcome.study.metrics if metric not in OF_COST]
    return [*found, cost_table(outcome), *([heads_table(outcome)] if outcome.results else [])]


def figures(outcome: Outcome) -> dict[str, Any]:
    """Everything, for machines; figures that are not defined are null."""
    metrics = [metric for metric in outcome.study.metrics if metric not in OF_COST]
    return {
        "study": outcome.study.name,
        "baseline": outcome.study.baseline_name,
        "metrics": {
            metric: {
                "means": {
                    name: _estimate(estimate(list(values.values())))
                    for name, values in outcome.values(metric).items()
                },
                "differences": {
                    name: {
                        **_estimate(one.difference),
                        "p": _finite(one.p_value),
                        "p_holm": _finite(one.corrected),
                        "effect": _finite(one.effect),
                        "seeds_needed": one.seeds_needed,
                        "is_seen": one.is_seen,
                    }
                    for name, one in compared(outcome, metric).items()
                },
                "noise": _estimate(floor) if (floor := noise_floor(outcome, metric)) else None,
            }
            for metric in metrics
        },
        "runs": [
            {"variant": name, "seed": seed, **one.figures, "seconds": one.seconds}
            for name, results in outcome.results.items()
            for seed, one in sorted(results.items())
        ],
        "failed": outcome.failed,
        "sweep_seconds": round(outcome.sweep_seconds, 1),
        "conclusions": conclusions(outcome),
    }


def _estimate(found: Estimate) -> dict[str, Any]:
    return {"mean": found.mean, "low": _finite(found.low), "high": _finite(found.high), "seeds": found.count}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _markdown_rows(table: Table) -> Sequence[str]:
    rule = ["---:" if i in table.numeric else "---" for i in range(len(table.columns))]
    rows = [table.columns, rule, *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _difference(found: Comparison, metric: str) -> tuple[str, ...]:
    p = "" if math.isnan(found.corrected) else f"{found.corrected:.2g}"
    effect = "" if math.isnan(found.effect) else f"{found.effect:.2f}"
    needed = found.seeds_needed
    return (
        _signed(found.difference.mean, metric),
        _interval(found.difference, metric),
        p,
        effect,
        "" if needed is None else str(needed),
    )


def title(metric: str) -> str:
    """A metric's name for people."""
    return metric.replace("_", " ")


def number(value: float, metric: str) -> str:
    """A figure with as many digits as its metric deserves."""
    return f"{value:,.{_DIGITS[metric]}f}"


def _signed(value: float, metric: str) -> str:
    return f"{value:+,.{_DIGITS[metric]}f}"


def _interval(found: Estimate, metric: str) -> str:
    if math.isnan(found.low):
        return ""
    return f"{number(found.low, metric)} to {number(found.high, metric)}"
