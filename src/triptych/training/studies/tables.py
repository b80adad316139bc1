"""Tables, conclusions and CSV rows of a study."""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median_high
from typing import Any

from triptych.errors import TriptychError
from triptych.printable import printable
from triptych.seeing.reports import Table
from triptych.training.metrics import read_metrics
from triptych.training.studies.comparing import NOISE, Outcome, Variant
from triptych.training.studies.statistics import (
    CONFIDENCE,
    Comparison,
    Estimate,
    compare,
    estimate,
    too_few,
)
from triptych.training.studies.study import HIGHER_IS_BETTER, OF_COST, POSSIBLE
from triptych.training.studies.study_job import HEAD_MEASURES

COST = "What it costs"
_MOST_NAMED = 4
_ENDS_A_CELL = re.compile(r"[\\|]")
DIGITS = {
    "loss": 4,
    "bits_per_byte": 4,
    "test_loss": 4,
    "bleu": 2,
    "chrf": 2,
    "exact_match": 3,
    "tokens_per_second": 0,
    "memory": 0,
    "parameters": 0,
    "cache_bytes": 0,
}


def compared(outcome: Outcome, metric: str) -> dict[str, Comparison]:
    """Compare each variant with the baseline by one metric, without the repeated baseline."""
    values = outcome.values(metric)
    baseline = values.pop(outcome.study.baseline_name, {})
    values.pop(NOISE, None)
    return compare(values, baseline, POSSIBLE[metric])


def mean(values: Mapping[int, float], metric: str) -> Estimate:
    """Return the mean of a metric over seeds, with an interval cut to the metric's possible values."""
    return estimate(list(values.values()), POSSIBLE[metric])


def noise_floor(outcome: Outcome, metric: str) -> Estimate | None:
    """Return the repeated baseline minus the baseline, on the same text; None if it was not repeated."""
    values = outcome.values(metric)
    baseline = values.get(outcome.study.baseline_name, {})
    pairs = compare({NOISE: values.get(NOISE, {})}, baseline, POSSIBLE[metric])
    return pairs[NOISE].difference if NOISE in pairs else None


def quality_table(outcome: Outcome, metric: str) -> Table:
    """Return the table of a metric: means, and each variant's difference to the baseline."""
    # The baseline's row has empty cells for differences; the noise floor has no tests.
    baseline = outcome.study.baseline_name
    differences = compared(outcome, metric)
    rows = []
    for name, values in outcome.values(metric).items():
        found = mean(values, metric)
        cells = (
            f"{name} *" if name == baseline else name,
            str(found.count),
            number(found.mean, metric),
        )
        against: tuple[str, ...] = ("",) * 6
        if name in differences:
            against = _difference(differences[name], metric)
        elif name == NOISE and (floor := noise_floor(outcome, metric)):
            against = _signed(floor.mean, metric), _from_to(floor, metric), *("",) * 4
        rows.append((*cells, _from_to(found, metric), *against))
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
            "exact p (Holm)",
            "Student's p (Holm)",
            "effect",
            "seeds needed",
        ),
        tuple(rows),
        "* the baseline. Differences are paired by seed. "
        + (f"{NOISE}: the noise floor. " if NOISE in outcome.results else "")
        + _what_is_corrected(list(differences.values())),
        numeric=(1, 2, 3, 4, 5, 6, 7, 8, 9),
    )


def _what_is_corrected(differences: Sequence[Comparison]) -> str:
    """Return the caption about Holm's correction, drawn sign flips, and too few seeds."""
    # The number of tests is the same for all variants of a table.
    if not differences:
        return ""
    num_tests = differences[0].num_tests
    pairs = max(len(one.differences) for one in differences)
    covers = (
        f"Holm's correction covers the {num_tests} comparisons of this table, not other metrics and studies."
        if num_tests > 1
        else "There is one comparison, so p is not corrected, also not for other metrics and studies."
    )
    drawn = "Where there are more than 40 pairs, the exact p is of 65,536 drawn sign flips. "
    is_drawn = any(one.is_drawn for one in differences)
    return f"{covers} {drawn if is_drawn else ''}{too_few(pairs, num_tests)}".rstrip()


