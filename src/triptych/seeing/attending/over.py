"""Behaviour of a model's heads over a text: `attend_over(reader, documents)`, as rows, tables and a page."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, final

from triptych.errors import UsageError
from triptych.literals import Documents, Instead, SpecialTokens
from triptych.printable import table_html
from triptych.progress import Progress, untold
from triptych.running.measuring import (
    MOST_TOKENS,
    MOST_TOKENS_OF_WORTH,
    HeadFigures,
    Windows,
    Worth,
    cut_windows,
    given_lines,
    given_texts,
    labelled_texts,
    labelled_windows,
    measure_worth,
    require_worth,
)
from triptych.running.opening import Reader
from triptych.running.text import GivenText
from triptych.seeing.attending.attention_page import HeadNote
from triptych.seeing.attending.behaviour import (
    FIGURES,
    Figure,
    LayerFigures,
    figures_of,
    measure_behaviour,
)
from triptych.seeing.attending.explaining import explain_text
from triptych.seeing.attending.written_tokens import measure_copies
from triptych.seeing.reports.html import (
    short_name,
    write_report,
)
from triptych.seeing.reports.records import (
    Report,
    Table,
)

_MOST_SHOWN = 12
_SECONDS_SHOWN = 100  # longer times are stated in minutes
# Further facts about a head on the page of a text, by column of `OverText.rows`.
_OTHER_FACTS = {
    "worth": "loss without it",
    "content_share": "explained by W_QK alone",
    "copies": "writes what it looks at",
}
# A narrow no-break space.
_NARROW = "\u202f"


@final
@dataclass(frozen=True, eq=False)
class OverText:
    """Behaviour of a model's heads over a text.

    Attributes:
        model: model name.
        layers: layers in the model's order, with every figure of every head.
        units: sampling units of intervals: "documents", or "windows" for a single document.
        num_units: number of units.
        tokens: number of tokens of the text; for a translator, of sources and targets.
        context: maximum tokens per window.
        worth: worth of each head; None if not measured.
    """

    model: str
    layers: tuple[LayerFigures, ...]
    units: str
    num_units: int
    tokens: int
    context: int
    worth: Worth | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat record per head: its position, its name, then every figure with its interval."""
        rows = [*chain.from_iterable(layer.rows() for layer in self.layers)]
        columns = dict.fromkeys(chain.from_iterable(rows))
        return [{name: row.get(name) for name in columns} for row in rows]

    def record(self) -> dict[str, Any]:
        """Return all results as a JSON object."""
        names = ("model", "tokens", "context", "units", "num_units")
        found: dict[str, Any] = {name: getattr(self, name) for name in names} | {
            "heads": self.rows()
        }
        if self.worth is not None:
            order = [[head.stack, head.layer, head.head] for head in self.worth.heads]
            found["worth"] = {
                "instead": self.worth.instead,
                "loss": self.worth.loss,
                f"{self.worth.per}s": self.worth.tokens,
                "order": order,
            }
        return found

    def most(self, figure: str, count: int = 3) -> list[tuple[LayerFigures, int]]:
        """Return the heads with the largest values of a figure, in descending order."""
        found = list[tuple[LayerFigures, int]]()
        for layer in self.layers:
            if figure in layer.figures and layer.figures[figure].count:
                found += [(layer, head) for head in range(layer.num_heads)]
        return sorted(
            found, key=lambda place: -float(place[0].figures[figure].value[place[1]])
        )[:count]

    def summary(self) -> tuple[str, ...]:
        """Describe the heads with the largest values of the naming figures."""
        return tuple(
            f"{title}: {head}, {value} ({interval}; evenly {evenly})"
            + ("" if called else " (no head is called by it)")
            for title, head, value, interval, evenly, called in self._strongest(1)
        )

    def tables(self) -> list[Table]:
        """Return the tables to print: heads of largest figures, worth of heads, and explanations."""
        found = [self._strongest_table()]
        if self.worth is not None:
            found.append(_worth_table(self.worth))
        if "even_nats" in self.layers[0].figures:
            found.append(_explained_table(self.layers))
        return found

    def page(self, path: str | Path) -> None:
        """Write a page with the tables of `tables`, then every head with every figure."""
        write_report(self.report(), Path(path))

    def report(self) -> Report:
        """Return the page's contents."""
        facts = (
            ("model", self.model),
            ("tokens", f"{self.tokens:,}"),
            (self.units, f"{self.num_units:,}"),
            ("longest window, tokens", f"{self.context:,}"),
        )
        tables = (*self.tables(), *self._head_tables())
        return Report(
            title=f"What the heads of {short_name(self.model)} do",
            summary=" ".join(self._answer()),
            maps=self._maps(),
            facts=facts,
            tables=tables,
        )

    def _answer(self) -> Iterator[str]:
        """Yield sentences on the names of all heads, and on the head with the largest worth."""
        called = Counter[str]()
        for layer in self.layers:
            called.update(map(layer.called, range(layer.num_heads)))
        unnamed = called.pop("", 0)
        total = called.total() + unnamed
        named = ", ".join(f"{title} ({count})" for title, count in called.most_common())
        if named:
            give = "head gives" if called.total() == 1 else "heads give"
            most = f"{called.total()} of {total} {give} a third of the weight or more"
            yield f"{most} to one kind of key: {named}."
        else:
            yield f"None of the {total} heads gives a third of its weight to one kind of key."
        if self.worth is not None:
            yield _worth_in_words(self.worth)

    def _maps(self) -> dict[str, Any]:
        """Return the data of the map of layers × heads, beginning with the names of the heads."""
        figures = _shown_figures(self.layers)
        titles = [figure.title for figure in FIGURES if figure.names_head]
        names = {
            "name": "called",
            "title": "name of the head",
            "meaning": "The kind of key with most of a head's weight, if it is a third or more, and more "
            "than a head that looks evenly gives it.",
            "names": titles,
        }
        groups: dict[str, list[str]] = {"What it is called": ["called"]}
        for name, (_, _, group) in figures.items():
            groups.setdefault(group, []).append(name)
        layers = [_layer_data(layer, [*figures], titles) for layer in self.layers]
        named = chain.from_iterable(layer["figures"]["called"] for layer in layers)
        is_named = any(number is not None for number in named)
        first = "called" if is_named else "worth" if "worth" in figures else "entropy"
        return {
            "first": first,
            "measures": [
                names,
                *(
                    {"name": name, "title": title, "meaning": meaning}
                    for name, (title, meaning, _) in figures.items()
                ),
            ],
            "groups": [*groups.items()],
            "models": [{"name": self.model, "layers": layers}],
        }

    def notes(self) -> dict[tuple[str, int, int], HeadNote]:
        """Return the notes on heads for the page of a text, by kind, layer and head."""
        titles = {
            figure.name: figure.title for figure in FIGURES if _is_told(figure)
        } | _OTHER_FACTS
        return {
            (row["stack"], row["layer"], row["head"]): HeadNote(
                row["called"],
                tuple(
                    (title, _fact(row, name))
                    for name, title in titles.items()
                    if row.get(name) is not None
                ),
            )
            for row in self.rows()
        }

    def notes_origin(self) -> str:
        """Return a sentence on the origin of the notes on heads."""
        return (
            f"What is said of heads was measured over {self.tokens:,} tokens of another text "
            f"({self.num_units:,} {self.units}, windows of {self.context:,}): means with 95 % "
            f"intervals over {self.units}, and what looking evenly would give."
        )

    def __repr__(self) -> str:
        lines = [
            f"What the heads of {self.model} do over {self.tokens:,} tokens, {self.num_units} {self.units}"
        ]
        return "\n".join(
            (
                *lines,
                *(f"  {line}" for line in self.summary()[:5]),
                "  rows(), tables(), page(path)",
            )
        )

    def _repr_html_(self) -> str:
        found = self._strongest_table()
        return table_html(found.title, found.rows, found.columns)

    def _strongest(self, count: int) -> Iterator[tuple[str, str, str, str, str, bool]]:
        """Yield the heads with the largest values of each naming figure."""
        every = chain.from_iterable(figures_of(layer.kind) for layer in self.layers)
        figures = {figure.name: figure for figure in every if figure.names_head}
        for figure in figures.values():
            for layer, head in self.most(figure.name, count):
                found = layer.figures[figure.name]
                yield (
                    figure.title,
                    f"{layer.name} head {head}",
                    f"{float(found.value[head]):.2f}",
                    _ends(found, head, ".2f"),
                    f"{found.even:.2f}",
                    layer.called(head) == figure.title,
                )

    def _strongest_table(self) -> Table:
        rows = tuple(
            (*cells, "yes" if called else "") for *cells, called in self._strongest(2)
        )
        caption = (
            f"{self.tokens:,} tokens, {self.num_units:,} {self.units}, windows of {self.context:,}. "
            f"Share: of the head's weight, with a 95 % interval over {self.units}. Evenly: the share of a "
            "head that looks at all keys alike. Named: a head with a third or more is named after it."
        )
        columns = ("what", "head", "share", "interval", "evenly", "named")
        return Table("What heads do", columns, rows, caption, (2, 4))

    def _head_tables(self) -> Iterator[Table]:
        """Yield tables of attended kinds of keys and of distances for every kind of attention."""
        for stack in dict.fromkeys(layer.stack for layer in self.layers):
            own = [layer for layer in self.layers if layer.stack == stack]
            told = [figure for figure in figures_of(own[0].kind) if _is_told(figure)]
            yield _heads_table(
                f"Heads of {stack} attention: where they look", own, told
            )
            if bands := [
                figure for figure in figures_of(own[0].kind) if not _is_told(figure)
            ]:
                yield _heads_table(
                    f"Heads of {stack} attention: how far away they look", own, bands
                )


