"""The viewer of attention as an HTML page, in a report, and in a notebook.

Its template, style and script are `reports/viewer.html`, `viewer.css` and `viewer.js`.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from triptych.attending.packing import pack_page
from triptych.attending.page import AttentionPage
from triptych.files import write_text
from triptych.reports import render

PAGE_LIMIT_BYTES = 15_000_000
"""No page is larger. Where the weights are more, a page has the largest of each row, and says so."""

# Tokens, style and script; what is left is for the weights.
_FOR_THE_REST = 1_000_000
_NOTEBOOK_HEIGHT_PIXELS = 900

Told = Callable[[str, int, int], None]


def _untold(what: str, done: int, total: int) -> None:
    """Nobody wants to know."""


def viewer_data(
    page: AttentionPage, limit_bytes: int = PAGE_LIMIT_BYTES, progress: Told = _untold
) -> dict[str, Any]:
    """What `reports/viewer.html` shows, to be put into a report."""
    return pack_page(page, limit_bytes - _FOR_THE_REST, progress)


def attention_html(page: AttentionPage, progress: Told = _untold) -> str:
    """The text of a page that needs no network."""
    data = viewer_data(page, progress=progress)
    return render("attention.html", title=page.title, facts=page.facts, notes=page.notes, data=data)


def write_attention_page(page: AttentionPage, path: Path, progress: Told = _untold) -> None:
    """Write one self-contained HTML file of at most 15 MB."""
    write_text(path, attention_html(page, progress))


def notebook_html(page: AttentionPage) -> str:
    """The page as the output of a notebook's cell: a frame that nothing outside of it can reach into."""
    return (
        f'<iframe title="{escape(page.title)}" sandbox="allow-scripts allow-downloads" '
        f'style="width: 100%; height: {_NOTEBOOK_HEIGHT_PIXELS}px; border: 0" '
        f'srcdoc="{escape(attention_html(page))}"></iframe>'
    )