def costs_table(outcome: Outcome) -> Table:
    """Return the table of costs: medians over seeds, learning rate and budget of each variant."""
    # An actual run has each value of a median (`median_high`).
    rows = []
    metrics = [metric for metric in DIGITS if metric in OF_COST]
    for name, variant in outcome.variants.items():
        cells = []
        for metric in metrics:
            values = outcome.values(metric).get(name)
            cells.append(number(median_high(values.values()), metric) if values else "")
        held = (
            ""
            if variant.solved is None
            else variant.solved.describe(outcome.study.budget.hold)
        )
        rate = variant.recipe.training.learning_rate
        rows.append((name, *cells, "" if rate is None else f"{rate:g}", held))
    columns = (
        "variant",
        *(title(metric) for metric in metrics),
        "learning rate",
        "budget",
    )
    rewritten = [
        f"{name} from {outcome.study.parent_of(name)}"
        for name in outcome.study.rewritten
    ]
    caption = f"Rewritten: {', '.join(rewritten)}; rate, memory and learning rate come from training."
    numeric = tuple(range(1, len(metrics) + 2))
    return Table(
        COST, columns, tuple(rows), caption if rewritten else "", numeric=numeric
    )


def sweep_table(outcome: Outcome) -> Table:
    """Return the table of the sweep: validation losses by learning rate, and the chosen rates."""
    # Rewritten variants are not swept: the table omits them.
    rates = sorted(
        {*chain.from_iterable(one.swept for one in outcome.variants.values())}
    )
    rows = [
        (
            name,
            *(_sweep_loss(one, rate) for rate in rates),
            f"{one.recipe.training.learning_rate:g}",
            _at_end(one),
        )
        for name, one in outcome.variants.items()
        if one.swept
    ]
    sweep = outcome.study.sweep
    seeds = "one seed" if sweep.seeds == 1 else f"mean of {sweep.seeds} seeds"
    return Table(
        "Choosing the learning rate",
        ("variant", *(f"{rate:g}" for rate in rates), "chosen", ""),
        tuple(rows),
        f"Validation loss at each rate: {seeds} that no other run uses, "
        f"{sweep.steps_share:.0%} of the steps.",
        numeric=tuple(range(1, len(rates) + 2)),
    )


def _sweep_loss(variant: Variant, rate: float) -> str:
    loss = variant.swept[rate]
    return f"{loss:.4f}" if math.isfinite(loss) else "failed"


def _at_end(variant: Variant) -> str:
    chosen = variant.recipe.training.learning_rate
    ends = {min(variant.swept): "the lowest", max(variant.swept): "the highest"}
    return f"{ends[chosen]} tried: another may be better" if chosen in ends else ""


def heads_table(outcome: Outcome) -> Table:
    """Return the table of measures of the heads: means over heads and seeds."""
    # An undefined measure has an empty cell.
    rows = []
    for name, results in outcome.results.items():
        cells = []
        for measure in HEAD_MEASURES:
            values = [
                one.heads[measure] for one in results.values() if measure in one.heads
            ]
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
    """Return a sentence for each variant about the deciding metric."""
    # The deciding metric is the first; the exact test decides if a difference is seen.
    metric = outcome.study.metrics[0]
    found = []
    for name, one in compared(outcome, metric).items():
        difference = f"{_signed(one.difference.mean, metric)} [{_from_to(one.difference, metric)}]"
        if not one.is_seen:
            needed = one.seeds_needed
            more = (
                f"; about {needed} seeds would show a difference of this size"
                if needed
                else ""
            )
            found.append(
                f"{name}: no difference seen ({difference}, {_p_values(one)}{more})"
            )
            continue
        better = (one.difference.mean > 0) == (metric in HIGHER_IS_BETTER)
        found.append(
            f"{name}: {'better' if better else 'worse'} by {difference} in {title(metric)}, "
            f"{_p_values(one)} after correction"
        )
    return found


