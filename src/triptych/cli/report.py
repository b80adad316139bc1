"""`triptych report`."""

from pathlib import Path

import triptych
from triptych.cli.failures import say
from triptych.cli.outputs import Output, require_free
from triptych.seeing.reports import is_page


def report(run: Path, *, html: Path | None = None, force: bool = False) -> None:
    """Write the page of a run: loss curve, samples, heads, attention.

    Options:
        run: The run folder.
        html: The page. Default: report.html in the run folder.
        force: Replace an existing file, even if triptych did not write it.

    Examples:
        triptych report runs/mine
        triptych report runs/mine --html mine.html
    """
    page = run / "report.html" if html is None else html
    if run.exists():  # otherwise the run is what is missing
        require_free([Output(page, is_page)], [], force=force)
    say(f"written: {triptych.report(run, page)}")
