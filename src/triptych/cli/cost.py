"""`triptych cost`."""

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import triptych
from triptych.cli.groups import grouped
from triptych.cli.outputs import ForceOption, Output, require_free
from triptych.cli.progress import progress_bar
from triptych.cli.tables import print_whole
from triptych.cli.terminal import Terminal
from triptych.costing import pages
from triptych.costing.counting import CostReport, CostSpec
from triptych.costing.timing import TimingReport
from triptych.errors import UsageError
from triptych.models.device import find_device
from triptych.reports import is_page, render_table, require_charts, write_report

ModelWidthOption = Annotated[int, typer.Option("--d-model", help="Size of the input and the output.")]
HeadsOption = Annotated[int, typer.Option("--num-heads", help="Number of query heads.")]
QueryWidthOption = Annotated[
    int | None,
    typer.Option("--d-k", help="Size of queries and keys per head. Default: d_model / num_heads."),
]
ValueWidthOption = Annotated[
    int | None, typer.Option("--d-v", help="Size of values per head. Default: d_model / num_heads.")
]
KVHeadsOption = Annotated[
    int | None, typer.Option("--num-kv-heads", help="Number of key-value heads of 'grouped'.")
]
LatentOption = Annotated[int | None, typer.Option("--d-latent", help="Size of the latent of 'latent'.")]
SharedOption = Annotated[
    int | None, typer.Option("--d-shared", help="Number of channels that 'collaborative' shares.")
]
BiasOption = Annotated[bool, typer.Option("--bias", help="Give every map a bias.")]
LengthOption = Annotated[
    int, typer.Option("--length", help="Sequence length in training and prefill, in tokens.")
]
ContextOption = Annotated[
    int,
    typer.Option("--context", help="Context length of a decoding step, in tokens, including the new one."),
]
BatchOption = Annotated[int, typer.Option("--batch", help="Batch size.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="Type of weights, activations and cache: fp32, bf16 or fp16.")
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option("--only", help="A parameterisation to show. May be repeated. Default: all."),
]
FormulasOption = Annotated[bool, typer.Option("--formulas", help="Also show the forms and the formulas.")]
MeasureOption = Annotated[bool, typer.Option("--measure", help="Also measure their speed on this machine.")]
SecondsOption = Annotated[
    float | None,
    typer.Option("--seconds", help="With --measure: seconds per figure, roughly. Default: 1."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="With --measure: cpu, cuda or cuda:N. Default: cpu.")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Write an HTML page with charts to this file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


class _Sizes(NamedTuple):
    """What is counted."""

    d_model: ModelWidthOption = 512
    num_heads: HeadsOption = 8
    d_k: QueryWidthOption = None
    d_v: ValueWidthOption = None
    num_kv_heads: KVHeadsOption = None
    d_latent: LatentOption = None
    d_shared: SharedOption = None
    biases: BiasOption = False
    length: LengthOption = 512
    context: ContextOption = 2048
    batch: BatchOption = 1
    dtype: DtypeOption = "fp32"
    only: OnlyOption = None

    def spec(self) -> CostSpec:
        """The library's record."""
        given: dict[str, Any] = self._asdict()
        if only := given.pop("only"):
            given["parameterisations"] = tuple(only)
        return CostSpec(**given)


class _Timing(NamedTuple):
    """Whether and how speed is measured."""

    measure: MeasureOption = False
    seconds: SecondsOption = None
    device: DeviceOption = None

    def measure_times(self, report: CostReport) -> TimingReport | None:
        """Times, if they are asked for."""
        if not self.measure:
            if self.seconds is not None or self.device is not None:
                given = "--device" if self.seconds is None else "--seconds"
                raise UsageError(f"{given} needs --measure: add it, or leave out {given}")
            return None
        seconds = 1.0 if self.seconds is None else self.seconds
        if not 0 <= seconds < math.inf:
            raise UsageError(f"--seconds is {seconds}: it must be 0 or more")
        with progress_bar("timing {task.description}", of_bytes=False) as tell:
            found = find_device("cpu" if self.device is None else self.device)
            return triptych.measure_times(report, seconds=seconds, device=found, progress=tell)


@grouped
def cost(
    sizes: _Sizes,
    formulas: FormulasOption = False,
    *,
    timing: _Timing,
    html: HtmlOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the costs of the parameterisations of attention.

    Reports parameters, FLOPs, bytes and cache of each at one size.
    """
    try:
        report = triptych.cost(sizes.spec())
    except ValueError as error:
        raise UsageError(str(error)) from None
    require_free([Output(html, is_page)], (), force=force)
    if html is not None:
        require_charts()  # before anything is measured
    timed = timing.measure_times(report)
    if html is not None:
        command = shlex.join(["triptych", *sys.argv[1:]])
        write_report(pages.cost_page(report, timed, command), html)
    if as_json:
        figures = report.figures()
        print(json.dumps(figures if timed is None else {**figures, "times": timed.figures()}))
        return
    _print(report, timed, formulas)
    if html is not None:
        Terminal().print(f"page: {html}", soft_wrap=True)


def _print(report: CostReport, timed: TimingReport | None, formulas: bool) -> None:
    console = Terminal()
    console.print(pages.setting(report.spec))
    console.print(pages.work(report.spec))
    if own := pages.own_sizes(report):
        console.print(own)
    print_whole(pages.cost_table(report), console)
    for note in (*pages.notes(report), *pages.LEGEND):
        console.print(note, soft_wrap=True)
    if formulas:
        console.print()
        console.print(render_table(pages.formula_table(report)))
        for line in pages.FORMULA_LEGEND:
            console.print(line, soft_wrap=True)
    if timed is not None:
        console.print()
        console.print(pages.machine(timed))
        print_whole(pages.timing_table(timed), console)
        for line in pages.TIMING_LEGEND:
            console.print(line, soft_wrap=True)