def verdict(outcome: Outcome) -> str:
    """Return the answer of a study in one sentence: better and worse variants by the deciding metric."""
    metric = outcome.study.metrics[0]
    baseline = outcome.study.baseline_name
    found = compared(outcome, metric)
    if not found:
        return f"No variant has runs to compare with {baseline}."
    better = list[str]()
    worse = list[str]()
    unseen = list[str]()
    for name, one in found.items():
        gains = (one.difference.mean > 0) == (metric in HIGHER_IS_BETTER)
        (unseen if not one.is_seen else better if gains else worse).append(name)
    said = [
        *([f"better than {baseline}: {_named(better)}"] if better else []),
        *([f"worse than {baseline}: {_named(worse)}"] if worse else []),
        *([f"no difference to {baseline} seen: {_named(unseen)}"] if unseen else []),
    ]
    seeds = max(len(one.differences) for one in found.values())
    num_tests = max(one.num_tests for one in found.values())
    if unseen and too_few(seeds, num_tests):
        said[-1] += f" ({seeds} seeds cannot show one)"
    return f"By {title(metric)} over {seeds} seed{'' if seeds == 1 else 's'}, {'; '.join(said)}."


def _named(names: Sequence[str]) -> str:
    """Return names in a sentence, at most `_MOST_NAMED` of them."""
    left = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {left} more" if left > 0 else "")


def _p_values(one: Comparison) -> str:
    kind = "p (drawn)" if one.is_drawn else "exact p"
    return f"{kind} = {one.exact_corrected:.2g}, Student's {one.corrected:.2g}"


def runs_csv(outcome: Outcome) -> str:
    """Return CSV with all figures of every run, one run a row."""
    metrics = list(DIGITS)
    rows: list[list[Any]] = [
        ["variant", "seed", *metrics, "seconds", "steps", "tokens", *HEAD_MEASURES]
    ]
    for name, results in outcome.results.items():
        for seed, one in sorted(results.items()):
            figures = [one.figures.get(metric, "") for metric in metrics]
            heads = [one.heads.get(measure, "") for measure in HEAD_MEASURES]
            rows.append(
                [name, seed, *figures, one.seconds, one.steps, one.tokens, *heads]
            )
    return _csv(rows)


def sweep_csv(outcome: Outcome) -> str:
    """Return CSV with the mean loss of each variant at each learning rate of the sweep."""
    rows = [
        (name, *tried)
        for name, one in outcome.variants.items()
        for tried in one.swept.items()
    ]
    return _csv([["variant", "learning_rate", "loss"], *rows])


def curves_csv(outcome: Outcome) -> str:
    """Return CSV with every validation of every trained run, one validation a row."""
    columns = ("step", "tokens", "seconds", "loss")
    rows: list[list[Any]] = [["variant", "seed", *columns]]
    for name, results in outcome.trained.items():
        for seed in sorted(results):
            for one in history(outcome.run_folder(name, seed)):
                rows.append([name, seed, *(one[column] for column in columns)])
    return _csv(rows)


def history(folder: Path, flops: float | None = None) -> list[dict[str, float]]:
    """Return every validation of a run, with the steps, tokens, seconds and operations before it."""
    # The last line of metrics before the validation gives tokens and seconds.
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except (OSError, TriptychError):
        return []
    found = []
    tokens = 0.0
    seconds = 0.0
    for record in records:
        tokens = record.get("tokens", tokens)
        seconds = record.get("seconds", seconds)
        if "valid_loss" in record:
            place = {
                "step": record["step"],
                "tokens": tokens,
                "seconds": seconds,
                "loss": record["valid_loss"],
            }
            if flops is not None:
                place["flops"] = tokens * flops
            found.append({name: float(value) for name, value in place.items()})
    return found


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def markdown(outcome: Outcome) -> str:
    """Return the whole report as Markdown."""
    parts = headed(outcome, tables(outcome))
    if outcome.failed:
        parts += [
            "## Failed",
            "",
            *(f"- {name}: {what}" for name, what in outcome.failed.items()),
            "",
        ]
    return "\n".join(parts).rstrip() + "\n"


