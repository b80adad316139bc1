"""`triptych evaluate`."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from triptych import runs
from triptych.cli.options import PrecisionOption, StopOption, WorkersOption, number_of_workers
from triptych.cli.outputs import ForceOption, Output, require_free, unmarked
from triptych.decoding import score_translations
from triptych.errors import DataError
from triptych.files import write_text
from triptych.text import read_lines

_LINES_AT_A_TIME = 256


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
    opened = runs.Run.open(run, device)
    options = opened.search_options(beam, alpha, stop=stop)
    num_workers = number_of_workers(workers)
    started = time.monotonic()
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    chunks = [order[start : start + _LINES_AT_A_TIME] for start in range(0, len(order), _LINES_AT_A_TIME)]
    texts = [""] * len(sources)
    console = Console(stderr=True)
    with opened.translator(options, precision=precision, workers=num_workers) as translator:
        found = translator.translate_stream([[sources[i] for i in chunk] for chunk in chunks])
        bar = {"console": console, "disable": not console.is_terminal, "total": len(order)}
        for i, translation in track(zip(order, found, strict=True), "translating", **bar):  # type: ignore[arg-type]
            texts[i] = translation.text
    seconds = time.monotonic() - started
    if out is not None:
        write_text(out, "".join(f"{text}\n" for text in texts))
    scores = score_translations(texts, references)
    if as_json:
        record = {
            "run": str(run),
            "sentences": len(texts),
            "seconds": round(seconds, 3),
            "beam_size": options.beam_size,
            "alpha": options.alpha,
            "stop": options.stop,
            "precision": precision,
            "workers": num_workers,
            "scores": [
                {
                    "name": score.name,
                    "value": score.value,
                    "interval": [score.low, score.high],
                    "signature": score.signature,
                }
                for score in scores
            ],
        }
        print(json.dumps(record))
        return
    for score in scores:
        print(score.line())
    print(
        f"{len(texts):,} sentences in {seconds:.1f} s ({len(texts) / seconds:.1f} a second), "
        f"beam {options.beam_size}, α {options.alpha}, {precision}, workers {num_workers}",
        file=sys.stderr,
    )
