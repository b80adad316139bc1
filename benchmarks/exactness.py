"""How far our numbers are from the numbers of `transformers`: the table of docs/reference/exact.md.

python benchmarks/exactness.py FOLDER …      # checkpoints
python benchmarks/exactness.py --tiny        # a tiny model with random weights of every family that runs
"""

import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import triptych

TEXTS = {
    "causal": ("First Citizen: Before we proceed any further, hear me speak.", None),
    "pairs": ("Two men are walking down the street.", "Zwei Männer gehen die Straße entlang."),
}


def row(name: str, source: Path, *, random: bool) -> str:
    """A row of the table; the reason where a model is not run."""
    model = triptych.load(source)
    text, target = TEXTS["pairs" if "cross" in repr(model.layers) or "translate" in model.can else "causal"]
    try:
        found = model.check() if random else model.check(text, target)
    except triptych.TriptychError as error:
        return f"| {name} | not run: {str(error).splitlines()[0][:80]} | | | |"
    loss = "–" if found.loss is None else f"{found.loss:.1e}"
    weights = "–" if found.attention is None else f"{found.attention:.1e}"
    return f"| {name} | {found.logits:.1e} | {found.largest:.3g} | {loss} | {weights} |"


def main(arguments: list[str]) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| model | logits | they reach | loss | attention weights |\n|---|---:|---:|---:|---:|")
    for name in arguments:
        if name != "--tiny":
            print(row(Path(name).name, Path(name), random=False), flush=True)
    if "--tiny" in arguments:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from checkpoints.test_families import made
        from checkpoints.tiny_models import TINY

        for name in TINY:
            with tempfile.TemporaryDirectory() as folder:
                torch.manual_seed(0)
                made(name, Path(folder))
                print(row(f"{name}, tiny", Path(folder), random=True), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
