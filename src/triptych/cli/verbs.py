"""The commands for typer, made of the functions that carry them out."""

import gc
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import Parameter as Given
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from triptych.cli.interrupts import cleaned_up
from triptych.cli.signatures import (
    REQUIRED,
    FunctionText,
    Parameter,
    Quantity,
    is_list,
    read_function,
)
from triptych.errors import UsageError
from triptych.user_code import of_ended, use_code

# Options with another spelling than their parameters.
_SPELLED = {
    "alpha": ("--alpha",),
    "as_json": ("--json",),
    "beam_size": ("--beam",),
    "biases": ("--bias",),
    "calibration": ("--calibrate",),
    "checkpoint": ("--from",),
    "most_tokens": ("--tokens",),
    "num_best": ("--n-best",),
    "out": ("--out", "-o"),
    "origin": ("--from",),
    "overrides": ("--set",),
    "quiet": ("--quiet", "-q"),
    "show_all": ("--all",),
    "targets": ("--over-targets",),
    "verbose": ("--verbose", "-v"),
}
# Default help texts of parameters, by name; a description in a command's docstring has precedence.
_ABOUT = {
    "code": "Python file with the attention class that the run or recipe names. It is executed.",
    "as_json": "Print the result as JSON.",
    "ids": "Token ids in the place of a text, with commas: 464,3797,3332.",
    "literal": "Read special tokens that a text spells out (<|endoftext|>) as plain text.",
    "force": "Replace existing files, even if triptych did not write them.",
    "model": "A run folder, a folder or file in Hugging Face's format, or a name on the Hub.",
    "models": "A run folder, a folder or file in Hugging Face's format, or a name on the Hub; or several.",
    "quiet": "Show no progress on standard error.",
    "verbose": "On failure, print the details and what to do.",
    "without": "Switch heads off: 3.2 is head 2 of layer 3, 3 a layer, *.2 a pattern; several with commas.",
}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_QUANTITY = re.compile(
    r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kmgtp]?)(i?)b?(?:/s)?\s*", re.IGNORECASE
)
_SECTIONS = {"without": "Model"}
_LAST = "Options"


class _Command(TyperCommand):
    """A command with options grouped under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                title = (
                    "Arguments"
                    if is_argument
                    else getattr(parameter, "rich_help_panel", None) or _LAST
                )
                sections.setdefault(title, []).append(record)
        sections[_LAST] = sections.pop(_LAST)  # -h is among them
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def spelled(name: str) -> tuple[str, ...]:
    """Return the spellings of a parameter's option."""
    return _SPELLED.get(name, (f"--{name.strip('_').replace('_', '-')}",))


def read_quantity(text: str, option: str) -> float:
    """A number of bytes or operations: `80GB`, `40GiB`, `3.35TB/s`, `400T`, `4e14`."""
    found = _QUANTITY.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        raise UsageError(
            f"{option} is {text!r}: write a number and a unit, such as 80GB, 40GiB or 400T"
        )
    size = float(found[1]) * float(
        (1024 if found[3] else 1000) ** _POWERS[found[2].lower()]
    )
    if not 0 < size < math.inf:
        raise UsageError(f"{option} is {text!r}: it must be more than 0")
    return size


def read_verb(name: str) -> FunctionText:
    """Read the source of a verb: the function of the same name in `triptych.cli`."""
    return read_function(f"triptych.cli.{name}", name)


def add_verb(app: typer.Typer, name: str) -> None:
    """Give a command to an application; its module is imported when it runs."""
    verb = read_verb(name)
    examples = "".join(f"  {line}\n" for line in verb.examples)
    switches = (Parameter("quiet", bool, False), Parameter("verbose", bool, False))
    own = (*verb.parameters, Parameter("code", list[Path], ()), *switches)

    def called(**given: Any) -> None:
        del (
            given["quiet"],
            given["verbose"],
        )  # read from the command line by `is_given`
        for path in given.pop("code") or ():
            use_code(path)
        carry_out = import_module(f"triptych.cli.{name}").__dict__[name]
        if not gc.isenabled():  # a separate process: imported modules stay to its end
            gc.freeze()
            gc.enable()
        with cleaned_up():
            try:
                carry_out(**_arguments_by_group(verb, given))
            except SystemExit as stop:
                if (file := of_ended(stop)) is not None:
                    raise UsageError(
                        f"{file} ended the process (SystemExit: {stop})"
                    ) from None
                raise

    called.__signature__ = Signature([_typer_parameter(one) for one in own])  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: _annotation(one) for one in own}
    called.__name__ = name
    settings = {"help_option_names": ["-h", "--help"]}
    decorate: Callable[[Any], Any] = app.command(
        name,
        cls=_Command,
        help=verb.text,
        epilog=f"\b\nExamples:\n{examples}",
        context_settings=settings,
    )
    decorate(called)


def _arguments_by_group(verb: FunctionText, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the verb's function: direct parameters, and a dictionary per group."""
    found = dict[str, Any]()
    for parameter in verb.parameters:
        value = given[parameter.name]
        value = tuple(value or ()) if is_list(parameter.kind) else value
        if parameter.group is None:
            found[parameter.name] = value
        else:
            found.setdefault(parameter.group, {})[parameter.name] = value
    return found


def _typer_parameter(parameter: Parameter) -> Given:
    default = None if is_list(parameter.kind) else parameter.default
    if parameter.kind is Quantity and default is not REQUIRED:
        default = f"{default:g}"  # parsed like a given value
    return Given(
        parameter.name,
        Given.KEYWORD_ONLY,
        default=Given.empty if parameter.default is REQUIRED else default,
        annotation=_annotation(parameter),
    )


def _annotation(parameter: Parameter) -> Any:
    about = parameter.about or _ABOUT.get(parameter.name, "")
    assert about, f"nothing is said of {parameter.name}"
    kind = parameter.kind if parameter.default is REQUIRED else parameter.kind | None
    if parameter.positional:
        name = parameter.name.upper()
        metavar = f"{name.removesuffix('S')}..." if is_list(parameter.kind) else name
        return Annotated[kind, typer.Argument(metavar=metavar, help=about)]
    names = spelled(parameter.name)
    if parameter.kind is bool:
        # A default of None defers to another choice, such as the recipe's: allow --x and --no-x.
        kind = bool if parameter.default is not None else bool | None
        if parameter.default is not False:
            names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
    section = _SECTIONS.get(parameter.name, parameter.section)
    # The value of a repeatable option.
    one = (
        f"<{get_args(parameter.kind)[0].__name__.lower()}>"
        if is_list(parameter.kind)
        else None
    )
    if parameter.kind is Quantity:  # the default is in its help text
        read = partial(read_quantity, option=names[0])
        option = typer.Option(
            *names,
            help=about,
            metavar="<number>",
            rich_help_panel=section,
            parser=read,
            show_default=False,
        )
        return Annotated[kind, option]
    return Annotated[
        kind, typer.Option(*names, help=about, metavar=one, rich_help_panel=section)
    ]
