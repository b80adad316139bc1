"""Rows of plain values as Parquet; `pyarrow` comes with the extra `[parquet]`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych.errors import UsageError
from triptych.files import write_atomically


def write_parquet(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows, a column for each key of the first.

    Raises:
        UsageError: pyarrow is not installed.
        OSError: the file cannot be written; what `path` held stays.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow: pip install 'triptych[parquet]'") from error
    table = pyarrow.Table.from_pylist([dict(row) for row in rows])
    write_atomically(path, lambda temporary: pyarrow.parquet.write_table(table, temporary))
