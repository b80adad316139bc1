"""A table on the terminal, and the record behind it as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.figures import Summary
from benchmarks.harness.machine import describe_code, describe_machine, package_versions, today
from triptych.files import write_text


@dataclass(frozen=True)
class Page:
    """What a table shows and keeps.

    Attributes:
        name: of the table; its file is `NAME.json`.
        title: what is measured, in one line.
        columns: headings; all but the first `num_texts` hold numbers.
        rows: cells, as text.
        notes: lines below the table.
        record: everything, for a machine to read; raw figures included.
        num_texts: columns of text, from the left.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    record: dict[str, Any]
    num_texts: int = 2


def show(page: Page, console: Console) -> None:
    """Print the table with its notes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=page.title, title_justify="left")
    for number, name in enumerate(page.columns):
        is_text = number < page.num_texts
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in page.rows:
        table.add_row(*row)
    console.print(table)
    for note in page.notes:
        console.print(note, highlight=False)
    console.print()


def markdown(page: Page, about: str) -> str:
    """The table with its notes, for a page."""
    rules = ["---" if place < page.num_texts else "---:" for place in range(len(page.columns))]
    lines = [[*page.columns], rules, *([cell.replace("|", "\\|") for cell in row] for row in page.rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "".join(f"\n- {note.strip()}" for note in (*page.notes, about))
    return f"# {page.title}\n\n{table}\n{notes}\n"


def write(page: Page, folder: Path, *, root: Path, python: Path, how: dict[str, Any]) -> Path:
    """Write the record, with machine, versions, commit and date; where it is. The table goes beside it.

    Args:
        page: the table.
        folder: made if need be.
        root: the repository.
        python: of the environment with the peers.
        how: what the command was asked for: rounds and so on.
    """
    record = {
        "table": page.name,
        "date": today(),
        "machine": describe_machine(),
        "code": describe_code(root),
        "versions": package_versions(python),
        "how": how,
        **page.record,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{page.name}.json"
    write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    code = record["code"]
    about = f"{record['date']}, commit {code['commit']}; every figure in {path.name}."
    write_text(path.with_suffix(".md"), markdown(page, about))
    return path


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands marked; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def spread(summary: Summary | None, digits: int = 0) -> str:
    """`median (low–high)`; of a single sample, the sample."""
    if summary is None:
        return "–"
    if len(summary.samples) == 1:
        return f"{summary.median:,.{digits}f}"
    return f"{summary.median:,.{digits}f} ({summary.low:,.{digits}f}–{summary.high:,.{digits}f})"
