"""`triptych train`."""

import json
from pathlib import Path
from typing import Annotated

import typer

import triptych
from triptych import recipes
from triptych.cli.process import prepare_training
from triptych.cli.terminal import Terminal
from triptych.errors import UsageError
from triptych.launch import speaks
from triptych.training import read_recipe
from triptych.training.progress import display_for

# The command that uses what a run has learned.
_USES = {"translation": "translate", "language-model": "generate", "masked-language-model": "fill"}


RecipeArgument = Annotated[
    str,
    typer.Argument(
        help="A recipe: a TOML file or the name of a built-in recipe. With --resume: a run folder."
    ),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="The run folder to create. Default: runs/NAME.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue the run in this folder.")]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Use a folder that has other files. Files with the names of a run's are replaced.",
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Go on with this language model: a folder in Hugging Face's format, or a name on the Hub.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a recipe key: section.key=value. May be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def train(
    recipe: RecipeArgument,
    out: OutOption = None,
    resume: ResumeOption = False,
    force: ForceOption = False,
    checkpoint: CheckpointOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model.

    Progress goes to standard error; paths in a recipe are relative to the current folder. Ctrl-C finishes
    the step, saves, and says how to go on.
    """
    prepare_training()
    display = display_for(Terminal(stderr=True))
    if resume:
        if out is not None:
            raise UsageError("--resume takes the run folder: leave out --out")
        if checkpoint is not None:
            raise UsageError("--from is for a new run: leave out --from or --resume")
        if force:
            raise UsageError("--force is for a new run: leave out --force or --resume")
        folder = Path(recipe)
        summary = triptych.resume(folder, overrides or [], display)
    else:
        if Path(recipe).is_dir() and recipe not in recipes.names():
            raise UsageError(f"{recipe} is a folder: add --resume to continue the run in it")
        resolved = read_recipe(recipes.find(recipe), overrides or [], checkpoint)
        folder = out or Path("runs") / resolved.name
        summary = triptych.train(resolved, folder, display, force=force)
    outcome = summary.outcome
    if not speaks():
        raise typer.Exit(0 if outcome.signal_number is None else 128 + outcome.signal_number)
    if outcome.signal_number is not None:
        display.say(
            f"stopped after step {outcome.counters.step:,}, saved. "
            f"Go on with: triptych train --resume {folder}"
        )
        raise typer.Exit(128 + outcome.signal_number)
    if as_json:
        print(json.dumps({"run": str(folder), **summary.figures()}))
    else:
        display.say(
            f"done: {outcome.counters.step:,} steps, {outcome.counters.tokens:,} target tokens in "
            f"{outcome.counters.seconds / 60:.1f} min; {folder} holds the {outcome.chosen} model. "
            f"Try it: triptych {_USES[summary.task]} {folder}"
        )