def headed(outcome: Outcome, shown: Sequence[Table]) -> list[str]:
    """Return the lines of a report: conclusions, and the given tables."""
    parts = [
        f"# {outcome.study.name}",
        "",
        *(f"- {line}" for line in conclusions(outcome)),
        "",
    ]
    for table in shown:
        rule = [
            "---:" if i in table.numeric else "---" for i in range(len(table.columns))
        ]
        rows = (table.columns, rule, *table.rows)
        lines = (f"| {' | '.join(map(_cell, row))} |" for row in rows)
        parts += [f"## {table.title}", "", *lines, "", table.caption, ""]
    return parts


def _cell(text: str) -> str:
    """Format a text as a Markdown cell: backslashes and bars, which could end the cell, are escaped."""
    return _ENDS_A_CELL.sub(r"\\\g<0>", printable(text))


def quality_tables(outcome: Outcome) -> list[Table]:
    """Return a table for each metric of quality."""
    return [
        quality_table(outcome, metric)
        for metric in outcome.study.metrics
        if metric not in OF_COST
    ]


def tables(outcome: Outcome) -> list[Table]:
    """Return all tables of a report."""
    found = quality_tables(outcome)
    found += [
        costs_table(outcome),
        *([sweep_table(outcome)] if outcome.study.sweep.learning_rates else []),
    ]
    return [*found, *([heads_table(outcome)] if outcome.results else [])]


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return all figures for JSON; undefined figures are None."""
    # `_finite` maps NaN and infinity to None, because JSON lacks both values.
    metrics = [metric for metric in outcome.study.metrics if metric not in OF_COST]
    return {
        "study": outcome.study.name,
        "baseline": outcome.study.baseline_name,
        "metrics": {
            metric: {
                "means": {
                    name: _as_record(mean(values, metric))
                    for name, values in outcome.values(metric).items()
                },
                "differences": {
                    name: {
                        **_as_record(one.difference),
                        "p": _finite(one.p_value),
                        "p_holm": _finite(one.corrected),
                        "exact_p": _finite(one.exact),
                        "exact_p_holm": _finite(one.exact_corrected),
                        "effect": _finite(one.effect),
                        "seeds_needed": one.seeds_needed,
                        "is_seen": one.is_seen,
                    }
                    for name, one in compared(outcome, metric).items()
                },
                "noise": _as_record(floor)
                if (floor := noise_floor(outcome, metric))
                else None,
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


def _as_record(found: Estimate) -> dict[str, Any]:
    return {
        "mean": found.mean,
        "low": _finite(found.low),
        "high": _finite(found.high),
        "seeds": found.count,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _difference(found: Comparison, metric: str) -> tuple[str, ...]:
    exact, student = (
        "" if math.isnan(p) else f"{p:.2g}"
        for p in (found.exact_corrected, found.corrected)
    )
    effect = "" if math.isnan(found.effect) else f"{found.effect:.2f}"
    needed = found.seeds_needed
    return (
        _signed(found.difference.mean, metric),
        _from_to(found.difference, metric),
        exact,
        student,
        effect,
        "" if needed is None else str(needed),
    )


def title(metric: str) -> str:
    """Return the displayed name of a metric."""
    return metric.replace("_", " ")


def number(value: float, metric: str) -> str:
    """Format a value with the number of digits of its metric."""
    return f"{value:,.{DIGITS[metric]}f}"


def _signed(value: float, metric: str) -> str:
    return f"{value:+,.{DIGITS[metric]}f}"


def _from_to(found: Estimate, metric: str) -> str:
    if math.isnan(found.low):
        return ""
    return f"{number(found.low, metric)} to {number(found.high, metric)}"
