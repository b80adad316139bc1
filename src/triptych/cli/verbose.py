"""`--verbose`: all that an error has to say, where the first line is not enough."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from triptych.cli.terminal import say
from triptych.errors import ConfigurationWarning, TriptychError

# Looked at when an error is printed, whatever the command was doing.
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", help="On failure, print everything that was found, and what to do."),
]


def print_error(error: TriptychError) -> None:
    """Print the message of an error, and its notes if all is asked for."""
    notes, says_all = getattr(error, "__notes__", []), "--verbose" in sys.argv[1:]
    more = " (more with --verbose)" if notes and not says_all else ""
    say("\n".join([f"triptych: {error}{more}", *(notes if says_all else ())]))


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """While entered, warnings about configurations are lines of their own, each printed once."""
    with warnings.catch_warnings():
        as_before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
            if issubclass(category, ConfigurationWarning):
                say(f"triptych: warning: {message}")
            else:
                as_before(message, category, *where, **how)

        warnings.simplefilter("default", ConfigurationWarning)
        warnings.showwarning = show
        yield
