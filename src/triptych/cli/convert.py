"""`triptych convert`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from triptych.cli.options import MODEL, open_run
from triptych.cli.terminal import Terminal
from triptych.converting.checks import Quantization
from triptych.converting.conversion import Conversion
from triptych.errors import UsageError


def convert(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The output folder; it must not exist.")],
    to: Annotated[
        Literal["hf", "ctranslate2", "onnx"] | None,
        typer.Option("--to", help="The output format: hf (transformers), ctranslate2 or onnx."),
    ] = None,
    origin: Annotated[
        Literal["hf"] | None,
        typer.Option("--from", help="The input format, if not a run: hf (a Marian checkpoint)."),
    ] = None,
    quantization: Annotated[
        Quantization, typer.Option("--quantization", help="Type of the weights with --to ctranslate2.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a model to or from the format of another library.

    A parameterisation that the format does not have is multiplied out first, which is exact. A model
    that does not fit is refused with what to do.
    """
    if (to is None) == (origin is None):
        raise UsageError("give either --to FORMAT (hf, ctranslate2 or onnx) or --from hf")
    conversion = open_run(source, "cpu").convert(out, to or "triptych", quantization)
    if as_json:
        print(json.dumps(conversion.record()))
        return
    _print(conversion)


def _print(conversion: Conversion) -> None:
    console = Terminal(soft_wrap=True)
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
