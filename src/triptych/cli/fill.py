"""`triptych fill`."""

from typing import Annotated

from triptych.cli.options import load_model
from triptych.cli.signatures import Options
from triptych.cli.terminal import print_json, write_output
from triptych.model import Model, load


def fill(
    model: str,
    text: str,
    *,
    filling: Annotated[Options, "Filling", Model.fill, "count max_tokens"],
    opening: Annotated[
        Options, "Model", load, "device dtype offline strict family adapter"
    ],
    without: str | None = None,
    as_json: bool = False,
) -> None:
    """Predict the masked tokens of a text.

    Each mask is predicted while the other masks stay in place.

    Options:
        text: A text with one or more [MASK].
        as_json: Print one JSON object per mask, with probabilities and texts.

    Examples:
        triptych fill bert-base-uncased "The capital of France is [MASK]."
        triptych fill runs/tatoeba-mlm "Tom [MASK] to school." --count 3 --json
    """
    found = load_model(model, without, opening).fill(text, **filling)
    for number, fillings in enumerate(found, start=1):
        if as_json:
            records = [
                {
                    "token": one.piece,
                    "id": one.token,
                    "probability": one.probability,
                    "text": one.filled,
                }
                for one in fillings
            ]
            record = {"mask": number, "fillings": records}
            print_json(record)
            continue
        for one in fillings:
            shown = one.text.strip() or one.piece
            write_output(f"{number}  {one.probability:.4f}  {shown}  {one.filled}\n")
