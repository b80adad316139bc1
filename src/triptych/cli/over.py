"""What `attend --over` and `inspect --over` share: a text, and what is measured of heads over it."""

import json
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console

from triptych.attending.over import OverText, read_texts
from triptych.cli.progress import progress_bar
from triptych.cli.terminal import Terminal
from triptych.errors import UsageError
from triptych.face import Model
from triptych.reports import Table, render_table, write_csv

OverOption = Annotated[
    Path | None,
    typer.Option(
        "--over",
        help="Measure what heads do over this text: a file or a folder; of translators a file of lines.",
    ),
]
OverTargetsOption = Annotated[
    Path | None,
    typer.Option(
        "--over-targets",
        help="With --over, of translators: the translations, line by line. Default: their own.",
    ),
]
DocumentsOption = Annotated[
    Literal["file", "line", "blank-lines"],
    typer.Option(
        "--documents",
        help="With --over: what a document is in a plain text file. Intervals are over documents.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=2,
        help="With --over: tokens of a window. Default: a run's context, or the model's positions; at most "
        "256.",
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        help="With --over: tokens to read. Default: 65,536, and 8,192 for --worth and --explain.",
    ),
]
WorthOption = Annotated[
    Literal["zero", "mean", "even"] | None,
    typer.Option(
        "--worth",
        help="With --over: the loss without each head. Its output becomes zero, its mean over the text, or "
        "what it would be if it looked evenly.",
    ),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="With --over: how well W_QK, cut to several ranks, explains where heads look, and whether they "
        "write the tokens that they look at.",
    ),
]
_CSV_START = b"stack,layer,head,called,"


class MoreFigures(NamedTuple):
    """What is measured besides where heads look."""

    worth: WorthOption = None
    explain: ExplainOption = False


class OverOptions(NamedTuple):
    """A text to measure heads over, as it is given."""

    over: OverOption = None
    over_targets: OverTargetsOption = None
    documents: DocumentsOption = "file"
    context: ContextOption = None
    tokens: TokensOption = None

    def choice(self, more: MoreFigures) -> "OverChoice | None":
        """The text; None without --over."""
        if self.over is not None:
            return OverChoice(self.over, self, more)
        given = {
            "--over-targets": self.over_targets is not None,
            "--documents": self.documents != "file",
            "--context": self.context is not None,
            "--tokens": self.tokens is not None,
            "--worth": more.worth is not None,
            "--explain": more.explain,
        }
        if found := [name for name, is_given in given.items() if is_given]:
            raise UsageError(f"{found[0]} goes with --over: name a text")
        return None


class OverChoice(NamedTuple):
    """A text to measure heads over, how it is read, and what is measured."""

    text: Path
    how: OverOptions
    more: MoreFigures

    def read(self) -> list[Path]:
        """The files that are read."""
        return [path for path in (self.text, self.how.over_targets) if path is not None]

    def measure(self, model: Model) -> OverText:
        """Measure what the heads of a model do over the text."""
        documents = read_texts(model.reader, self.text, self.how.documents)
        with progress_bar("{task.description}", "reading", of_bytes=False) as tell:
            return model.attend_over(
                documents,
                self.how.over_targets,
                worth=self.more.worth,
                explain=self.more.explain,
                context=self.how.context,
                most_tokens=self.how.tokens,
                progress=tell,
            )


def show_over(found: OverText, csv_file: Path | None, html: Path | None, *, as_json: bool) -> None:
    """Print or write what the heads of a model do over a text."""
    if csv_file is not None:
        write_csv(found.rows(), csv_file)
    if html is not None:
        found.page(html)
    if as_json:
        print(json.dumps(found.record(), allow_nan=False))
        return
    console = Terminal(soft_wrap=True)
    for table in found.tables():
        print_table(table, console)
    for path in (csv_file, html):
        if path is not None:
            console.print(f"written: {path}")


def is_over_csv(path: Path) -> bool:
    """Whether a file has the columns of heads over a text."""
    with path.open("rb") as file:
        return file.readline(1000).startswith(_CSV_START)


def print_table(table: Table, console: Console) -> None:
    """Print a table with its title and its caption."""
    console.print(table.title)
    console.print(render_table(table))
    console.print(f"{table.caption}\n")
