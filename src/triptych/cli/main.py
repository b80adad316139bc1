"""The command `triptych`: parses, calls the library, prints."""

import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from typing import Any

import typer

from triptych.cli.failures import (
    as_triptych_error,
    flush_output,
    print_error,
    warnings_as_lines,
)
from triptych.cli.process import limit_spinning, open_streams
from triptych.cli.verbs import add_verb
from triptych.errors import TriptychError, UsageError
from triptych.launch import end_now, num_launched, speaks

# Names of the commands: the function `cli.NAME.NAME` implements a command.
COMMANDS = (
    *(
        "demo",
        "recipes",
        "new",
        "train",
        "distil",
        "shortlist",
        "report",
        "translate",
        "generate",
        "fill",
    ),
    *(
        "attend",
        "evaluate",
        "inspect",
        "rewrite",
        "verify",
        "diff",
        "convert",
        "compare",
        "plan",
        "cost",
        "serve",
    ),
    "explore",
)
_ABOUT = "Train, run, inspect and rewrite Transformers, with the attention matrices of every head at hand."
# Typer's exception for an invalid command line; typer does not export the class.
_Refusal: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"triptych {installed_version('triptych')}")
        raise typer.Exit
    return wanted


def main(
    version: bool = typer.Option(
        False,
        "--version",
        is_eager=True,
        callback=_print_version,
        help="Print the version and stop.",
    ),
) -> None:
    """Options of the command itself."""


def application(arguments: Sequence[str]) -> typer.Typer:
    """Return the command with the named subcommand, or with all subcommands."""
    app = typer.Typer(
        name="triptych",
        help=_ABOUT,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help=_ABOUT, context_settings={"help_option_names": ["-h", "--help"]})(
        main
    )
    named = next((word for word in arguments if not word.startswith("-")), None)
    for name in [named] if named in COMMANDS else COMMANDS:
        add_verb(app, name)
    return app


def run() -> None:
    """Entry point: any error becomes one line and an exit code."""
    if num_launched() == 1:
        _run_command_line()
        return
    try:
        _run_command_line()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            end_now(stop.code or 0)
        raise
    end_now(0)


def _run_command_line() -> None:
    open_streams()
    limit_spinning()  # before torch is imported
    try:
        try:
            with warnings_as_lines():
                code = _carry_out(sys.argv[1:])
        finally:
            flush_output()
    except TriptychError as error:
        if speaks(error):
            print_error(error)
        sys.exit(error.exit_code)
    except (
        BrokenPipeError
    ):  # whoever read our output has seen enough; typer itself ends so, too
        sys.exit(1)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 (one line, whatever it is; a panic of Rust is no Exception)
        explained = as_triptych_error(error)
        if speaks(error):
            print_error(explained)
        sys.exit(explained.exit_code)
    sys.exit(code)


def _carry_out(arguments: Sequence[str]) -> int:
    """Carry out a command line; its exit code."""
    command = typer.main.get_command(application(arguments))
    try:
        found = command.main(
            list(arguments) or ["--help"], "triptych", standalone_mode=False
        )
    except typer.Abort:
        return 130
    except _Refusal as refusal:
        context = getattr(refusal, "ctx", None)
        asked = context.command_path if context else "triptych"
        raise UsageError(f"{refusal.format_message()} (see {asked} --help)") from None
    return found if isinstance(found, int) else 0
