"""The validations of a run."""

from pathlib import Path

from triptych.errors import TriptychError
from triptych.training.metrics import read_metrics


def history(folder: Path, flops: float | None = None) -> list[dict[str, float]]:
    """Every validation of a run, with the steps, tokens, seconds and operations before it."""
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except (OSError, TriptychError):
        return []
    found, tokens, seconds = [], 0.0, 0.0
    for record in records:
        tokens, seconds = record.get("tokens", tokens), record.get("seconds", seconds)
        if "valid_loss" in record:
            place = {
                "step": record["step"],
                "tokens": tokens,
                "seconds": seconds,
                "loss": record["valid_loss"],
            }
            if flops is not None:
                place["flops"] = tokens * flops
            found.append({name: float(value) for name, value in place.items()})
    return found
