"""`triptych verify`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from triptych.certificate_checks import verify_certificate
from triptych.errors import DataError


def verify(
    rewritten: Annotated[Path, typer.Argument(help="The folder of a rewritten checkpoint.")],
    against: Annotated[
        Path | None, typer.Option("--against", help="The original; without it only what is here is checked.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="The text that both models were compared on, to compare again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Try the claims of a certificate again; exit code 1 if one does not hold."""
    checks = verify_certificate(rewritten, against, text)
    failed = [check for check in checks if not check.held]
    if as_json:
        print(json.dumps({"held": not failed, "checks": [check._asdict() for check in checks]}))
        if failed:
            sys.exit(1)
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table = Table("claim", "holds", "found")
    for check in checks:
        table.add_row(check.claim, "yes" if check.held else "NO", check.found)
    console.print(table)
    if failed:
        raise DataError(f"{rewritten}: {len(failed)} of {len(checks)} claims do not hold: {failed[0].claim}")