def attend_over(
    reader: Reader,
    text: GivenText | Path | Sequence[GivenText],
    targets: str | int | Path | Sequence[str | int] | None = None,
    *,
    documents: Documents = "file",
    worth: Instead | None = None,
    explain: bool = False,
    context: int | None = None,
    most_tokens: int | None = None,
    special_tokens: SpecialTokens = "tokens",
    progress: Progress = untold,
) -> OverText:
    """Measure the behaviour of every head of a model over a text, its file, or several documents.

    `attend_over(reader, documents).summary()` names the heads attending to the previous token, to the token
    after an earlier occurrence of the same token, and so on.
    """
    if most_tokens is not None and most_tokens < 1:
        raise UsageError(
            f"the number of tokens to read is {most_tokens}: it has to be 1 or more"
        )
    most = most_tokens or MOST_TOKENS
    if worth is not None and not reader.why_no_classes:
        if documents != "file" or context is not None:
            option = "context" if context is not None else "documents"
            raise UsageError(
                f"{option} is for texts without labels: leave it out, or measure without worth"
            )
        require_worth(reader, of_classes=True)
        # A file alone has labelled lines.
        labelled = (
            labelled_texts(reader, None, text)
            if targets is None
            else labelled_texts(reader, text, targets)
        )
        windows = labelled_windows(reader, labelled, special_tokens).within(most)
    else:
        texts = given_texts(reader, text, documents)
        lines = None if targets is None else given_lines(targets)
        if worth is not None:
            require_worth(reader)
        windows = cut_windows(
            reader,
            texts,
            lines,
            context=context,
            most_tokens=most,
            special_tokens=special_tokens,
        )
    # Worth and explanations are slower and use fewer windows.
    fewer = windows.within(most_tokens or MOST_TOKENS_OF_WORTH)
    measured = [
        measure_behaviour(reader, windows, partial(progress, "where heads look"))
    ]
    found = None
    if worth is not None:
        found = _measure_worth(reader, fewer, worth, progress)
        measured.append(found.figures())
    if explain:
        measured.append(
            explain_text(reader, fewer, partial(progress, "explaining scores"))
        )
        measured.append(
            measure_copies(reader, fewer, partial(progress, "reading what heads write"))
        )
    layers = []
    for place in measured[0]:
        figures = dict(
            chain.from_iterable(one.get(place, {}).items() for one in measured)
        )
        layers.append(LayerFigures(*place, figures))
    return OverText(
        reader.name,
        tuple(layers),
        windows.units,
        windows.num_units,
        windows.num_tokens,
        windows.context,
        found,
    )


