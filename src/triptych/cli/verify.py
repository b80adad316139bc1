"""`triptych verify`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import triptych
from triptych.checkpoints.family import read_family
from triptych.cli.terminal import Terminal
from triptych.cli.verbose import VerboseOption
from triptych.errors import DataError
from triptych.rewriting.planning import local_folder

_HOLDS = {True: "yes", False: "NO", None: "not tried"}


def verify(
    rewritten: Annotated[
        Path, typer.Argument(help="A rewritten checkpoint: its folder or its certificate.json.")
    ],
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="The original checkpoint, local or on the Hub. Without it, fewer claims are checked.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", help="The text that the models were compared on. They are compared on it again."
        ),
    ] = None,
    family: Annotated[
        Path | None, typer.Option("--family", help="A family file that describes both checkpoints.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibrate", help="The calibration text of the rewrite. The steps that used it are repeated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Check a certificate again; exit code 1 if a claim fails."""
    own = None if family is None else read_family(family)
    original = None if against is None else local_folder(against)
    checks = triptych.verify(rewritten, original, text, own, calibration)
    failed = [check for check in checks if check.held is False]
    if as_json:
        print(json.dumps({"held": not failed, "checks": [check._asdict() for check in checks]}))
        if failed:
            sys.exit(1)
        return
    console = Terminal(soft_wrap=True)
    table = Table("claim", "holds", "found")
    for check in checks:
        table.add_row(check.claim, _HOLDS[check.held], check.found)
    console.print(table)
    if failed:
        raise DataError(f"{rewritten}: {len(failed)} of {len(checks)} claims do not hold: {failed[0].claim}")
