"""`triptych explore`."""

import re
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import triptych
from triptych.cli.failures import say
from triptych.cli.signatures import Options
from triptych.face import load


def explore(
    model: str,
    *,
    port: int = 8000,
    over: Path | None = None,
    no_open: bool = False,
    opening: Annotated[Options, "Model", load, "device dtype languages offline"],
) -> None:
    """See one computation of attention on a page, and change it.

    Translate or continue a text, choose a head, and follow one row of its attention from q and k to the next
    token's probabilities. Switches say what if W_Q = W_K, a head is off, or W_QK has rank r. The page is
    computed on this machine and reached from nowhere else; its address keeps what is shown.

    Options:
        port: Port of 127.0.0.1 to listen at.
        over: Measure what heads do over this file, for the gallery. Default: over the text on the page.
        no_open: Print the address and open no browser.

    Examples:
        triptych explore gpt2
        triptych explore runs/mine --no-open --port 9000
    """
    address = f"http://127.0.0.1:{port}/"

    def ready() -> None:
        say(f"exploring {model} at {address} (Ctrl-C ends it)")
        if not no_open:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-._")[:64] or "model"
    opened = {name: load(model, **opening)}
    triptych.serve(opened, port=port, shutdown_timeout=1, over=over, page_only=True, ready=ready)