def _measure_worth(
    reader: Reader, windows: Windows, instead: Instead, progress: Progress
) -> Worth:
    """Measure the worth of heads; the progress states the expected time before it begins."""
    label = "leaving heads out"

    def expect(seconds: float) -> None:
        nonlocal label
        in_words = (
            f"{seconds:.0f} s"
            if seconds < _SECONDS_SHOWN
            else f"{seconds / 60:.0f} min"
        )
        label = f"{label}, about {in_words} in all"
        progress(label, 0, 1)

    def tell(done: int, total: int) -> None:
        progress(label, done, total)

    return measure_worth(reader, windows, instead, tell, expect=expect)


def _shown_figures(
    layers: Sequence[LayerFigures],
) -> dict[str, tuple[str, str, str]]:
    """Return title, meaning and group of every figure of the map."""
    known = {figure.name: figure for figure in FIGURES}
    found = {}
    for name in dict.fromkeys(chain.from_iterable(layer.figures for layer in layers)):
        if name in known:
            group = "Where it looks" if _is_told(known[name]) else "How far it looks"
            found[name] = (known[name].title, known[name].meaning, group)
        else:
            found[name] = (
                _title(name),
                "",
                "What it is worth, and what explains it",
            )
    return found


def _title(name: str) -> str:
    """Return the words for a figure of worth, or of an explanation of the scores."""
    if name in _OTHER_FACTS:
        return _OTHER_FACTS[name]
    if name == "added":
        return "length of what it adds"
    words = name.removesuffix("_share").removesuffix("_nats").replace("_", " ")
    if name.endswith("_share"):
        return f"share of the scores: {words}"
    return f"nats lost: {words}" if name.endswith("_nats") else words


