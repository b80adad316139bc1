"""`triptych compare`."""

import statistics
from pathlib import Path

import typer
from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

import triptych
from triptych.cli.failures import is_given, say
from triptych.cli.terminal import Terminal, print_json, print_table
from triptych.files import write_text
from triptych.launch import speaks
from triptych.processes import launched
from triptych.training.studies import (
    StudyProgress,
    read_study,
    tables,
    write_study_page,
    write_study_pictures,
)


def compare(study: Path, *, out: Path | None = None, as_json: bool = False) -> None:
    """Train variants of a recipe over several seeds and compare them.

    Writes tables (README.md, report.html), raw figures (runs.csv, curves.csv, sweep.csv) and two pictures
    into the folder. The same command continues a study that was stopped; finished runs are kept.

    Options:
        study: A study: a TOML file.
        out: Folder for the runs and results. Default: studies/NAME.

    Examples:
        triptych compare study.toml
        triptych compare study.toml --out results --json
    """
    read = read_study(study)
    folder = out or Path("studies") / read.name
    errors = Terminal(stderr=True, quiet=not speaks() or is_given("--quiet", "-q"))
    with launched("cpu") as world:
        with Live(console=errors, auto_refresh=False, transient=True) as live:
            told = set[tuple[str, str]]()

            def tell(stage: str, progress: StudyProgress) -> None:
                if errors.is_terminal:
                    live.update(
                        live_table(stage, progress, read.metrics[0]), refresh=True
                    )
                    return
                for name in [
                    name for name in progress.done if (stage, name) not in told
                ]:
                    told.add((stage, name))
                    if name not in progress.earlier:
                        errors.print(
                            f"{_stage_state(stage, progress)}: {name}", soft_wrap=True
                        )

            outcome = triptych.compare_study(
                read,
                folder,
                origin=study.parent,
                tell=tell,
                say=lambda line: errors.print(line),
                world=world,
            )

        def show() -> None:
            _write_outcome(outcome, folder)
            if as_json:
                print_json(tables.figures(outcome), indent=2)
            else:
                _print_outcome(outcome, folder)
            for name, what in outcome.failed.items():
                errors.print(f"failed: {name}: {what}")

        world.on_first(show)
    if outcome.failed:
        raise typer.Exit(1)


def _write_outcome(outcome: "triptych.training.studies.Outcome", folder: Path) -> None:
    write_text(folder / "runs.csv", tables.runs_csv(outcome))
    write_text(folder / "curves.csv", tables.curves_csv(outcome))
    if outcome.study.sweep.learning_rates:
        write_text(folder / "sweep.csv", tables.sweep_csv(outcome))
    write_text(folder / "README.md", tables.markdown(outcome))
    write_study_page(outcome, folder / "report.html")
    write_study_pictures(outcome, folder)


def _stage_state(stage: str, progress: StudyProgress) -> str:
    left = progress.seconds_left
    failed = f", {len(progress.failed)} failed" if progress.failed else ""
    time_left = "" if left is None else f", about {left / 60:.0f} min left"
    return f"{stage}: {len(progress.done)} of {len(progress.variants)} done{failed}{time_left}"


def live_table(stage: str, progress: StudyProgress, metric: str) -> Table:
    """Return a table of the progress of the runs, with a row per variant."""
    columns = ["variant", "runs", "in progress"]
    judged = stage in (
        "runs",
        "rewrites",
    )  # a sweep's mean over learning rates is not meaningful
    if judged:
        columns.insert(2, f"mean {tables.title(metric)}")
    table = Table(
        title=_stage_state(stage, progress), title_justify="left", box=box.SIMPLE_HEAD
    )
    for name in columns:
        table.add_column(
            name, justify="left" if name in ("variant", "in progress") else "right"
        )
    for variant in dict.fromkeys(progress.variants.values()):
        runs = [run for run, its in progress.variants.items() if its == variant]
        done = [progress.done[run].figures for run in runs if run in progress.done]
        failed = sum(run in progress.failed for run in runs)
        cells = [
            variant,
            f"{len(done)} of {len(runs)}" + (f", {failed} failed" if failed else ""),
        ]
        if judged:
            found = [figures[metric] for figures in done if metric in figures]
            cells.append(
                tables.number(statistics.fmean(found), metric) if found else ""
            )
        shares = {
            run.removeprefix(f"{variant}-"): progress.running.get(run) for run in runs
        }
        cells.append(
            ", ".join(
                f"{run} {share:.0%}"
                for run, share in shares.items()
                if share is not None
            )
        )
        table.add_row(*map(Text, cells))
    return table


def _print_outcome(outcome: "triptych.training.studies.Outcome", folder: Path) -> None:
    console = Terminal()
    for table in tables.tables(outcome):
        print_table(table.without_empty_columns(), console)
    for line in tables.conclusions(outcome):
        console.print(line, soft_wrap=True)
    say(f"{folder}: README.md, report.html, runs.csv, curves.csv and pictures")
