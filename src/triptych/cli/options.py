"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from triptych.decoding import Precision
from triptych.engines import EngineName
from triptych.errors import UsageError
from triptych.face import Model, load
from triptych.launch import num_on_machine
from triptych.storage.hub import is_hub_id
from triptych.threads import num_cores

# What every command that takes a model says of it.
MODEL = "A run folder, a folder or file in Hugging Face's format, or a name on the Hub."
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

PrecisionOption = Annotated[
    Precision,
    typer.Option(
        "--precision",
        help="Type of the weights. bf16 and int8 (CPU only) are faster; some texts differ from those in fp32. "
        "On x86-64 CPUs no text depends on the others of its batch; docs/generating.md has the exceptions.",
    ),
]
EngineOption = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        help="The library that computes: triptych, or ctranslate2 (pip install 'triptych[ctranslate2]'; "
        "faster in int8 on CPUs; the model is converted first).",
    ),
]
BeamOption = Annotated[
    int | None, typer.Option("--beam", min=1, help="Beam size; 1 is greedy. Default: the recipe's.")
]
AlphaOption = Annotated[float | None, typer.Option("--alpha", min=0, help="Exponent of the length penalty.")]
DeviceOption = Annotated[
    str, typer.Option("--device", help="auto, cpu, cuda or cuda:N. auto uses a GPU if there is one.")
]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Language models: type of the numbers. Default: that of the file."),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=1,
        help="Longest text in tokens. Default: the model's positions, or 8192 where they set no limit.",
    ),
]
WithoutOption = Annotated[
    str | None,
    typer.Option(
        "--without",
        metavar="HEADS",
        help="Switch heads off: 3.2 is head 2 of layer 3, 3 a layer, *.2 a pattern; several with commas.",
    ),
]
LanguagesOption = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--languages",
        metavar="SOURCE TARGET",
        help="Of a checkpoint of several languages (mBART, NLLB): codes of its tokenizer, as de_DE en_XX.",
    ),
]
StopOption = Annotated[
    Literal["certain", "full"] | None,
    typer.Option(
        "--stop",
        help="When beam search ends: certain, when no hypothesis can overtake the finished ones; full "
        "(faster), when the beam is full of finished hypotheses.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Number of processes that translate in parallel, one thread each. Default: the cores. CPU only.",
    ),
]


def open_model(
    source: str | Path,
    device: str = "auto",
    without: str | None = None,
    **options: Any,
) -> Model:
    """The model that a command is given, with the heads of `--without` off."""
    model = load(source, device=device, **options)
    return model if without is None else model.ablate(without)


def open_run(source: str | Path, *arguments: Any, **options: Any) -> Model:
    """As `open_model`, for commands that take a run first of all."""
    if not Path(source).exists() and not is_hub_id(str(source)):
        raise UsageError(f"the run folder {source} does not exist")
    return open_model(source, *arguments, **options)


def torch_dtype(name: Dtype | None) -> torch.dtype | None:
    """The dtype of a name; None for None."""
    return None if name is None else {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}[name]


def number_of_workers(given: int | None) -> int:
    """The workers asked for, or one for each core that this process may use and shares with no other rank."""
    if given is not None:
        return given
    return max(num_cores() // num_on_machine(), 1)
