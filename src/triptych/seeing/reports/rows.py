"""Rows of plain values for CSV files, Parquet files (with `pyarrow`, in the extra `[parquet]`) and pandas."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from triptych.errors import UsageError
from triptych.extras import is_installed, require_extra
from triptych.files import write_atomically, write_text

_GENERATOR = {b"generator": b"triptych"}


def is_parquet(path: Path) -> bool:
    """Return True if a file was made by `write_parquet`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return False
    try:
        with path.open("rb") as file:  # pyarrow requires UTF-8 file names
            metadata = pyarrow.parquet.read_schema(file).metadata or {}
    except (pyarrow.ArrowException, OSError):
        return False
    return bool(metadata.items() >= _GENERATOR.items())


def write_parquet(
    rows: Sequence[Mapping[str, object]], path: Path, figures: Collection[str] = ()
) -> None:
    """Write rows, with a column for each key of the first row."""
    require_extra("parquet", "pyarrow", what="Parquet")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([dict(row) for row in rows])
    # Columns of figures are float64 even if their values are integers or None.
    for place, name in enumerate(table.column_names):
        if name in figures:
            table = table.set_column(
                place, name, table.column(place).cast(pyarrow.float64())
            )
    table = table.replace_schema_metadata(_GENERATOR)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            pyarrow.parquet.write_table(table, file)

    write_atomically(path, write)


def write_csv(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows, with a column for each key of the first row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def data_frame(rows: Sequence[Mapping[str, object]], otherwise: str) -> Any:
    """Return rows as a `pandas.DataFrame`; `otherwise` names what gives the same without pandas."""
    if not is_installed("pandas"):
        raise UsageError(
            f"to_pandas() needs pandas: pip install pandas; {otherwise} without it"
        )
    import pandas  # type: ignore[import-untyped]

    return pandas.DataFrame(list(rows))
