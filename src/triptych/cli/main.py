"""The command `triptych`: parses, calls the library, prints."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version as installed_version

import typer

from triptych.errors import TriptychError

# Each is a function of the module of its name, in this room.
COMMANDS = ("demo", "train", "translate", "evaluate", "inspect", "rewrite", "verify", "convert", "cost")
_ABOUT = "Train, run and look into Transformers, with the matrices of every head in your hands."


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"triptych {installed_version('triptych')}")
        raise typer.Exit
    return wanted


def main(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version and stop."
    ),
) -> None:
    """What stands before every command."""


def application(arguments: Sequence[str]) -> typer.Typer:
    """The command with its subcommands; one that is named comes alone, without what the others would load."""
    app = typer.Typer(
        name="triptych",
        help=_ABOUT,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help=_ABOUT)(main)
    named = next((word for word in arguments if not word.startswith("-")), None)
    for name in (named,) if named in COMMANDS else COMMANDS:
        app.command()(getattr(import_module(f"triptych.cli.{name}"), name))
    return app


def run() -> None:
    """Entry point: errors a user can put right become one line and an exit code."""
    try:
        application(sys.argv[1:])()
    except TriptychError as error:
        print(f"triptych: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # typer itself ends quietly when whoever read our output has seen enough.
        where = f"{error.filename}: " if error.filename else ""
        print(f"triptych: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
