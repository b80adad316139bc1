"""What heads do over a text, on a page: tables of all heads, and what the viewer says of each head."""

from collections.abc import Iterator, Sequence
from typing import Any

from triptych.attending.attention import HeadNote
from triptych.attending.behaviour import FIGURES, Behaviour, Figure, HeadFigures, LayerBehaviour, figures_of
from triptych.attending.over import OverText
from triptych.reports import Report, Table

# What else a head's facts have, by column of `OverText.rows`.
_OTHER_FACTS = {
    "worth": "loss without it",
    "content_share": "explained by W_QK alone",
    "copies": "writes what it looks at",
}
_SIGNED = ("worth",)
# Does not break a line.
_NARROW = "\u202f"


def over_report(found: OverText) -> Report:
    """A page of tables: the heads that do each thing most, then every head with every figure."""
    about = found.behaviour
    facts = (
        ("tokens", f"{about.tokens:,}"),
        (about.units, f"{about.num_units:,}"),
        ("longest window, tokens", f"{about.context:,}"),
    )
    return Report(
        title=f"What the heads of {about.model} do",
        facts=facts,
        tables=(*found.tables(), *_head_tables(found)),
    )


def head_notes(found: OverText) -> dict[tuple[str, int, int], HeadNote]:
    """What the page of a text says of its heads, by kind, layer and head: for `Attention.page(notes=…)`."""
    titles = {figure.name: figure.title for figure in FIGURES if _is_told(figure)} | _OTHER_FACTS
    return {
        (row["stack"], row["layer"], row["head"]): HeadNote(
            row["called"],
            tuple((title, _fact(row, name)) for name, title in titles.items() if row.get(name) is not None),
        )
        for row in found.rows()
    }


def notes_origin(behaviour: Behaviour) -> str:
    """A sentence on where the notes of heads come from."""
    return (
        f"What is said of heads was measured over {behaviour.tokens:,} tokens of another text "
        f"({behaviour.num_units:,} {behaviour.units}, windows of {behaviour.context:,}): means with 95 % "
        f"intervals over {behaviour.units}, and what looking evenly would give."
    )


def _is_told(figure: Figure) -> bool:
    """Whether a figure is no band of distances, which are many."""
    return not figure.name.startswith("distance_")


def _fact(row: dict[str, Any], name: str) -> str:
    sign, digits = ("+", 4) if name in _SIGNED else ("", 2)
    value, low, high = (f"{row[name + end]:{sign}.{digits}f}" for end in ("", "_low", "_high"))
    even = row.get(f"{name}_even")
    return f"{value} [{low}, {high}]" + ("" if even is None else f", evenly {even:.2f}")


def _head_tables(found: OverText) -> Iterator[Table]:
    """For every kind of attention what its heads look at, and how far away it is."""
    layers = found.behaviour.layers
    for stack in dict.fromkeys(layer.stack for layer in layers):
        own = [layer for layer in layers if layer.stack == stack]
        told = [figure for figure in figures_of(own[0].kind) if _is_told(figure)]
        yield _table(f"Heads of {stack} attention: where they look", own, told)
        if bands := [figure for figure in figures_of(own[0].kind) if not _is_told(figure)]:
            yield _table(f"Heads of {stack} attention: how far away they look", own, bands)


def _table(title: str, layers: Sequence[LayerBehaviour], figures: Sequence[Figure]) -> Table:
    rows: list[tuple[str, ...]] = []
    evenly: list[str] = []
    for layer in layers:
        found = [layer.figures[figure.name] for figure in figures]
        # Layers that see the same keys have the same line.
        if (even := [f"{one.even:.2f}" if one.count else "" for one in found]) != evenly:
            rows.append((f"evenly, from {layer.layer}.0" if evenly else "evenly", "", *even))
            evenly = even
        for head in range(layer.num_heads):
            cells = [_cell(one, head) for one in found]
            rows.append((f"{layer.layer}.{head}", layer.called(head), *cells))
    return Table(
        title=title,
        columns=("head", "called", *(figure.title for figure in figures)),
        rows=tuple(rows),
        caption="LAYER.HEAD. Means over the queries that can show it, with 95 % intervals; evenly: what a "
        "head that looks at all visible keys alike gives.",
    )


def _cell(figure: HeadFigures, head: int) -> str:
    if not figure.count:
        return ""
    return f"{figure.value[head]:.2f} [{figure.low[head]:.2f},{_NARROW}{figure.high[head]:.2f}]"
