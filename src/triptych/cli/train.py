"""`triptych train`."""

from collections.abc import Sequence
from pathlib import Path

import typer

import triptych
from triptych.cli.failures import say
from triptych.cli.options import refuse_options
from triptych.cli.process import prepare_training
from triptych.cli.terminal import print_json, training_display
from triptych.errors import UsageError
from triptych.launch import speaks
from triptych.training import read_recipe, shipped_recipes
from triptych.training.runs import Summary

# The command that uses what a run has learned.


def train(
    recipe: str,
    *,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    checkpoint: str | None = None,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Train a model.

    Progress goes to standard error; paths in a recipe are relative to the current folder. Ctrl-C finishes
    the step, saves, and prints the command that continues.

    Options:
        recipe: A recipe: a TOML file or the name of a built-in recipe. With --resume: a run folder.
        out: The run folder to create. Default: runs/NAME.
        resume: Continue the run in this folder.
        force: Use a folder that has other files. Files with the names of a run's are replaced.
        checkpoint: Go on with this model. A language model: a folder in Hugging Face's format, or a name on
            the Hub. A translator: the same, or a run.
        overrides: Override a recipe key: section.key=value. May be repeated.

    Examples:
        triptych train mine.toml --set training.max_steps=20
        triptych train --resume runs/mine
    """
    prepare_training()
    display = training_display()
    if resume:
        given = {"out": out, "checkpoint": checkpoint, "force": force}
        refuse_options(given, "is for a new run: leave it out, or leave out --resume")
        folder = Path(recipe)
        summary = triptych.resume(folder, overrides, display)
    else:
        if Path(recipe).is_dir() and recipe not in shipped_recipes():
            raise UsageError(
                f"{recipe} is a folder: add --resume to continue the run in it"
            )
        resolved = read_recipe(recipe, overrides, checkpoint)
        folder = out or Path("runs") / resolved.name
        summary = triptych.train(resolved, folder, display, force=force)
    report_training(summary, folder, as_json=as_json)


def report_training(summary: Summary, folder: Path, *, as_json: bool) -> None:
    """Report the end of a run and its use; an interrupted run ends the command with the signal's code."""
    outcome = summary.outcome
    if not speaks():
        raise typer.Exit(
            0 if outcome.signal_number is None else 128 + outcome.signal_number
        )
    if outcome.signal_number is not None:
        say(
            f"stopped after step {outcome.counters.step:,}, saved. "
            f"Go on with: triptych train --resume {folder}"
        )
        raise typer.Exit(128 + outcome.signal_number)
    if as_json:
        print_json({"run": str(folder), **summary.figures()})
    else:
        say(
            f"done: {outcome.counters.step:,} steps, {outcome.counters.tokens:,} target tokens in "
            f"{outcome.counters.seconds / 60:.1f} min; {folder} holds the {outcome.chosen} model. "
            f"Try it: triptych {summary.command} {folder}"
        )
