"""`triptych convert`."""

from pathlib import Path
from typing import Annotated, Literal

from triptych.cli.options import load_model
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json
from triptych.converting.conversion import Conversion
from triptych.errors import UsageError
from triptych.model import Model, load


def convert(
    model: str,
    *,
    out: Path,
    to: Literal["hf", "ctranslate2", "onnx", "gguf", "web"] | None = None,
    origin: Literal["hf"] | None = None,
    converting: Annotated[Options, "Options", Model.convert, "quantization"],
    opening: Annotated[
        Options, "Options", load, "offline strict family adapter shortlist"
    ],
    as_json: bool = False,
) -> None:
    """Convert a model to or from the format of another library.

    A parameterisation that the format does not have is first written as plain W_Q, W_K, W_V and W_O, which
    is exact. For a model that the format cannot hold, the error says why.

    Options:
        out: The output folder, or for gguf and web the file; it must not exist.
        to: The output format: hf (transformers), ctranslate2, onnx, gguf (llama.cpp), or web: one page with
            the model, for a browser without a server.
        origin: The input format, if not a run: hf (a Marian checkpoint).

    Examples:
        triptych convert runs/mine --to hf --out mine-hf
        triptych convert demo --to web --out demo.html
    """
    if (to is None) == (origin is None):
        raise UsageError(
            "give either --to FORMAT (hf, ctranslate2, onnx, gguf or web) or --from hf"
        )
    opened = load_model(model, opening={"device": "cpu", **opening})
    conversion = opened.convert(out, to or "triptych", **converting)
    if as_json:
        print_json(conversion.record())
        return
    _print_conversion(conversion)


def _print_conversion(conversion: Conversion) -> None:
    console = Terminal(soft_wrap=True)
    for line in conversion.folded:
        console.print(f"made to fit: {line}")
    for check in conversion.checks:
        difference = check.largest_difference
        found = "" if difference is None else f": largest difference {difference:.2g}"
        note = f" ({check.note})" if check.note else ""
        console.print(
            f"{'checked' if check.tried else 'not checked'}: {check.what}{found}{note}"
        )
    console.print(
        f"written: {conversion.target} ({conversion.architecture}, {conversion.parameters:,} parameters)"
    )
