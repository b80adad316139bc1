"""`triptych demo`."""

from pathlib import Path

import typer

import triptych
from triptych.cli.process import prepare_training
from triptych.cli.terminal import Terminal, print_json, training_display
from triptych.demonstration import Interrupted
from triptych.seeing.reports import render_attention, render_samples


def demo(
    *, out: Path = Path("demo"), force: bool = False, as_json: bool = False
) -> None:
    """Train a small translator, test it, and write a report.

    German numbers, dates, times and amounts of money become English. Needs no download and takes a few
    minutes on two cores.

    Options:
        out: The folder for the run and the report.
        force: Use a folder that has other files. Files with the names of the demo's are replaced.

    Examples:
        triptych demo
        triptych demo --out elsewhere --json
    """
    prepare_training()
    display = training_display()
    display.say(
        "training a German-English translator of numbers, dates, times and money"
    )
    result = triptych.demo(out, display, force=force)
    if isinstance(result, Interrupted):
        display.say(
            "stopped, saved. Go on with: triptych demo"
            + ("" if out == Path("demo") else f" --out {out}")
        )
        raise typer.Exit(128 + result.signal_number)
    if as_json:
        print_json(result.figures())
        return
    console = Terminal()
    console.print(render_samples(result.samples))
    console.print(render_attention(result.picture))
    console.print(
        f"exact match on {result.num_tested:,} unseen sentences: {result.exact_match:.1%}   "
        f"BLEU {result.bleu:.1f}   {result.seconds / 60:.1f} minutes of training"
    )
    folding = result.folding
    console.print(
        f"{folding.site} was trained with two maps in a row; folded into one: "
        f"{folding.num_same:,} of {folding.num_tested:,} translations the same, "
        f"{folding.layer_parameters[0]:,} → {folding.layer_parameters[1]:,} parameters, "
        f"{folding.speedup:.2f} times as fast"
    )
    console.print(f"report: {result.report}", soft_wrap=True)
