"""`triptych diff`."""

from pathlib import Path
from typing import Annotated

import triptych
from triptych.cli.options import load_model
from triptych.cli.outputs import Output, begins_with, require_free
from triptych.cli.process import keep_freed_memory
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, print_written, progress_bar
from triptych.errors import DataError, UsageError
from triptych.literals import Requirement
from triptych.model import load
from triptych.seeing.difference import JUNIT_START
from triptych.seeing.reports import is_page


def diff(
    a: str,
    b: str,
    *,
    comparing: Annotated[Options, "Options", triptych.diff, "text"],
    require: Requirement = "function",
    within: float | None = None,
    also: str | None = None,
    opening: Annotated[Options, "Options", load, "family offline strict"],
    html: Path | None = None,
    junit: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Compare two models; exit code 1 if they are not the same.

    Weights alone decide that two models compute the same function: the rewrites that lead from A to B are
    found and printed. Otherwise, the first differing part and the kinds of change are printed.

    Files:
        html: Write an HTML page with a row per layer and a cell per head to this file.
        junit: Write a JUnit report with a test per part to this file.
        force: Replace existing files, even if triptych did not write them.

    Options:
        a: A model: a folder, a file, or a name on the Hub.
        b: The model to compare with it.
        require: The weakest verdict with exit code 0.
        within: The largest mean KL divergence on the text in nats; needs --require near.
        also: A third model C, which B may be the mean of with A.
        as_json: Print everything as JSON.

    Examples:
        triptych diff gpt2 gpt2-rewritten
        triptych diff gpt2 gpt2-half --require near --html difference.html
    """
    if within is not None and (require != "near" or comparing["text"] is None):
        raise UsageError("--within goes with --require near and --text")
    text = comparing["text"]
    read = [
        Path(name)
        for name in (a, b, *([] if also is None else [also]))
        if Path(name).exists()
    ]
    read = [path.parent if path.is_file() else path for path in read] + (
        [] if text is None else [Path(text)]
    )
    require_free(
        (Output(html, is_page), Output(junit, begins_with(JUNIT_START))),
        read,
        force=force,
    )
    # One layer after the other is read: freed memory is used again.
    keep_freed_memory()
    models = [
        None if name is None else load_model(name, opening=opening)
        for name in (a, b, also)
    ]
    with progress_bar("{task.description}", "comparing", of_bytes=False) as tell:
        found = triptych.diff(
            models[0], models[1], also=models[2], **comparing, progress=tell
        )
    why = found.why_not(require, within)
    if html is not None:
        found.page(html)
    if junit is not None:
        found.to_junit(junit, require, within)
    if as_json:
        print_json({"held": not why, **found.record()})
    else:
        console = Terminal(soft_wrap=True)
        console.print("\n".join(found.summary()))
        print_written((html, junit), console)
    if why:
        raise DataError(why)
