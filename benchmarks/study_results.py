"""Tables of the studies from their raw runs, and differences that no study's own table has.

    .venv/bin/python benchmarks/study_results.py
    .venv/bin/python benchmarks/study_results.py sharing-rotary/symmetric sharing-rotary/key_value
    .venv/bin/python benchmarks/study_results.py sharing-rotary+sharing-rotary-again/key_value \
        sharing-rotary+sharing-rotary-again/factored
    .venv/bin/python benchmarks/study_results.py --metric test_loss --by-size \
        size-small size-middle size-large

The first writes conclusions and tables of quality of every `docs/results/studies/results/NAME/README.md`
again, from the `runs.csv` there. The others print the first variant minus the second, paired by seed, with
the exact and Student's p, not corrected; `+` pools the seeds of several studies. `--metric bleu` compares
another figure. The last prints what each variant costs in each study, in % of perplexity, and how that
changes with the number of parameters, all corrected together; `--picture FILE` draws it.
"""

import argparse
import csv
import io
import math
import statistics
from pathlib import Path

from triptych.seeing.reports import Interval, IntervalChart, write_picture
from triptych.training.studies import Outcome, read_study
from triptych.training.studies.comparing import NOISE
from triptych.training.studies.statistics import Comparison, compare
from triptych.training.studies.study import POSSIBLE
from triptych.training.studies.study_job import HEAD_MEASURES, Result
from triptych.training.studies.tables import COST, DIGITS, headed, quality_tables

STUDIES = Path(__file__).parents[1] / "docs" / "results" / "studies"
RESULTS = STUDIES / "results"


def report(name: str) -> str:
    """The report of a study, judged again from its raw runs."""
    study, folder = read_study(STUDIES / f"{name}.toml"), RESULTS / name
    runs = read_runs_csv((folder / "runs.csv").read_text(encoding="utf-8"))
    outcome = Outcome(study, folder, {}, runs, {}, 0.0)
    return judged_again(outcome, (folder / "README.md").read_text(encoding="utf-8"))


def judged_again(outcome: Outcome, report: str) -> str:
    """A report whose conclusions and tables of quality are made anew, as the runs of an outcome have them."""
    parts = "\n".join(headed(outcome, quality_tables(outcome)))
    rest = report.index(f"## {COST}")
    return f"{parts}\n{report[rest:]}"


def read_runs_csv(text: str) -> dict[str, dict[int, Result]]:
    """The results that `runs_csv` wrote, by variant and seed."""
    found: dict[str, dict[int, Result]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        figures = {name: float(row[name]) for name in DIGITS if row.get(name)}
        heads = {name: float(row[name]) for name in HEAD_MEASURES if row.get(name)}
        result = Result(figures, heads, float(row["seconds"]), int(row["steps"]), int(row["tokens"]))
        found.setdefault(row["variant"], {})[int(row["seed"])] = result
    return found


def difference(one: str, other: str, metric: str = "loss") -> Comparison:
    """`STUDY/VARIANT` minus another, on the seeds that both have."""
    return compare({one: _values(one, metric)}, _values(other, metric), POSSIBLE[metric])[one]


def _values(place: str, metric: str) -> dict[int, float]:
    studies, variant = place.rsplit("/", 1)
    found: dict[int, float] = {}
    for name in studies.split("+"):
        results = read_runs_csv((RESULTS / name / "runs.csv").read_text(encoding="utf-8"))[variant]
        if twice := found.keys() & results.keys():
            raise SystemExit(f"seed {min(twice)} is in several of {studies}")
        found |= {seed: result.figures[metric] for seed, result in results.items()}
    return found


def by_size(names: list[str], metric: str) -> dict[str, Comparison]:
    """What variants cost at each size, in % of perplexity, and the slope of that: % for ten times the size.

    A slope is fitted by least squares for each seed, and is a comparison as the others are: with its interval
    over seeds, its exact p, and one correction (Holm) for all.
    """
    costs: dict[str, dict[int, float]] = {}
    sizes, variants = list[float](), dict[str, None]()
    for name in names:
        runs = read_runs_csv((RESULTS / name / "runs.csv").read_text(encoding="utf-8"))
        baseline = runs.pop(read_study(STUDIES / f"{name}.toml").baseline_name)
        sizes.append(math.log10(statistics.mean(run.figures["parameters"] for run in baseline.values())))
        runs.pop(NOISE, None)
        variants |= dict.fromkeys(runs)
        for variant, found in runs.items():
            costs[f"{variant}, {name}"] = {
                seed: 100 * math.expm1(run.figures[metric] - baseline[seed].figures[metric])
                for seed, run in found.items()
            }
    for variant in variants:
        at_sizes = [costs[f"{variant}, {name}"] for name in names]
        seeds = set.intersection(*map(set, at_sizes))
        costs[f"{variant}, slope"] = {
            seed: statistics.linear_regression(sizes, [cost[seed] for cost in at_sizes]).slope
            for seed in sorted(seeds)
        }
    return compare(costs, dict.fromkeys({seed for found in costs.values() for seed in found}, 0.0))


def draw(compared: dict[str, Comparison], path: Path) -> None:
    """Draw what `by_size` gives, each variant's rows together."""
    means = [(name, found.difference) for name, found in compared.items()]
    means.sort(key=lambda row: row[0].partition(",")[0])
    intervals = tuple(Interval(mean.mean, mean.low, mean.high, name) for name, mean in means)
    label = "% of perplexity (lower is better), 95 % interval; slopes: for ten times the parameters"
    write_picture(IntervalChart("cost by size", label, intervals), path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", metavar="STUDY/VARIANT")
    parser.add_argument("--metric", default="loss")
    parser.add_argument("--by-size", nargs="+", default=[], metavar="STUDY")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what --by-size prints, as SVG")
    options = parser.parse_args()
    if options.by_size:
        compared = by_size(options.by_size, options.metric)
        if options.picture:
            draw(compared, options.picture)
        for name, found in compared.items():
            mean = found.difference
            p_value = f"exact p {found.exact:.2g}, corrected {found.exact_corrected:.2g}"
            interval = f"{mean.mean:+.2f} % [{mean.low:+.2f}, {mean.high:+.2f}], {mean.count} seeds"
            print(f"{name}: {interval}, {p_value}")
        return
    if not options.places:
        for folder in sorted(RESULTS.iterdir()):
            (folder / "README.md").write_text(report(folder.name), encoding="utf-8")
        return
    one, other = options.places
    found = difference(one, other, options.metric)
    mean = found.difference
    p_values = f"exact p {found.exact:.2g}, Student's p {found.p_value:.2g}"
    print(f"{mean.mean:+.4f} [{mean.low:+.4f}, {mean.high:+.4f}], {mean.count} seeds, {p_values}")


if __name__ == "__main__":
    main()
