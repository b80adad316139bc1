"""`triptych explore`."""

import re
import threading
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import triptych
from triptych.cli.failures import say
from triptych.cli.outputs import Output, require_free
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_written, progress_bar
from triptych.converting.web import UnfitForPageError, write_web
from triptych.errors import DataError, UsageError
from triptych.model import Model, load
from triptych.running.opening import RECIPE
from triptych.seeing.attending import HeldOutText
from triptych.seeing.reports import is_page, short_name
from triptych.serving.recording import Recording
from triptych.training import read_recipe, task_of


def explore(
    model: str,
    *,
    text: str | None = None,
    port: int = 8000,
    over: Path | None = None,
    held_out: Path | None = None,
    held_out_targets: Path | None = None,
    no_open: bool = False,
    html: Path | None = None,
    force: bool = False,
    opening: Annotated[
        Options, "Model", load, "device dtype languages offline strict family adapter"
    ],
) -> None:
    """See one computation of attention on a page, and change it.

    Translate or continue a text, choose a head, and follow one row of its attention from q and k to the next
    token's probabilities. Switches change the model: W_Q = W_K, a head off, W_QK of rank r. The page is
    computed on this machine, and other machines cannot reach it. Its address stores what is shown.

    Options:
        text: The text to begin with.
        port: Port of 127.0.0.1 to listen at.
        over: Measure what heads do over this file, for the gallery. Default: over the text on the page.
        held_out: Measure what a switch does to the loss on this file, which the model did not learn from; of
            a translator the sentences. A few kB will do. Default: a run's validation text, where it is found.
        held_out_targets: The translations of --held-out, line by line.
        no_open: Print the address and open no browser.
        html: Write the page to this file, and serve nothing. A small model is in the file itself; of another
            model the answers to --text are recorded.
        force: Replace an existing file, even if triptych did not write it.

    Examples:
        triptych explore gpt2
        triptych explore gpt2 --held-out test.txt --text "The king said that" --html king.html
    """
    if held_out_targets is not None and held_out is None:
        raise UsageError(
            "--held-out-targets are the translations of --held-out: give both"
        )
    if html is not None:
        require_free(
            [Output(html, is_page)],
            [Path(model)] if Path(model).exists() else [],
            force=force,
        )
        opened = load(model, **opening)
        given = _held_out(opened, held_out, held_out_targets)
        _write_page(opened, html, text, given)
        print_written([html], Terminal(soft_wrap=True))
        return
    address = f"http://127.0.0.1:{port}/" + (
        "" if text is None else f"#&{urlencode({'text': text})}"
    )

    def ready() -> None:
        say(f"exploring {model} at {address} (Ctrl-C ends it)")
        if not no_open:
            threading.Thread(
                target=webbrowser.open, args=(address,), daemon=True
            ).start()

    own = short_name(model).rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", own).strip("-._")[:64] or "model"
    opened = load(model, **opening)
    given = _held_out(opened, held_out, held_out_targets)
    triptych.serve(
        {name: opened},
        port=port,
        shutdown_timeout=1.0,
        over=over,
        held_out=given,
        page_only=True,
        ready=ready,
    )
    say("stopped")


def _write_page(
    model: Model, path: Path, text: str | None, held_out: HeldOutText | None
) -> None:
    """Write the page with the model in it, or else with recorded answers."""
    try:
        write_web(model.reader, path, text=text or "", held_out=held_out)
    except UnfitForPageError as why:
        if text is None:
            raise UsageError(
                f"{why}; for recorded answers to one text, give --text"
            ) from None
        say(f"{why}; the answers to one text are recorded instead")
    else:
        return
    recording = Recording(model, text, held_out)
    cost = recording.estimate()
    say(
        f"recording {len(recording.layers)} layers and {len(recording.calls)} switches: "
        f"about {cost.seconds:.0f} s and {cost.bytes / 1e6:.1f} MB"
    )
    with progress_bar("{task.description}", "recording", of_bytes=False) as tell:
        recording.write(path, tell)


def _held_out(
    model: Model, text: Path | None, targets: Path | None
) -> HeldOutText | None:
    """Return the given text, or a run's validation text; None without a text."""
    if text is not None:
        return HeldOutText(model.reader, text, targets)
    folder = Path(model.name)
    if not (folder / RECIPE).is_file():
        return None
    try:
        found = HeldOutText(
            model.reader, *task_of(read_recipe(folder / RECIPE)).validation_text(Path())
        )
    except (DataError, UsageError) as error:
        say(
            f"no held-out text: the validation text of {model.name} cannot be read ({error})"
        )
        return None
    say(f"held-out text: {found.num_tokens:,} tokens that the run was validated on")
    return found
