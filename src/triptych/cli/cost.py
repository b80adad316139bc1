"""`triptych cost`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import triptych
from triptych.cli.outputs import Output, require_free
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, print_whole
from triptych.errors import UsageError
from triptych.seeing.costing import (
    CostReport,
    CostSpec,
)
from triptych.seeing.costing import cost_pages as pages
from triptych.seeing.reports import is_page, render_table, write_report


def cost(
    *,
    sizes: Annotated[
        Options,
        "Sizes",
        CostSpec,
        "d_model num_heads d_k d_v num_kv_heads d_latent d_shared biases length context batch dtype",
    ],
    only: Sequence[str] = (),
    formulas: bool = False,
    html: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Compare the costs of the parameterisations of attention.

    Reports parameters, FLOPs, bytes and cache of each at one size.

    Options:
        only: A parameterisation to show. May be repeated. Default: all.
        formulas: Also show the forms and the formulas.
        html: Write an HTML page with charts to this file.

    Examples:
        triptych cost --d-model 1024 --num-heads 16
        triptych cost --only factored --only grouped --num-kv-heads 2 --formulas
    """
    if only:
        sizes["parameterisations"] = tuple(only)
    try:
        report = triptych.cost(CostSpec(**sizes))
    except ValueError as error:
        raise UsageError(str(error)) from None
    require_free([Output(html, is_page)], (), force=force)
    if html is not None:
        command = shlex.join(["triptych", *sys.argv[1:]])
        write_report(pages.cost_page(report, command), html)
    if as_json:
        print_json(report.figures())
        return
    _print_cost(report, formulas)
    if html is not None:
        Terminal().print(f"page: {html}", soft_wrap=True)


def _print_cost(report: CostReport, formulas: bool) -> None:
    console = Terminal()
    console.print(pages.describe_layer(report.spec))
    console.print(pages.describe_work(report.spec))
    if own := pages.own_sizes(report):
        console.print(own)
    print_whole(pages.counts_table(report), console)
    for note in (*pages.notes(report), *pages.LEGEND):
        console.print(note, soft_wrap=True)
    if formulas:
        console.print()
        console.print(render_table(pages.formula_table(report)))
        for line in pages.FORMULA_LEGEND:
            console.print(line, soft_wrap=True)
