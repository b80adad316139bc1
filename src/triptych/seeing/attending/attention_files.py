"""Attention weights as JSON, CSV and NPZ, written head by head with only a block in memory."""

import csv
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.errors import UsageError
from triptych.files import write_atomically
from triptych.running.measuring import Part
from triptych.seeing.attending.written_tokens import TokenWriter

# Larger files are refused: they would take gigabytes.
MOST_WEIGHTS = 1 << 28
DIGITS = 7
_NPZ_MARK = "triptych_attention.npy"
CSV_COLUMNS = (
    "text",
    "kind",
    "layer",
    "head",
    "query",
    "query_token",
    "key",
    "key_token",
    "weight",
)


class Saved(NamedTuple):
    """Data of a text to write."""

    record: dict[str, Any]  # the model and the tokens of the text, for JSON
    parts: Sequence[Part]  # heads to write
    top: int | None = None  # number of largest weights per query; all if None
    writer: TokenWriter | None = (
        None  # decoder of the heads' outputs for JSON; omitted if None
    )

    def require_moderate(self) -> None:
        """Check that the number of weights fits a file."""
        if (
            self.top is None
            and (count := sum(part.num_weights for part in self.parts)) > MOST_WEIGHTS
        ):
            raise UsageError(
                f"these heads have {count:,} weights, and a file may have {MOST_WEIGHTS:,}: choose heads "
                "(--heads), or keep the largest weights of each token (--top 16)"
            )


def json_pieces(saved: Saved) -> Iterator[str]:
    """Yield the text of a JSON object in pieces: tokens, and the weights of every head to 7 digits.

    With a writer, `writes` of a head lists the tokens nearest to the head's output for each key, or is null.
    """
    saved.require_moderate()
    stacks = dict.fromkeys(part.stack for part in saved.parts)
    sides = {
        stack.kind: {"rows": stack.queries, "columns": stack.keys} for stack in stacks
    }
    record = {**saved.record, "sides": sides}
    # The closing brace follows after the heads.
    yield _dumped(record)[:-1] + ', "heads": ['
    first = True
    for part in saved.parts:
        for head in part.heads:
            record = _head_record(part, head, saved.top)
            if saved.writer is not None:
                record["writes"] = saved.writer.of(part, head)
            yield "" if first else ", "
            yield from _pieces_of_head(record)
            first = False
    yield "]}"