def _worth_in_words(worth: Worth) -> str:
    most = worth.heads[0]
    if most.low <= 0:
        return "The loss does not clearly rise without any single head."
    return (
        f"The loss rises most without {most.stack} {most.layer}, head {most.head}: "
        f"{most.change:+.3f} nats per {worth.per} [{most.low:+.3f}, {most.high:+.3f}]."
    )


def _layer_data(
    layer: LayerFigures, names: Sequence[str], titles: Sequence[str]
) -> dict[str, Any]:
    """Return a layer for the map: a value per head by figure, and their intervals."""
    called = [layer.called(head) for head in range(layer.num_heads)]
    nothing = [None] * layer.num_heads
    figures = {
        name: _digits(layer.figures[name].value.tolist())
        if name in layer.figures
        else nothing
        for name in names
    }
    intervals = {}
    for name, figure in layer.figures.items():
        ends = [
            None if end is None else _digits(end.tolist())
            for end in (figure.low, figure.high)
        ]
        even = None if figure.even is None else _digits([figure.even])[0]
        intervals[name] = {"low": ends[0], "high": ends[1], "even": even}
    return {
        "name": layer.name,
        "num_heads": layer.num_heads,
        "heads": [*range(layer.num_heads)],
        "figures": figures
        | {"called": [titles.index(one) if one else None for one in called]},
        "intervals": intervals,
    }


