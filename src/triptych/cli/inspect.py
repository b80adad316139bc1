"""`triptych inspect`."""

import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from triptych.checkpoints.family import read_family
from triptych.cli.groups import grouped
from triptych.cli.options import MODEL, open_model
from triptych.cli.outputs import ForceOption, Output, require_free
from triptych.cli.over import write_rows
from triptych.cli.progress import progress_bar
from triptych.cli.selection import numbers
from triptych.cli.terminal import Terminal
from triptych.cli.verbose import VerboseOption
from triptych.files import write_text
from triptych.inspection import MEASURES, Inspection
from triptych.inspection.heads_page import heads_page
from triptych.inspection.pages import (
    average_lines,
    averages,
    near_copies,
    outliers,
    shaded_map,
    side_by_side,
    summary,
)
from triptych.reports import is_page, is_parquet, render_table, write_parquet
from triptych.training.parallel import do_each, launched

_CSV_START = b"checkpoint,stack,layer,kind,head,module,"
_MAPS = ("qk_effective_rank", "ov_effective_rank", "qk_times_chance", "qk_symmetric_share", "ov_copying")


CheckpointsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="CHECKPOINT...",
        help=f"{MODEL} Or several, side by side.",
    ),
]
LayersOption = Annotated[
    str | None, typer.Option("--layers", help="Layers to read: 0,3 or 0-5. Default: all.")
]
HeadsOption = Annotated[str | None, typer.Option("--heads", help="Heads to read: 0,3 or 0-5. Default: all.")]
CompareOption = Annotated[str | None, typer.Option("--compare", help="Another checkpoint to compare with.")]
FamilyOption = Annotated[
    Path | None, typer.Option("--family", help="A family file that describes the checkpoints.")
]
IgnoreRotaryOption = Annotated[
    bool,
    typer.Option("--ignore-rotary", help="Measure W_Q W_Kᵀ of rotary heads without the rotation."),
]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write an HTML page to this file.")]
CsvOption = Annotated[Path | None, typer.Option("--csv", help="Write one row per head to this CSV file.")]
ParquetOption = Annotated[
    Path | None, typer.Option("--parquet", help="Write one row per head to this Parquet file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


class _Reading(NamedTuple):
    """What of the checkpoints is measured."""

    layers: LayersOption = None
    heads: HeadsOption = None
    compare: CompareOption = None
    family: FamilyOption = None
    ignore_rotary: IgnoreRotaryOption = False

    def inspect(self, name: str) -> Inspection:
        """Measure a checkpoint."""
        family = None if self.family is None else read_family(self.family)
        with progress_bar("reading {task.description}", name) as tell:
            return open_model(name, family=family).inspect(
                layers=None if self.layers is None else numbers(self.layers, "--layers"),
                heads=None if self.heads is None else numbers(self.heads, "--heads"),
                ignore_rotary=self.ignore_rotary,
                progress=tell,
            )


class _Files(NamedTuple):
    """Where the options want the figures; None for those that were not given."""

    html: HtmlOption = None
    csv: CsvOption = None
    parquet: ParquetOption = None

    def require_free(self, read: Sequence[Path], *, force: bool) -> None:
        """Raise where one could not be written, or would take the place of what is read."""
        outputs = Output(self.html, is_page), Output(self.csv, _is_own_csv), Output(self.parquet, is_parquet)
        require_free(outputs, read, force=force)

    def write(self, found: Sequence[Inspection]) -> None:
        """Write the ones that were given."""
        if self.html is not None:
            write_text(self.html, heads_page(found, shlex.join(["triptych", *sys.argv[1:]])))
        if self.csv is not None:
            write_rows(self.csv, _rows(found))
        if self.parquet is not None:
            write_parquet(_rows(found), self.parquet, [measure.name for measure in MEASURES])

    def given(self) -> list[Path]:
        """Those that were given."""
        return [path for path in self if path is not None]


@grouped
def inspect(
    checkpoints: CheckpointsArgument,
    reading: _Reading,
    files: _Files,
    force: ForceOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure the attention weights of a checkpoint, head by head.

    Reports spectra and ranks of W_QK and W_OV, the similarity of W_Q, W_K and W_V next to chance, symmetry
    and copying. The model is not run.
    """
    names = checkpoints if reading.compare is None else [*checkpoints, reading.compare]
    with launched("cpu") as world:
        world.on_first(lambda: files.require_free(_read(names), force=force))
        found = do_each(names, reading.inspect, world, Inspection)
        world.on_first(lambda: _show(found, files, as_json=as_json))


def _show(all_found: Sequence[Inspection], files: _Files, *, as_json: bool) -> None:
    found = _numbered(all_found)
    files.write(found)
    if as_json:
        records = [_record(inspection) for inspection in found]
        print(json.dumps(records[0] if len(records) == 1 else records, allow_nan=False))
        return
    console = Terminal(soft_wrap=True)
    for inspection in found:
        _print(inspection, console)
    if len(found) > 1:
        console.print(render_table(side_by_side(*found)))
    for path in files.given():
        console.print(f"written: {path}")


def _numbered(found: Sequence[Inspection]) -> list[Inspection]:
    """Checkpoints of the same name have numbers from the second on."""
    seen, numbered = Counter[str](), []
    for one in found:
        seen[one.name] += 1
        number = seen[one.name]
        numbered.append(one if number == 1 else replace(one, name=f"{one.name} ({number})"))
    return numbered


def _is_own_csv(path: Path) -> bool:
    """Whether a file has the columns that `--csv` writes, of this release or another."""
    with path.open("rb") as file:
        return file.readline(1000).startswith(_CSV_START)


def _read(names: Sequence[str]) -> list[Path]:
    """Where checkpoints lie: a tensor file is read with what lies beside it."""
    return [path.parent if path.is_file() else path for path in map(Path, names) if path.exists()]


def _rows(found: Sequence[Inspection]) -> list[dict[str, object]]:
    return [{"checkpoint": inspection.name, **row} for inspection in found for row in inspection.rows()]


def _record(inspection: Inspection) -> dict[str, object]:
    record = asdict(inspection)
    for layer in record["layers"]:
        layer["figures"] = {name: [*map(_plain, values)] for name, values in layer["figures"].items()}
    return {
        **record,
        "summary": (*summary(inspection), *average_lines(inspection)),
        "measures": {measure.name: measure.meaning for measure in MEASURES},
    }


def _plain(figure: Any) -> Any:
    """JSON has no number for what is infinite."""
    return "Infinity" if figure == math.inf else figure


def _print(inspection: Inspection, console: Console) -> None:
    console.print(inspection.name)
    for sentence in summary(inspection):
        console.print(f"  {sentence}")
    for measure in _MAPS:
        lines = shaded_map(inspection, measure)
        if lines:
            console.print()
            console.print("\n".join(lines))
    console.print()
    console.print(render_table(averages(inspection)))
    console.print(render_table(outliers(inspection)))
    if inspection.copies:
        console.print(render_table(near_copies(inspection)))