def _pieces_of_head(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a head row by row: writing a large head at once would block every other thread."""
    before = "{"
    for name, value in record.items():
        yield f"{before}{_dumped(name)}: "
        if name == "weights":
            yield "["
            yield from (
                f"{', ' if number else ''}{_dumped(row)}"
                for number, row in enumerate(value)
            )
            yield "]"
        else:
            yield _dumped(value)
        before = ", "
    yield "}"


def head_records(
    parts: Sequence[Part], first: int = 0, rows: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one record per head for JSON: its name, the tokens of rows and columns, and the weights."""
    for part in parts:
        tokens = part.stack.queries[first:] if rows is None else rows
        for head in part.heads:
            (weights,) = part.layer.weights(slice(first, None), [head]).tolist()
            yield {
                **_place_of_head(part, head),
                "rows": list(tokens),
                "columns": list(part.stack.keys),
                "weights": [_rounded(row) for row in weights],
            }


def _place_of_head(part: Part, head: int) -> dict[str, Any]:
    return {"kind": part.stack.kind, "layer": part.layer.number, "head": head}


def _head_record(part: Part, head: int, top: int | None) -> dict[str, Any]:
    record = _place_of_head(part, head)
    if top is None:
        rows = [
            *chain.from_iterable(
                block.weights[0].tolist() for block in part.layer.blocks([head])
            )
        ]
        return {**record, "weights": [_rounded(row) for row in rows]}
    keys, weights, left_out = _kept(part, head, top)
    return {
        **record,
        "keys": keys.tolist(),
        "weights": [_rounded(row) for row in weights.tolist()],
        "left_out": _rounded(left_out.tolist()),
    }


def write_attention_csv(texts: Sequence[Saved], path: Path) -> None:
    """Write one row for every weight above 0, with the tokens."""
    for saved in texts:
        saved.require_moderate()

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(CSV_COLUMNS)
            for number, saved in enumerate(texts):
                for part in saved.parts:
                    for head in part.heads:
                        place = number, part.stack.kind, part.layer.number, head
                        writer.writerows(
                            (*place, *row) for row in _looks(part, head, saved.top)
                        )

    write_atomically(path, write)


def weight_rows(saved: Saved) -> list[dict[str, object]]:
    """Return a record for every weight above 0, with the columns of the CSV file but `text`."""
    saved.require_moderate()
    found: list[dict[str, object]] = []
    for part in saved.parts:
        for head in part.heads:
            place = part.stack.kind, part.layer.number, head
            found += [
                dict(zip(CSV_COLUMNS[1:], (*place, *row), strict=True))
                for row in _looks(part, head, saved.top)
            ]
    return found


def _looks(
    part: Part, head: int, top: int | None
) -> Iterator[tuple[int, str, int, str, float]]:
    """Yield query, its token, key, its token and weight, for weights above 0."""
    queries = part.stack.queries
    keys = part.stack.keys
    if top is not None:
        places, kept, _ = _kept(part, head, top)
        for query, (own, weights) in enumerate(
            zip(places.tolist(), kept.tolist(), strict=True)
        ):
            for key, weight in zip(own, weights, strict=True):
                if weight > 0:
                    yield query, queries[query], key, keys[key], round(weight, DIGITS)
        return
    # Block by block: the whole matrix may not fit into memory.
    for block in part.layer.blocks([head]):
        for query, row in enumerate(block.weights[0].tolist(), start=block.rows.start):
            for key, weight in enumerate(row):
                if weight > 0:
                    yield query, queries[query], key, keys[key], round(weight, DIGITS)


def write_npz(texts: Sequence[Saved], path: Path) -> None:
    """Write NumPy arrays, readable by `numpy.load` without pickle.

    Every layer has `KIND.LAYER`, `[heads, queries, keys]` in float32, and `KIND.LAYER.heads`, the numbers of
    the heads; with `top` instead `KIND.LAYER.keys` and `KIND.LAYER.weights`, `[heads, queries, top]`, and
    `KIND.LAYER.left_out`. Also `tokens`, `ids`, `num_generated`, `KIND.rows` and `KIND.columns`. If there are
    several texts, every name begins with the number of the text, as in `2/tokens`.
    """
    for saved in texts:
        saved.require_moderate()

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(
            temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as archive:
            _write_array(archive, _NPZ_MARK.removesuffix(".npy"), np.array(1))
            for number, saved in enumerate(texts):
                _write_text(archive, f"{number}/" if len(texts) > 1 else "", saved)

    write_atomically(path, write)


def _write_text(archive: zipfile.ZipFile, prefix: str, saved: Saved) -> None:
    arrays = {name: value for name, value in saved.record.items() if name != "model"}
    for stack in dict.fromkeys(part.stack for part in saved.parts):
        arrays |= {
            f"{stack.kind}.rows": stack.queries,
            f"{stack.kind}.columns": stack.keys,
        }
    for name, values in arrays.items():
        _write_array(archive, f"{prefix}{name}", np.array(values))
    for part in saved.parts:
        name = f"{prefix}{part.stack.kind}.{part.layer.number}"
        _write_array(archive, f"{name}.heads", np.array(part.heads))
        if saved.top is None:
            _write_weights(archive, name, part)
            continue
        kept = zip(*(_kept(part, head, saved.top) for head in part.heads), strict=True)
        for what, arrays_of_heads in zip(
            ("keys", "weights", "left_out"), kept, strict=True
        ):
            _write_array(archive, f"{name}.{what}", np.stack(arrays_of_heads))


def _write_array(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    _write_member(
        archive,
        name,
        lambda file: np.lib.format.write_array(file, array, allow_pickle=False),
    )


def _write_weights(archive: zipfile.ZipFile, name: str, part: Part) -> None:
    """Write all weights of some heads in blocks."""
    shape = len(part.heads), len(part.stack.queries), len(part.stack.keys)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}

    def write(file: Any) -> None:
        np.lib.format.write_array_header_1_0(file, header)
        for head in part.heads:
            for block in part.layer.blocks([head]):
                file.write(
                    np.ascontiguousarray(
                        block.weights[0].float().cpu().numpy(), "<f4"
                    ).tobytes()
                )

    _write_member(archive, name, write)


def _write_member(
    archive: zipfile.ZipFile, name: str, write: Callable[[Any], None]
) -> None:
    # A fixed time makes files reproducible.
    member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
    member.compress_type = zipfile.ZIP_DEFLATED
    with archive.open(member, "w", force_zip64=True) as file:
        write(file)


def is_attention_npz(path: Path) -> bool:
    """Return True if a file was written by `write_npz`."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return _NPZ_MARK in archive.namelist()


def is_attention_csv(path: Path) -> bool:
    """Return True if a file has the columns of `write_attention_csv`."""
    with path.open("rb") as file:
        return file.readline(1000) == f"{','.join(CSV_COLUMNS)}\n".encode()


def _kept(
    part: Part, head: int, top: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the keys of each query's largest weights, these weights, and the sum of the omitted weights."""
    (kept,) = part.layer.maps(top, [head])
    assert kept.keys is not None
    assert kept.left_out is not None
    return kept.keys, kept.weights, kept.left_out


def _rounded(row: Sequence[float]) -> list[float]:
    return [round(weight, DIGITS) for weight in row]


def _dumped(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
