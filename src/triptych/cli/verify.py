"""`triptych verify`."""

import sys
from pathlib import Path

from rich.table import Table

import triptych
from triptych.checkpoints.family import read_family
from triptych.cli.terminal import Terminal, print_json
from triptych.errors import DataError
from triptych.rewriting.planning import local_folder

_HOLDS = {True: "yes", False: "NO", None: "not tried"}


def verify(
    rewritten: Path,
    *,
    against: str | None = None,
    text: Path | None = None,
    family: Path | None = None,
    calibration: Path | None = None,
    as_json: bool = False,
) -> None:
    """Check a certificate again; exit code 1 if a claim fails.

    Options:
        rewritten: A rewritten checkpoint: its folder or its certificate.json.
        against: The original checkpoint, local or on the Hub. Without it, fewer claims are checked.
        text: The text that the models were compared on. They are compared on it again.
        family: A family file that describes both checkpoints.
        calibration: The calibration text of the rewrite. The steps that used it are repeated.

    Examples:
        triptych verify gpt2-half
        triptych verify gpt2-half --against gpt2 --text test.txt
    """
    own = None if family is None else read_family(family)
    original = None if against is None else local_folder(against)
    checks = triptych.verify(rewritten, original, text, own, calibration)
    failed = [check for check in checks if check.held is False]
    if as_json:
        print_json({"held": not failed, "checks": [check._asdict() for check in checks]})
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
