"""`triptych fill`."""

import json
from typing import Annotated

import typer

import triptych
from triptych.cli.options import DeviceOption, MaxTokensOption


def fill(
    model: Annotated[
        str, typer.Argument(help="A run folder, a folder in Hugging Face's format, or a name on the Hub.")
    ],
    text: Annotated[str, typer.Argument(help="A text with one or more [MASK].")],
    count: Annotated[
        int, typer.Option("--count", min=1, help="How many tokens are shown for each mask.")
    ] = 5,
    max_tokens: MaxTokensOption = None,
    device: DeviceOption = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per mask, with probabilities and texts.")
    ] = False,
) -> None:
    """Predict the masked tokens of a text.

    Each mask is predicted with the others as they are.
    """
    for number, found in enumerate(triptych.fill(model, text, count, device, max_tokens=max_tokens), start=1):
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
            print(json.dumps({"mask": number, "fillings": fillings}, ensure_ascii=False))
            continue
        for one in found:
            print(f"{number}  {one.probability:.4f}  {one.text.strip() or one.piece}  {one.filled}")
