"""`attend --over`: a text, and what is measured of heads over it."""

from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from triptych.attending.over import OverText, read_texts
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, progress_bar
from triptych.errors import UsageError
from triptych.face import Model
from triptych.reports import Table, render_table, write_csv

Documents = Literal["file", "line", "blank-lines"]
_CSV_START = b"stack,layer,head,called,"


class Over(NamedTuple):
    """A text to measure heads over, how it is read, and what is measured."""

    text: Path  # a file or a folder
    targets: Path | None  # of translators, the translations
    documents: Documents  # what a document is in a plain text file
    measured: Options  # what else `Model.attend_over` takes

    def read(self) -> list[Path]:
        """The files that are read."""
        return [path for path in (self.text, self.targets) if path is not None]

    def measure(self, model: Model) -> OverText:
        """Measure what the heads of a model do over the text."""
        documents = read_texts(model.reader, self.text, self.documents)
        with progress_bar("{task.description}", "reading", of_bytes=False) as tell:
            return model.attend_over(documents, self.targets, **self.measured, progress=tell)


def over_text(text: Path | None, documents: Documents, measured: Options) -> Over | None:
    """The text of `--over`; None without it."""
    targets = measured.pop("targets")
    if text is not None:
        return Over(text, targets, documents, measured)
    given = {"over_targets": targets, **measured, "documents": documents != "file"}
    if found := [name for name, value in given.items() if value]:
        option = found[0].removeprefix("most_").replace("_", "-")
        raise UsageError(f"--{option} goes with --over: name a text")
    return None


def show_over(found: OverText, csv_file: Path | None, html: Path | None, *, as_json: bool) -> None:
    """Print or write what the heads of a model do over a text."""
    if csv_file is not None:
        write_csv(found.rows(), csv_file)
    if html is not None:
        found.page(html)
    if as_json:
        print_json(found.record())
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
