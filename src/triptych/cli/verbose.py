"""`--verbose`: all that an error has to say, where the first line is not enough."""

import sys
import warnings
from typing import Annotated, TextIO

import typer

from triptych.errors import ConfigurationWarning, TriptychError

# Looked at when an error is printed, whatever the command was doing.
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", help="If it fails, print all that was found, and what to do."),
]
_as_before = warnings.showwarning


def print_error(error: TriptychError) -> None:
    """Print the message of an error, and its notes if all is asked for."""
    notes, says_all = getattr(error, "__notes__", []), "--verbose" in sys.argv[1:]
    more = " (more with --verbose)" if notes and not says_all else ""
    print("\n".join([f"triptych: {error}{more}", *(notes if says_all else ())]), file=sys.stderr)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One of ours as one line; others as Python has them."""
    if issubclass(category, ConfigurationWarning):
        print(f"triptych: warning: {message}", file=sys.stderr)
    else:
        _as_before(message, category, filename, lineno, file, line)
