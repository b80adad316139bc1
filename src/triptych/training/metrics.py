"""Metrics of a run: `metrics.jsonl`, one JSON object a line in order of steps, and TensorBoard's files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from triptych.errors import DataError, TriptychError
from triptych.extras import is_installed
from triptych.files import write_text
from triptych.untrusted import LONGEST_METRICS, read_limited

MetricsRecord = Mapping[str, float | int | str | list[float]]


@final
class MetricsLog:
    """Writer of a run's figures: lines of JSON in `metrics.jsonl`, and TensorBoard's files if installed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._board: Any = None
        self._forgotten_from: int | None = (
            None  # first step of which TensorBoard drops older records
        )

    def add(self, record: MetricsRecord) -> None:
        """Append a record with its "step"."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise TriptychError(
                f"{self.path} could not be written ({error.strerror}): free some space, then resume the run"
            ) from None
        if not is_installed("tensorboard"):
            return
        if self._board is None:
            # An optional library, slow to import.
            from torch.utils.tensorboard import SummaryWriter

            folder = self.path.parent / "tensorboard"
            self._board = SummaryWriter(str(folder), purge_step=self._forgotten_from)
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._board.add_scalar(name, value, record["step"])

    def forget_after(self, step: int, *, validated: bool) -> None:
        """Drop the records after the state of `step`: later steps, the end of the run, an incomplete line.

        `validated` is True if the state was saved after the validation of this step.
        """
        self._forgotten_from = step + 1 if validated else step
        if self.path.exists():
            records = read_metrics(self.path)
            # A validation at `step` itself is repeated unless the state was saved after it.
            kept = [
                record
                for record in records
                if record["step"] <= step
                and not _begins(record, "average_")
                and (
                    validated or record["step"] < step or not _begins(record, "valid_")
                )
            ]
            write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _begins(record: Mapping[str, Any], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in record)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics file; a last line cut short by a crash is left out."""
    records: list[dict[str, Any]] = []
    try:
        lines = read_limited(path, LONGEST_METRICS).splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif number < len(lines):  # only the last line may be incomplete
            raise DataError(
                f"{path}, line {number}: not a record of a step: repair or remove the line"
            )
    return records
