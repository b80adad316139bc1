"""`triptych verify`."""

import sys
from pathlib import Path
from typing import Annotated

from rich.table import Table

import triptych
from triptych.cli.process import keep_freed_memory
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json
from triptych.errors import DataError
from triptych.rewriting.certificate import read_certificate

_HOLDS = {True: "yes", False: "NO", None: "not tried"}


def verify(
    folder: Path,
    *,
    checking: Annotated[
        Options, "Options", triptych.verify, "against text family calibration"
    ],
    as_json: bool = False,
) -> None:
    """Check a certificate again; exit code 1 if a claim fails.

    The first line is the outcome that the certificate states for the whole model: no change (below 0.0001
    nats a token), below 0.01 nats, noticeable, or ruined (1 nat or more).

    Options:
        folder: A rewritten checkpoint: its folder or its certificate.json.

    Examples:
        triptych verify gpt2-half
        triptych verify gpt2-half --against gpt2 --text test.txt
    """
    keep_freed_memory()
    checks = triptych.verify(folder, **checking)
    failed = [check for check in checks if check.held is False]
    outcome = read_certificate(folder).outcome
    if as_json:
        print_json(
            {
                "held": not failed,
                "outcome": outcome,
                "checks": [check._asdict() for check in checks],
            }
        )
        if failed:
            sys.exit(1)
        return
    console = Terminal(soft_wrap=True)
    console.print(outcome)
    table = Table("claim", "holds", "found")
    for check in checks:
        table.add_row(check.claim, _HOLDS[check.held], check.found)
    console.print(table)
    if failed:
        raise DataError(
            f"{folder}: {len(failed)} of {len(checks)} claims do not hold: {failed[0].claim}"
        )