def _digits(values: Sequence[float]) -> list[float | None]:
    """Round to four digits; NaN becomes None, as JSON cannot represent it."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def _worth_table(worth: Worth) -> Table:
    """Return a table of the heads with the largest increase of the loss when removed."""
    rows = tuple(
        (
            f"{head.stack} {head.layer} head {head.head}",
            f"{head.change:+.4f}",
            f"{head.low:+.4f} to {head.high:+.4f}",
            f"{head.added:.3g}",
        )
        for head in worth.heads[:_MOST_SHOWN]
    )
    # Heads without a clear effect, and heads with a lower loss when removed.
    none = sum(head.low <= 0 <= head.high for head in worth.heads)
    better = sum(head.high < 0 for head in worth.heads)
    caption = (
        f"The loss is {worth.loss:.4f} nats per {worth.per} over {worth.tokens:,} {worth.per}s. The table "
        f"has its rise without each head (output: {worth.instead}). The intervals of {none} of "
        f"{len(worth.heads)} heads include 0. Without {better} heads the loss is lower."
    )
    columns = ("head", f"nats per {worth.per}", "interval", "adds")
    return Table("What heads are worth", columns, rows, caption, (1, 3))


def _explained_table(layers: Sequence[LayerFigures]) -> Table:
    """Return a table of means over the heads of every layer."""
    # Order of columns: shares, divergences, copies.
    names = list(dict.fromkeys(chain.from_iterable(layer.figures for layer in layers)))
    shown = [name for name in names if name.endswith("_share")]
    shown += [name for name in names if name.endswith("_nats")]
    shown += ["copies"] if "copies" in names else []
    rows = []
    for layer in layers:
        found = (layer.figures.get(name) for name in shown)
        rows.append(
            (
                layer.name,
                *(
                    "" if one is None else f"{float(one.value.mean()):.2f}"
                    for one in found
                ),
            )
        )
    caption = (
        "Means over heads. First the shares of the variance of the scores along a row; then the loss in nats "
        "per query of looking evenly, of W_QK alone, and of W_QK cut to a rank; last the share of the weight "
        "on tokens that the head writes."
    )
    titles = (
        name.removesuffix("_share").removesuffix("_nats").replace("_", " ")
        for name in shown
    )
    columns = ("layer", *titles)
    numeric = tuple(range(1, len(columns)))
    return Table(
        "What explains where heads look", columns, tuple(rows), caption, numeric
    )


def _is_told(figure: Figure) -> bool:
    """Return True if a figure is shown in summaries: distance bands are too many."""
    return not figure.name.startswith("distance_")


def _fact(row: dict[str, Any], name: str) -> str:
    sign, digits = ("+", 4) if name == "worth" else ("", 2)
    value, low, high = (
        f"{row[name + end]:{sign}.{digits}f}" for end in ("", "_low", "_high")
    )
    even = row.get(f"{name}_even")
    return f"{value} [{low}, {high}]" + ("" if even is None else f", evenly {even:.2f}")


def _heads_table(
    title: str, layers: Sequence[LayerFigures], figures: Sequence[Figure]
) -> Table:
    rows: list[tuple[str, ...]] = []
    evenly: list[str] = []
    for layer in layers:
        found = [layer.figures[figure.name] for figure in figures]
        # Layers with equal visible keys share this line.
        if (
            even := [f"{one.even:.2f}" if one.count else "" for one in found]
        ) != evenly:
            rows.append(
                (f"evenly, from {layer.layer}.0" if evenly else "evenly", "", *even)
            )
            evenly = even
        for head in range(layer.num_heads):
            cells = (
                f"{one.value[head]:.2f} [{_ends(one, head, '.2f', f',{_NARROW}')}]"
                if one.count
                else ""
                for one in found
            )
            rows.append((f"{layer.layer}.{head}", layer.called(head), *cells))
    return Table(
        title=title,
        columns=("head", "called", *(figure.title for figure in figures)),
        rows=tuple(rows),
        caption="Heads are LAYER.HEAD. Means over the queries to which a figure applies, 95 % intervals; "
        "evenly: a head that looks at all visible keys alike. Columns are shaded from lowest to highest.",
        shaded=tuple(range(2, 2 + len(figures))),
    )


def _ends(figure: HeadFigures, head: int, form: str, between: str = " to ") -> str:
    assert figure.low is not None
    assert figure.high is not None
    return f"{float(figure.low[head]):{form}}{between}{float(figure.high[head]):{form}}"
