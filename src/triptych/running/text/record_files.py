"""Texts from files of records: TSV, JSON Lines, Parquet, and Hugging Face datasets.

Every reader yields `(number, texts)`: the 1-based line or row number, and the unchanged texts of the fields.
A null or a blank line yields empty texts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from triptych.errors import DataError, UsageError, first_line
from triptych.extras import require_extra
from triptych.running.text.lines import (
    PARQUET,
    SURROGATE,
    check_content,
    iterate_file,
    open_file,
)

NumberedTexts = tuple[int, tuple[str, ...]]

_RECORD_ENDINGS = (".tsv", ".jsonl", ".parquet")


def record_ending(path: Path) -> str | None:
    """Return the ending of a file of records, without compression; None for any other file."""
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    return next((ending for ending in _RECORD_ENDINGS if name.endswith(ending)), None)


def read_tsv(
    path: Path, source_column: int, target_column: int
) -> Iterator[NumberedTexts]:
    """Yield the pairs of a tab-separated file; quotes are ordinary characters."""
    needed = max(source_column, target_column)
    for number, line in enumerate(iterate_file(path), start=1):
        if not line.strip():
            yield number, ("", "")
            continue
        cells = line.split("\t")
        if len(cells) < needed:
            raise DataError(
                f"{path}, line {number}: the number of columns is {len(cells)}, but column {needed} is asked "
                "for; separate the columns by tabs, or set source_field and target_field"
            )
        yield number, (cells[source_column - 1], cells[target_column - 1])


def read_jsonl(path: Path, fields: Sequence[str]) -> Iterator[NumberedTexts]:
    """Yield the texts of a file with one JSON object per line."""
    for number, line in enumerate(iterate_file(path), start=1):
        if not line.strip():
            yield number, ("",) * len(fields)
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        # A line of a hundred thousand brackets raises RecursionError.
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: not JSON ({error}); a .jsonl file has one JSON object per line"
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                f"{where}: a JSON {type(record).__name__}, where one object per line is wanted"
            )
        yield number, _texts_at(record, fields, where)


def read_parquet(path: Path, fields: Sequence[str]) -> Iterator[NumberedTexts]:
    """Yield the texts of a Parquet file, with one batch of rows in memory."""
    # Read only the needed columns.
    require_extra("parquet", "pyarrow", what=f"reading {path}")
    import pyarrow
    import pyarrow.parquet

    with open_file(path) as file:
        check_content(file.peek(8), PARQUET, str(path))
        try:
            table = pyarrow.parquet.ParquetFile(file)
            columns = _columns_of(fields, table.schema_arrow.names, str(path))
            batches = table.iter_batches(batch_size=1000, columns=columns)
            records = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from _texts_of(records, fields, str(path))
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is a damaged Parquet file ({first_line(error)}); fetch it again"
            ) from error


def read_hub(
    dataset: str, config_name: str | None, split: str, fields: Sequence[str], base: Path
) -> Iterator[NumberedTexts]:
    """Yield the texts of a dataset of the Hugging Face Hub, or of a local dataset folder."""
    rows, where = _load_hub(dataset, config_name, split, base)
    rows = rows.select_columns(_columns_of(fields, rows.column_names, where))
    names = rows.column_names
    batches = rows.iter(batch_size=1000)
    columns = ([batch[name] for name in names] for batch in batches)
    records = (
        dict(zip(names, row, strict=True))
        for row in chain.from_iterable(zip(*own, strict=True) for own in columns)
    )
    yield from _texts_of(records, fields, where)


def fingerprint_hub(
    dataset: str, config_name: str | None, split: str, base: Path
) -> str:
    """Return the fingerprint of the rows of a dataset."""
    rows, _ = _load_hub(dataset, config_name, split, base)
    return str(rows._fingerprint)


def _load_hub(
    dataset: str, config_name: str | None, split: str, base: Path
) -> tuple[Any, str]:
    """Load the rows of a dataset; return them with their name for messages."""
    if (base / dataset).is_dir():
        dataset = str(base / dataset)
    require_extra("hf", "datasets", what=f"reading dataset {dataset}")
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        rows = datasets.load_dataset(dataset, config_name, split=split)
    except (DatasetsError, OSError, ValueError) as error:
        raise UsageError(
            f"dataset {dataset}, split {split!r}, cannot be loaded: {first_line(error)}"
        ) from error
    return rows, f"dataset {dataset}, split {split!r}"


def _texts_of(
    records: Iterable[Mapping[str, object]], fields: Sequence[str], name: str
) -> Iterator[NumberedTexts]:
    for number, record in enumerate(records, start=1):
        yield number, _texts_at(record, fields, f"{name}, row {number}")


def _columns_of(fields: Sequence[str], names: list[str], where: str) -> list[str]:
    """Return the names of the columns with the fields, without duplicates."""
    columns = {
        field: field if field in names else field.split(".")[0] for field in fields
    }
    for field, column in columns.items():
        if column not in names:
            raise DataError(
                f"{where} has no column {field!r}; its columns are {', '.join(names)}; "
                f"a recipe can name others ({_field_options(fields)})"
            )
    return list(dict.fromkeys(columns.values()))


def _field_options(fields: Sequence[str]) -> str:
    """Return the names of the corpus options for text fields."""
    return "text_field" if len(fields) == 1 else "source_field and target_field"


def _texts_at(
    record: Mapping[str, object], fields: Sequence[str], where: str
) -> tuple[str, ...]:
    return tuple(
        _text_at(record, field, where, _field_options(fields)) for field in fields
    )


def _text_at(record: Mapping[str, object], field: str, where: str, options: str) -> str:
    value = _value_at(record, field, where, options)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: field {field!r} holds a value of type {type(value).__name__}, not a string"
        )
    if "\0" in value:
        raise DataError(
            f"{where}: field {field!r} holds a NUL character, which no text does; remove it"
        )
    # JSON can spell half of a surrogate pair: it is invalid in UTF-8.
    if SURROGATE.search(value):
        raise DataError(
            f"{where}: field {field!r} holds half of a surrogate pair; remove it"
        )
    return value


def _value_at(
    record: Mapping[str, object], field: str, where: str, options: str
) -> object:
    if field in record:
        return record[field]
    value: object = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise DataError(
                f"{where}: no field {field!r}; it has {', '.join(_paths_in(record)) or 'none'}; a "
                f"recipe can name others ({options})"
            )
        value = value[key]
    return value


def _paths_in(record: Mapping[str, object]) -> list[str]:
    """Return the names of the fields, with dotted paths for nested objects."""
    paths: list[str] = []
    for key, value in record.items():
        paths += (
            [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]
        )
    return paths
