"""The command `triptych`: parses, calls the library, prints."""

import sys
from importlib.metadata import version as installed_version

import typer

from triptych.cli.cost import cost
from triptych.cli.demo import demo
from triptych.cli.evaluate import evaluate
from triptych.cli.train import train
from triptych.cli.translate import translate
from triptych.errors import TriptychError

app = typer.Typer(
    name="triptych",
    help="Train, run and look into Transformers, with the matrices of every head in your hands.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (demo, train, translate, evaluate, cost):
    app.command()(command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"triptych {installed_version('triptych')}")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version and stop."
    ),
) -> None:
    """Train, run and look into Transformers, with the matrices of every head in your hands."""


def run() -> None:
    """Entry point: errors a user can put right become one line and an exit code."""
    try:
        app()
    except TriptychError as error:
        print(f"triptych: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # typer itself ends quietly when whoever read our output has seen enough.
        where = f"{error.filename}: " if error.filename else ""
        print(f"triptych: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
