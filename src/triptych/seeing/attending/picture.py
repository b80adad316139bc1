"""A picture of the matrix of one head."""

from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from triptych.printable import printable, shortened
from triptych.running.measuring import (
    HeadWeights,
    bin_width,
)
from triptych.seeing.attending.attention_page import ViewedKind

_MOST_TOKENS = 96
"""Above this number of tokens, cells are groups of tokens, labelled by position only."""

_MARK = "triptych"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_ZERO = (0xF4, 0xF1, 0xE8)
_ONE = (0x14, 0x30, 0x4F)
_INK, _MUTED, _MARKED = "#1d2733", "#5c6670", "#7a4fa3"
_MARGIN = 8
_LABEL_CHARACTERS = 16
_LARGEST_CELL = 28
_SMALLEST_CELL = 7
_WIDTH = 640


def head_svg(kind: ViewedKind, title: str = "") -> str:
    """Draw the weights of the first head: a row per query token, darker for larger weights.

    The shade is the square root of the weight, as on the page. Above 96 tokens, a cell is the weight between
    two groups of tokens: a sum over keys, a mean over queries.
    """
    found = kind.layers[0].heads[0].map
    is_grouped = max(found.num_queries, found.num_keys) > _MOST_TOKENS
    cells = found.overview if is_grouped else _all_weights(found)
    cell = min(_LARGEST_CELL, max(_SMALLEST_CELL, _WIDTH // max(*cells.shape, 1)))
    marked_query, marked_key = kind.marked
    row_labels = _labels(kind.query_tokens, marked_query, is_grouped)
    column_labels = _labels(kind.key_tokens, marked_key, is_grouped)
    # Margins depend on the longest label.
    font_size = min(12, max(7, cell - 1))
    longest = max(
        (len(text) for _, text, _ in [*row_labels, *column_labels]), default=0
    )
    left = top = _MARGIN + int(longest * font_size * 0.62) + 6
    top += 24 if title else 0
    width = left + cells.shape[1] * cell + _MARGIN + 24
    height = top + cells.shape[0] * cell + _MARGIN
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": str(width),
            "height": str(height),
            "viewBox": f"0 0 {width} {height}",
            "font-family": _FONT,
            "font-size": str(font_size),
            "data-generator": _MARK,
        },
    )
    _add_element(svg, "title", text=title or "attention weights")
    _add_element(svg, "rect", width=width, height=height, fill="#ffffff")
    if title:
        _add_element(
            svg, "text", title, x=_MARGIN, y=20, fill=_INK, **{"font-size": 13}
        )
    _draw_cells(svg, cells, left, top, cell)
    for place, text, colour in row_labels:
        y = top + (place + 0.5) * cell + font_size * 0.35
        _add_element(
            svg,
            "text",
            text,
            x=left - 5,
            y=round(y, 1),
            fill=colour,
            **{"text-anchor": "end"},
        )
    for place, text, colour in column_labels:
        x = round(left + (place + 0.5) * cell + font_size * 0.35, 1)
        turned = f"translate({x} {top - 5}) rotate(-90)"
        _add_element(svg, "text", text, fill=colour, transform=turned)
    return ET.tostring(svg, encoding="unicode") + "\n"


def is_picture(path: Path) -> bool:
    """Return True if a file is a picture made by triptych."""
    with path.open("rb") as file:
        start = file.read(1024)
    return f'data-generator="{_MARK}"'.encode() in start


def _draw_cells(
    svg: ET.Element, cells: NDArray[np.float32], left: int, top: int, cell: int
) -> None:
    rows, columns = cells.shape
    blank = _colour_of(0.0)
    _add_element(
        svg, "rect", x=left, y=top, width=columns * cell, height=rows * cell, fill=blank
    )
    inset = 1 if cell > 12 else 0.5
    group = ET.SubElement(svg, "g")
    # Cells in the colour of the background are omitted.
    for (row, column), weight in np.ndenumerate(cells):
        if (colour := _colour_of(float(weight))) != blank:
            x = left + column * cell
            y = top + row * cell
            side = cell - inset
            rectangle = _add_element(
                group, "rect", x=x, y=y, width=side, height=side, fill=colour
            )
            if rows * columns <= 40 * 40:  # tooltip in browsers
                _add_element(rectangle, "title", text=f"{weight:.3f}")


def _all_weights(of: HeadWeights) -> NDArray[np.float32]:
    if of.keys is None:
        return of.weights
    weights = np.zeros((of.num_queries, of.num_keys), np.float32)
    np.put_along_axis(weights, of.keys.astype(np.int64), of.weights, 1)
    return weights


def _labels(
    tokens: tuple[str, ...], marked: int | None, is_grouped: bool
) -> list[tuple[int, str, str]]:
    """Return position, text and colour of every token's label, or of some positions if grouped.

    `marked` is the first token in the other colour.
    """
    if is_grouped:
        width = bin_width(len(tokens))
        step = max(1, -(-len(tokens) // width) // 8)
        return [
            (i, f"{i * width:,}", _MUTED)
            for i in range(0, -(-len(tokens) // width), step)
        ]
    found = []
    for i, token in enumerate(tokens):
        text = (
            token.strip()
            or token.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
            or "∅"
        )
        text = shortened(
            text, _LABEL_CHARACTERS
        )  # XML cannot represent all characters of tokens
        found.append((i, text, _INK if marked is None or i < marked else _MARKED))
    return found


def _colour_of(weight: float) -> str:
    share = min(1.0, max(0.0, weight)) ** 0.5
    mixed = (
        round(zero + (one - zero) * share)
        for zero, one in zip(_ZERO, _ONE, strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _add_element(
    parent: ET.Element, tag: str, text: str = "", **attributes: object
) -> ET.Element:
    node = ET.SubElement(
        parent, tag, {name: printable(str(value)) for name, value in attributes.items()}
    )
    node.text = printable(text) or None
    return node
