"""`triptych inspect`."""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from triptych.cli.options import load_model, numbers
from triptych.cli.outputs import Output, begins_with, require_free
from triptych.cli.signatures import Options
from triptych.cli.terminal import (
    MOST_HEADS,
    Terminal,
    print_cut,
    print_json,
    print_whole,
    print_written,
    progress_bar,
    refuse_all,
)
from triptych.files import write_text
from triptych.model import Model, load
from triptych.processes import do_each, launched
from triptych.seeing.adapter_effects import AdapterEffects
from triptych.seeing.inspection import (
    MEASURES,
    Inspection,
    heads_page,
    side_by_side,
    telling_heads,
)
from triptych.seeing.reports import (
    is_page,
    is_parquet,
    render_table,
    write_csv,
    write_parquet,
)

# The first columns of the output of `--csv`, in all releases.
_CSV_START = b"checkpoint,stack,layer,kind,head,module,"


def inspect(
    models: Sequence[str],
    *,
    layers: str | None = None,
    heads: str | None = None,
    show_all: bool = False,
    compare: str | None = None,
    measuring: Annotated[Options, "Options", Model.inspect, "ignore_rotary"],
    opening: Annotated[Options, "Options", load, "family offline strict adapter"],
    html: Path | None = None,
    csv: Path | None = None,
    parquet: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Measure the attention weights of a checkpoint, head by head.

    Reports spectra and ranks of W_QK and W_OV, the similarity of W_Q, W_K and W_V compared with chance,
    symmetry and copying; --adapter adds the changes of W_QK and W_OV by the adapter, measured and decoded to
    tokens. Where a model has more than ten layers, the terminal shows the ten heads farthest from the mean;
    --all shows maps of every head. The model is not run: `triptych attend --over` measures what heads do on a
    text.

    Files:
        html: Write an HTML page to this file.
        csv: Write one row per head to this CSV file.
        parquet: Write one row per head to this Parquet file.
        force: Replace existing files, even if triptych did not write them.

    Options:
        layers: Layers to read: 0,3 or 0-5. Default: all.
        heads: Heads to read: 0,3 or 0-5. Default: all.
        show_all: Show every head in the terminal.
        compare: Another checkpoint to compare with.
        as_json: Print everything as JSON.

    Examples:
        triptych inspect gpt2
        triptych inspect meta-llama/Llama-3.2-1B --layers 0,1 --html heads.html
    """
    refuse_all(show_all, as_json=as_json)
    names = models if compare is None else [*models, compare]
    outputs = (
        Output(html, is_page),
        Output(csv, begins_with(_CSV_START)),
        Output(parquet, is_parquet),
    )

    def measure(name: str) -> tuple[Inspection, AdapterEffects | None]:
        model = load_model(name, opening=opening)
        with progress_bar("reading {task.description}", name) as tell:
            measured = model.inspect(
                layers=numbers(layers, "--layers"),
                heads=numbers(heads, "--heads"),
                **measuring,
                progress=tell,
            )
        return measured, model.adapter_effects()

    def show(measured: Sequence[tuple[Inspection, AdapterEffects | None]]) -> None:
        found = _with_distinct_names([inspection for inspection, _ in measured])
        effects = [own for _, own in measured]
        if html is not None:
            write_text(html, heads_page(found, shlex.join(["triptych", *sys.argv[1:]])))
        rows = list[dict[str, Any]]()
        for one in found:
            rows += [{"checkpoint": one.name, **row} for row in one.rows()]
        if csv is not None:
            write_csv(rows, csv)
        if parquet is not None:
            write_parquet(rows, parquet, [measure.name for measure in MEASURES])
        if as_json:
            records = [
                inspection.record() | ({} if own is None else {"adapter": _record(own)})
                for inspection, own in zip(found, effects, strict=True)
            ]
            print_json(records[0] if len(records) == 1 else records)
            return
        console = Terminal(soft_wrap=True)
        for inspection, own in zip(found, effects, strict=True):
            is_cut = (
                not show_all
                and layers is None
                and heads is None
                and len(inspection.layers) > MOST_HEADS
            )
            lines, tables = inspection.shown(with_maps=not is_cut)
            console.print("\n".join(lines))
            if is_cut:
                telling = telling_heads(inspection, MOST_HEADS)
                print_whole(telling, console)
                print_cut(inspection.num_heads, console)
            of_adapter = [] if own is None else [own.table(), own.token_table()]
            for table in [*tables, *of_adapter]:
                if table is not None:
                    console.print(render_table(table))
        if len(found) > 1:
            console.print(render_table(side_by_side(*found)))
        print_written((html, csv, parquet), console)

    # A tensor file is read with the other files of its folder.
    read = [
        path.parent if path.is_file() else path
        for path in map(Path, names)
        if path.exists()
    ]
    with launched("cpu") as world:
        world.on_first(lambda: require_free(outputs, read, force=force))
        found = do_each(names, measure, world)
        world.on_first(lambda: show(found))


def _record(effects: AdapterEffects) -> dict[str, Any]:
    return effects.record() | {"decoded": effects.decoded()}


def _with_distinct_names(found: Sequence[Inspection]) -> list[Inspection]:
    """Append a number to the name of the second and further checkpoints of one name."""
    seen = Counter[str]()
    numbered = []
    for one in found:
        seen[one.name] += 1
        number = seen[one.name]
        numbered.append(
            one if number == 1 else replace(one, name=f"{one.name} ({number})")
        )
    return numbered
