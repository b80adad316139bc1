"""`triptych evaluate`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

import triptych
from triptych.cli.options import PrecisionOption, StopOption, WorkersOption, number_of_workers
from triptych.cli.outputs import ForceOption, Output, require_free, unmarked
from triptych.cli.progress import progress_bar
from triptych.errors import DataError
from triptych.files import write_text
from triptych.text import read_lines


def evaluate(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or a folder with a Marian model in Hugging Face's format.")
    ],
    source: Annotated[Path, typer.Option("--source", help="Text to translate, one sentence per line.")],
    reference: Annotated[Path, typer.Option("--reference", help="Reference translations, line by line.")],
    beam: Annotated[int | None, typer.Option("--beam", min=1, help="Beam size; 1 is greedy.")] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", min=0, help="Exponent of the length penalty.")
    ] = None,
    stop: StopOption = None,
    precision: PrecisionOption = "fp32",
    workers: WorkersOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the translations to this file.")
    ] = None,
    force: ForceOption = False,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N. auto uses a GPU if there is one.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Score a model on a test text with BLEU and chrF.

    The scores are sacreBLEU's, with their signatures and 95 % bootstrap intervals.
    """
    sources, references = read_lines(source), read_lines(reference)
    if len(sources) != len(references):
        raise DataError(f"{source} has {len(sources):,} lines but {reference} has {len(references):,}")
    if not sources:
        raise DataError(f"{source} is empty: there is nothing to evaluate")
    require_free([Output(out, unmarked)], (run, source, reference), force=force)
    with progress_bar("{task.description}", "translating", of_bytes=False) as tell:
        found = triptych.evaluate(
            run,
            sources,
            references,
            device,
            beam_size=beam,
            alpha=alpha,
            stop=stop,
            precision=precision,
            workers=number_of_workers(workers),
            progress=lambda done, total: tell("translating", done, total),
        )
    if out is not None:
        write_text(out, "".join(f"{text}\n" for text in found.translations))
    if as_json:
        print(json.dumps({"run": str(run), **found.figures()}))
        return
    for score in found.scores:
        print(score.line())
    count = len(sources)
    print(
        f"{count:,} sentences in {found.seconds:.1f} s ({count / found.seconds:.1f} a second), "
        f"beam {found.options.beam_size}, α {found.options.alpha}, {precision}, workers {found.workers}",
        file=sys.stderr,
    )
