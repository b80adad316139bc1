"""`triptych convert`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from triptych.converting.conversion import Conversion, Format, convert_from_hf, convert_to
from triptych.converting.ctranslate2 import Quantization
from triptych.errors import UsageError
from triptych.runs import Run


def convert(
    source: Annotated[
        Path, typer.Argument(help="The folder of a run, or of a Marian model of Hugging Face.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write; it must not be there yet.")],
    to: Annotated[
        Format | None,
        typer.Option("--to", help="hf: a checkpoint for transformers; ctranslate2; onnx."),
    ] = None,
    origin: Annotated[
        Literal["hf"] | None,
        typer.Option("--from", help="hf: read a Marian checkpoint and write a folder of ours."),
    ] = None,
    quantization: Annotated[
        Quantization, typer.Option("--quantization", help="Of the matrices, with --to ctranslate2.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print a record as JSON.")] = False,
) -> None:
    """Convert a model to or from the format of another library.

    A way to write heads that the format has not is multiplied out first, exactly; what does not fit is
    refused with what would.
    """
    if (to is None) == (origin is None):
        raise UsageError("give either --to FORMAT (hf, ctranslate2 or onnx) or --from hf")
    if to is None:
        conversion = convert_from_hf(source, out)
    else:
        conversion = convert_to(Run.open(source, "cpu"), out, to, quantization)
    if as_json:
        print(json.dumps(conversion.record()))
        return
    _print(conversion)


def _print(conversion: Conversion) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in conversion.folded:
        console.print(f"made to fit: {line}")
    for check in conversion.checks:
        difference = check.largest_difference
        found = "" if difference is None else f": largest difference {difference:.2g}"
        note = f" ({check.note})" if check.note else ""
        console.print(f"{'checked' if check.tried else 'not checked'}: {check.what}{found}{note}")
    console.print(
        f"written: {conversion.target} ({conversion.architecture}, {conversion.parameters:,} parameters)"
    )
