"""All that is measured of the heads of a model over a text: `attend_over(model, documents)`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from triptych.attending.behaviour import Behaviour, figures_of
from triptych.attending.explaining import LayerExplained, explain_text
from triptych.attending.leaving_out import Instead
from triptych.attending.over_text import MOST_TOKENS, cut_windows, measure_behaviour
from triptych.attending.worth import MOST_TOKENS as MOST_TOKENS_OF_WORTH
from triptych.attending.worth import HeadWorth, Worth, measure_worth, require_loss
from triptych.attending.writing import LayerWriting, measure_copies
from triptych.opening import Reader
from triptych.reports import Table
from triptych.text import read_lines
from triptych.text.documents import LanguageCorpusSpec, read_documents, whole_documents

_MOST_SHOWN = 12


@final
@dataclass(frozen=True, eq=False)
class OverText:
    """What the heads of a model do over a text.

    Attributes:
        behaviour: where they look.
        worth: what each is worth; None if it was not asked for.
        explained: how well the parts of their scores explain where they look; empty if not asked for.
        copies: how much they write the tokens that they look at; likewise.
    """

    behaviour: Behaviour
    worth: Worth | None = None
    explained: tuple[LayerExplained, ...] = ()
    copies: tuple[LayerWriting, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One flat record per head: its place, then every figure with its interval."""
        found = {(row["stack"], row["layer"], row["head"]): row for row in self.behaviour.rows()}
        for worth in self.worth.heads if self.worth is not None else ():
            found[worth.stack, worth.layer, worth.head] |= {
                "worth": worth.change,
                "worth_low": worth.low,
                "worth_high": worth.high,
                "added": worth.added,
            }
        for explained in self.explained:
            for row in explained.rows():
                found[row["stack"], row["layer"], row["head"]] |= row
        for copies in self.copies:
            for head, numbers in enumerate(zip(copies.copies, copies.low, copies.high, strict=True)):
                names = ("copies", "copies_low", "copies_high")
                found[copies.stack, copies.layer, head] |= dict(zip(names, map(float, numbers), strict=True))
        columns = dict.fromkeys(name for row in found.values() for name in row)
        return [{name: _finite(row.get(name)) for name in columns} for row in found.values()]

    def record(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        about = self.behaviour
        found: dict[str, Any] = {
            "model": about.model,
            "tokens": about.tokens,
            "context": about.context,
            "units": about.units,
            "num_units": about.num_units,
            "heads": self.rows(),
        }
        if self.worth is not None:
            order = [[head.stack, head.layer, head.head] for head in self.worth.heads]
            found["worth"] = {
                "instead": self.worth.instead,
                "loss": self.worth.loss,
                "tokens": self.worth.tokens,
                "order": order,
            }
        return found

    def tables(self) -> list[Table]:
        """What to print."""
        found = [strongest_table(self.behaviour)]
        if self.worth is not None:
            found.append(worth_table(self.worth))
        if self.explained:
            found.append(explained_table(self.explained, self.copies))
        return found


def attend_over(
    reader: Reader,
    documents: Sequence[str],
    targets: Sequence[str] | None = None,
    *,
    worth: Instead | None = None,
    explain: bool = False,
    context: int | None = None,
    most_tokens: int | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> OverText:
    """Measure what every head of a model does over a text.

    `attend_over(reader, documents).behaviour.summary()` names the heads that look at the previous token, at
    what followed the same token, and so on.
    """
    if worth is not None:
        require_loss(reader)
    windows = cut_windows(reader, documents, targets, context=context, most_tokens=most_tokens or MOST_TOKENS)
    fewer = windows.within(most_tokens or MOST_TOKENS_OF_WORTH)
    behaviour = measure_behaviour(reader, windows, partial(progress, "where heads look"))
    return OverText(
        behaviour,
        measure_worth(reader, fewer, worth, partial(progress, "leaving heads out")) if worth else None,
        explain_text(reader, fewer, partial(progress, "explaining scores")) if explain else (),
        measure_copies(reader, fewer, partial(progress, "reading what heads write")) if explain else (),
    )


def read_texts(
    reader: Reader, path: Path, documents: Literal["file", "line", "blank-lines"] = "file"
) -> list[str]:
    """The documents of a file or a folder; for an encoder-decoder the lines of a file."""
    if reader.opened.translates:
        return read_lines(path)
    spec = LanguageCorpusSpec(files=(str(path),), documents=documents)
    return [*whole_documents(read_documents(spec))]


def strongest_table(behaviour: Behaviour) -> Table:
    """For each thing that heads can be called by, the heads that do it most."""
    rows = []
    figures = {f.name: f for layer in behaviour.layers for f in figures_of(layer.kind) if f.names_head}
    for figure in figures.values():
        for layer, head in behaviour.most(figure.name, 2):
            found = layer.figures[figure.name]
            interval = f"{float(found.low[head]):.2f} to {float(found.high[head]):.2f}"
            called = "yes" if layer.called(head) == figure.title else ""
            value = f"{float(found.value[head]):.2f}"
            rows.append(
                (figure.title, f"{layer.name} head {head}", value, interval, f"{found.even:.2f}", called)
            )
    caption = (
        f"{behaviour.tokens:,} tokens, {behaviour.num_units:,} {behaviour.units}, windows of "
        f"{behaviour.context:,}. The share of a head's weight that does it, its 95 % interval over "
        f"{behaviour.units}, and what a head that looks evenly gives. A head is called by what takes a third "
        "of its weight or more."
    )
    columns = ("what", "head", "share", "interval", "evenly", "called so")
    return Table(title="What heads do", columns=columns, rows=tuple(rows), numeric=(2, 4), caption=caption)


def worth_table(worth: Worth) -> Table:
    """The heads that the loss misses most."""
    shown = worth.heads[:_MOST_SHOWN]
    rows = [(_place(head), f"{head.change:+.4f}", _interval(head), f"{head.added:.3g}") for head in shown]
    none = sum(head.low <= 0 <= head.high for head in worth.heads)
    better = sum(head.high < 0 for head in worth.heads)
    caption = (
        f"Loss {worth.loss:.4f} nats per token over {worth.tokens:,} tokens; without a head (its output: "
        f"{worth.instead}) it rises by so much. Of {len(worth.heads)} heads {none} are not told from 0, and "
        f"without {better} the loss is lower."
    )
    return Table(
        title="What heads are worth",
        columns=("head", "nats per token", "interval", "adds"),
        rows=tuple(rows),
        numeric=(1, 3),
        caption=caption,
    )


def explained_table(explained: Sequence[LayerExplained], copies: Sequence[LayerWriting]) -> Table:
    """Means over the heads of every layer."""
    by_place = {(layer.stack, layer.layer): layer for layer in copies}
    names = list(dict.fromkeys(name for layer in explained for name in layer.figures))
    shares = [name for name in names if name.endswith("_share")]
    nats = [name for name in names if name.endswith("_nats")]
    titles = [name.rpartition("_")[0].replace("_", " ") for name in (*shares, *nats)]
    rows = []
    for layer in explained:
        cells = [f"{layer.stack} {layer.layer}"]
        for name in (*shares, *nats):
            numbers = layer.figures.get(name)
            cells.append("" if numbers is None else f"{float(numbers[0].mean()):.2f}")
        writing = by_place.get((layer.stack, layer.layer))
        cells.append("" if writing is None else f"{float(writing.copies.mean()):.2f}")
        rows.append(tuple(cells))
    caption = (
        "Means over heads. Shares of the variance of the scores along a row; then what is lost, in nats per "
        "query, by looking evenly, by W_QK alone, and with W_QK cut to a rank; last, how much of the weight "
        "is on tokens that the head writes."
    )
    columns = ("layer", *titles, "copies")
    numeric = tuple(range(1, len(columns)))
    return Table(
        title="What explains where heads look",
        columns=columns,
        rows=tuple(rows),
        numeric=numeric,
        caption=caption,
    )


def _finite(value: Any) -> Any:
    """None for numbers that JSON has not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _place(head: HeadWorth) -> str:
    return f"{head.stack} {head.layer} head {head.head}"


def _interval(head: HeadWorth) -> str:
    return f"{head.low:+.4f} to {head.high:+.4f}"
