"""The command `triptych`: parses, calls the library, prints."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version as installed_version
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from triptych.cli.failures import explain, flush_output
from triptych.cli.process import limit_spinning, open_streams
from triptych.cli.verbose import print_error, warnings_as_lines
from triptych.errors import TriptychError
from triptych.launch import end_now, num_launched, speaks
from triptych.user_code import use_code

# Each is a function of the module of its name, in this room. The summaries are the first lines of their
# docstrings: `triptych --help` prints them and imports none of the modules.
COMMANDS = {
    "demo": "Train a small translator, test it, and write a report.",
    "train": "Train a model.",
    "translate": "Translate text line by line, in the order of the input.",
    "generate": "Continue a text with a language model.",
    "fill": "Predict the masked tokens of a text.",
    "attend": "Show where every head of a model looks on a text.",
    "evaluate": "Score a translator on a test text, or a language model.",
    "inspect": "Measure the attention weights of a checkpoint, head by head.",
    "rewrite": "Rewrite the attention of a checkpoint, with a certificate.",
    "verify": "Check a certificate again; exit code 1 if a claim fails.",
    "convert": "Convert a model to or from the format of another library.",
    "compare": "Train variants of a recipe over several seeds and compare them.",
    "plan": "Predict memory and time of training on given devices.",
    "cost": "Compare the costs of the parameterisations of attention.",
}
_ABOUT = "Train, run, inspect and rewrite Transformers, with the attention matrices of every head at hand."


_CodeOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--code",
        help="Python file with the attention class that the run or recipe names. It is executed.",
    ),
]


def _with_code(command: Callable[..., None]) -> Callable[..., None]:
    """A command with `--code`."""

    def called(*, code: list[Path] | None, **given: Any) -> None:
        for path in code or []:
            use_code(path)
        command(**given)

    option = Parameter("code", Parameter.KEYWORD_ONLY, default=None, annotation=_CodeOption)
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        one.replace(annotation=hints[one.name], kind=Parameter.KEYWORD_ONLY)
        for one in signature(command).parameters.values()
    ]
    called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
    called.__signature__ = Signature([*parameters, option])  # type: ignore[attr-defined]
    called.__annotations__ = {**hints, "code": _CodeOption}
    return called


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
    """Options of the command itself."""


def application(arguments: Sequence[str]) -> typer.Typer:
    """The command with its subcommands.

    The one that is named is imported, and no other; if none is named, each is its name and its summary.
    """
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
    if named in COMMANDS:
        command = getattr(import_module(f"triptych.cli.{named}"), named)
        app.command()(command if named == "demo" else _with_code(command))
    else:
        for name, summary in COMMANDS.items():
            app.command(name, help=summary)(_not_named)
    return app


def _not_named() -> None:
    raise AssertionError("a command runs only if it is named, and then it is imported")


def run() -> None:
    """Entry point: any error becomes one line and an exit code."""
    if num_launched() == 1:
        _run()
        return
    try:
        _run()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            end_now(stop.code or 0)
        raise
    end_now(0)


def _run() -> None:
    open_streams()
    limit_spinning()  # nothing has imported torch yet
    try:
        try:
            with warnings_as_lines():
                application(sys.argv[1:])()
        finally:
            flush_output()
    except TriptychError as error:
        if speaks(error):
            print_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read our output has seen enough; typer itself ends so, too
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 (the user sees one line, whatever it is)
        explained = explain(error)
        if speaks(error):
            print_error(explained)
        sys.exit(explained.exit_code)
