"""Attention, translations and tables for the terminal, as rich renderables."""

from collections.abc import Sequence
from functools import partial

from rich import box
from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from triptych.printable import shortened
from triptych.seeing.reports.records import AttentionPicture, TranslationSample
from triptych.seeing.reports.records import Table as TableRecord

# Characters show the weight without colours, colours show it for narrow characters.
_SHADES = (" ", "·", "░", "▒", "▓", "█")
_COLOURS = (
    "grey35",
    "grey50",
    "steel_blue",
    "deep_sky_blue3",
    "deep_sky_blue1",
    "bright_white",
)
_token = partial(shortened, most=14)


def render_attention(picture: AttentionPicture, head: int | None = None) -> Group:
    """Draw a heat map: a row for each target token, a column with a vertical label for each source token."""
    if head is not None and not 0 <= head < picture.num_heads:
        raise ValueError(
            f"there is no head {head}; {picture.title!r} has heads 0–{picture.num_heads - 1}"
        )
    weights = picture.mean_over_heads() if head is None else picture.weights[head]
    which = f"mean of {picture.num_heads} heads" if head is None else f"head {head}"
    table = Table(box=None, padding=(0, 0), pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    height = max((len(_token(token)) for token in picture.source_tokens), default=0)
    for token in picture.source_tokens:
        # A vertical label is two characters wide at any length.
        letters = "\n".join(_token(token).rjust(height))
        table.add_column(Text(letters, style="bold"), width=2, no_wrap=True)
    for token, row in zip(picture.target_tokens, weights, strict=True):
        table.add_row(
            Text(f"{_token(token)} │", style="bold"),
            *(_cell(float(weight)) for weight in row),
        )
    # rich would fold the table's title to the width of the map.
    return Group(Text(f"{picture.title} ({which})"), table)


def render_samples(samples: Sequence[TranslationSample]) -> Table:
    """Return a table of source, translation, reference and their exact agreement."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("source", "translation", "reference", ""):
        table.add_column(name, overflow="fold")
    marks = {
        None: Text(""),
        True: Text("✓", style="green"),
        False: Text("✗", style="red"),
    }
    for sample in samples:
        # Text objects: plain strings may contain rich's markup, such as "[red]".
        table.add_row(
            Text(sample.source),
            Text(sample.hypothesis),
            Text(sample.reference or ""),
            marks[sample.is_exact],
        )
    return table


def render_table(record: TableRecord) -> Table:
    """Render a table record without title and caption; the header is omitted without column names."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_header=any(record.columns),
    )
    for number, name in enumerate(record.columns):
        is_numeric = number in record.numeric
        justify: JustifyMethod = "right" if is_numeric else "left"
        table.add_column(Text(name), justify=justify, no_wrap=is_numeric)
    for row in record.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _cell(weight: float) -> Text:
    level = min(int(weight * len(_SHADES)), len(_SHADES) - 1)
    return Text(_SHADES[level] * 2, style=_COLOURS[level])
