"""The command `triptych`: parses, calls the library, prints."""

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from typing import Any

import typer

from triptych.cli.failures import (
    as_triptych_error,
    flush_output,
    is_output_unread,
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
        "lens",
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
    "explain",
)
# Commands with a text as their last argument.
OF_A_TEXT = ("translate", "generate", "fill", "attend", "lens")
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
    code = 0
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
    except BrokenPipeError as error:
        if isinstance(failure := error.__context__, TriptychError):
            print_error(failure)
            sys.exit(failure.exit_code)
        # The reader of our output, such as `head`, has enough, so the command succeeds.
        sys.exit(code or (0 if is_output_unread() else 1))
    except SystemExit as stop:  # typer ends so when its output is not read
        if stop.code == 1 and is_output_unread():
            sys.exit(0)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (one line, whatever it is; a panic of Rust is not an Exception)
        explained = as_triptych_error(error)
        if speaks(error):
            print_error(explained)
        sys.exit(explained.exit_code)
    sys.exit(code)


def _carry_out(arguments: Sequence[str]) -> int:
    """Carry out a command line; its exit code."""
    arguments = _as_options(arguments)
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
        hint = _hint_to_quote(arguments, refusal.format_message())
        raise UsageError(
            f"{refusal.format_message()}{hint} (see {asked} --help)"
        ) from None
    return found if isinstance(found, int) else 0


def _as_options(arguments: Sequence[str]) -> Sequence[str]:
    """Return the command line with the words help and version replaced by options."""
    match arguments:
        case ["help", name, *_] if name in COMMANDS:
            return [name, "--help"]
        case ["help", *rest]:
            return [*rest[:1], "--help"]
        case ["version"]:
            return ["--version"]
    return arguments


def _hint_to_quote(arguments: Sequence[str], refusal: str) -> str:
    """Return a hint if several words of a text were given as several arguments; else ""."""
    # Typer names the extra arguments in parentheses.
    found = re.search(r"extra argument\S* \((.*)\)$", refusal)
    if arguments[0] not in OF_A_TEXT or found is None:
        return ""
    extra = found[1].split()
    place = next(
        (at for at, word in enumerate(arguments) if word == extra[0] and at > 1), None
    )
    if place is None:
        return ""
    text = " ".join([arguments[place - 1], *extra])
    return f": put a text in quotes, as in {shlex.join([text])}"
