"""Options that several commands share."""

import os
from typing import Annotated, Literal

import typer

from triptych.decoding import Precision

PrecisionOption = Annotated[
    Precision,
    typer.Option(
        "--precision",
        help="Of the model's matrices: fp32; bf16 or int8 are faster, and their translations differ here and "
        "there (int8: CPUs only).",
    ),
]
StopOption = Annotated[
    Literal["certain", "full"] | None,
    typer.Option(
        "--stop",
        help="When beam search leaves a sentence: certain, when nothing can overtake what has ended; full, "
        "faster, when as many hypotheses as the beam holds have ended.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Processes of one thread each that translate side by side; the number of cores if not given. "
        "CPUs only.",
    ),
]


def number_of_workers(given: int | None) -> int:
    """The workers asked for, or one for each core that this process may use."""
    if given is not None:
        return given
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
