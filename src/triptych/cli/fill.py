"""`triptych fill`."""

import json
from typing import Annotated

import typer

from triptych.cli.options import MODEL, DeviceOption, MaxTokensOption, WithoutOption, open_model
from triptych.cli.terminal import write_output


def fill(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
    text: Annotated[str, typer.Argument(help="A text with one or more [MASK].")],
    count: Annotated[
        int, typer.Option("--count", min=1, help="How many tokens are shown for each mask.")
    ] = 5,
    max_tokens: MaxTokensOption = None,
    device: DeviceOption = "auto",
    without: WithoutOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per mask, with probabilities and texts.")
    ] = False,
) -> None:
    """Predict the masked tokens of a text.

    Each mask is predicted with the others as they are.
    """
    for number, found in enumerate(
        open_model(source, device, without).fill(text, count, max_tokens=max_tokens), start=1
    ):
        if as_json:
            fillings = [
                {
                    "token": one.piece,
                    "id": one.token,
                    "probability": one.probability,
                    "text": one.filled,
                }
                for one in found
            ]
            write_output(json.dumps({"mask": number, "fillings": fillings}, ensure_ascii=False) + "\n")
            continue
        for one in found:
            shown = one.text.strip() or one.piece
            write_output(f"{number}  {one.probability:.4f}  {shown}  {one.filled}\n")
